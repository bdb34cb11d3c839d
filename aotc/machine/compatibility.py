"""Whether an artifact can run on a machine: rules, each with both values and, where it is not kept, why not.

- operating system and architecture: equal.
- CPU features: all that the target needs are here (FACTS of the hardware: a missing one ends in SIGILL).
- frozen weights on a CPU: oneDNN packed them for one CPU level, so the level must be equal, not only sufficient.
- glibc and libstdc++: at least the versions whose symbols the libraries use.
- torch: the same major.minor. With `compat="abi"` another minor of the same major, for code that calls nothing but
  torch's C shim; `aotc.runtime.libraries.torch_abi` looks for every symbol before a library is opened.
- CUDA: the same compute capability, or, where the artifact carries PTX, a higher one; torch's CUDA of the same major.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aotc.errors import Issue
from aotc.machine.targets import below_all_targets, best_cpu_target, cuda_target, parse_target
from aotc.machine.this_host import Compat, numbers
from aotc.records import Artifact, Environment, Record

FIRST_SHIM = (2, 10)
"""The first torch whose C shim has versions (`torch/csrc/stable/version.h`): from then on a function keeps its form,
and one of another form has another name, as `aoti_torch_create_tensor_from_blob_v2`."""


class Rule(Record, frozen=True):
    """One rule: what the artifact needs, what is here, and the mismatch; `issue` is None where the rule is kept."""

    name: str
    needed: str
    here: str
    issue: Issue | None = None


def mismatches(artifact: Artifact, here: Environment, compat: Compat = "minor") -> list[Issue]:
    """Every reason why the artifact cannot run in `here`, with both values and a hint; empty where it can."""
    return [rule.issue for rule in rules(artifact, here, compat) if rule.issue is not None]


def rules(artifact: Artifact, here: Environment, compat: Compat = "minor") -> list[Rule]:
    """Every rule that applies to the artifact, kept or not."""
    needed = artifact.environment
    return [
        *rules_of_host(artifact, here),
        _torch_rule(artifact, here, compat),
        *(_cuda_rules(needed, here) if needed.cuda_capability else ()),
    ]


def rules_of_host(artifact: Artifact, here: Environment) -> list[Rule]:
    """The rules for the system and the CPU, which hold without torch, too."""
    return [*_platform_rules(artifact.environment, here), *_cpu_rules(artifact, here)]


def _platform_rules(needed: Environment, here: Environment) -> Iterator[Rule]:
    for name, expected, actual in (
        ("operating system", needed.os, here.os),
        ("architecture", needed.machine, here.machine),
    ):
        said = f"built for {name} {expected}, this machine is {actual}"
        issue = Issue(said, expected=expected, actual=actual, hint=f"build on, or for, {actual}")
        yield Rule(name, expected, actual, None if expected == actual else issue)
    if needed.libc:
        said = f"its libraries need glibc {needed.libc}, here is {here.libc or 'another C library'}"
        hint = "build on the oldest distribution that you run on"
        fits = numbers(here.libc or "0", 2) >= numbers(needed.libc, 2)
        issue = Issue(said, expected=needed.libc, actual=here.libc, hint=hint)
        yield Rule("glibc", f"{needed.libc} or newer", here.libc or "another", None if fits else issue)
    if needed.libstdcxx:
        wanted, actual = " ".join(needed.libstdcxx), " ".join(here.libstdcxx)
        said = f"its libraries need libstdc++ with {wanted}, here is {actual or 'another C++ library'}"
        hint = "build on the oldest distribution that you run on, or install its newer libstdc++6"
        fits = _has_versions(needed.libstdcxx, here.libstdcxx)
        issue = Issue(said, expected=wanted, actual=actual, hint=hint)
        yield Rule("libstdc++", f"{wanted} or newer", actual or "another", None if fits else issue)


def _has_versions(needed: Iterable[str], here: Iterable[str]) -> bool:
    """Whether each `FAMILY_1.2.3` that is needed is at most that of the same family here."""
    versions = {family: numbers(version, 3) for family, _, version in (name.rpartition("_") for name in here)}
    return all(
        numbers(version, 3) <= versions.get(family, ())
        for family, _, version in (name.rpartition("_") for name in needed)
    )


def _cpu_rules(artifact: Artifact, here: Environment) -> list[Rule]:
    needed = artifact.environment.cpu_features
    missing = sorted(set(needed) - set(here.cpu_features))
    best = best_cpu_target(here.cpu_features)
    level = best or below_all_targets(here.machine)
    found = []
    if needed:
        add = f"add `{best}` to the model's targets" if best else "this CPU is below the oldest target"
        if not here.cpu_features:
            add = "mount /proc: the features are read from /proc/cpuinfo, which is not there"
        refused = "; where /proc/cpuinfo has them, the kernel refuses AMX to this process"
        issue = Issue(
            f"built for {artifact.target}, this CPU has no {', '.join(missing)}",
            expected=" ".join(needed),
            actual=level,
            hint=add + (refused if "amx_tile" in missing else ""),
        )
        found.append(
            Rule("CPU features", best_cpu_target(needed) or " ".join(needed), level, issue if missing else None)
        )
    if artifact.weights == "frozen" and artifact.target.startswith("cpu:") and not missing:
        issue = Issue(
            f"its frozen weights are packed for {artifact.target}, this CPU is {best}",
            expected=artifact.target,
            actual=best or "",
            hint="build frozen weights on the kind of CPU that serves them, or use `weights: live`",
        )
        found.append(Rule("packed weights", artifact.target, level, None if best == artifact.target else issue))
    return found


def _torch_rule(artifact: Artifact, here: Environment, compat: Compat) -> Rule:
    needed = artifact.environment
    built, actual = numbers(needed.torch, 2), numbers(here.torch, 2)
    reason = "" if built == actual else _no_promise(artifact, here)
    name = f"{built[0]}.{built[1]}"
    if built == actual or (compat == "abi" and not reason):
        return Rule("torch", name if built == actual else f"{name}, or a C shim with the same symbols", here.torch)
    hint = "rebuild with the service's torch; an artifact is good for one major.minor version"
    if compat == "abi":
        hint = f"rebuild with the service's torch: compat='abi' is {reason}"
    elif not reason:
        hint += "; compat='abi' (on a command line --compat abi) takes each torch whose C shim has all that it calls"
    issue = Issue(
        f"built with torch {needed.torch}, this process has torch {here.torch}",
        expected=needed.torch,
        actual=here.torch,
        hint=hint,
    )
    return Rule("torch", name, here.torch, issue)


def _no_promise(artifact: Artifact, here: Environment) -> str:
    """Why another torch may not run the code, whatever its C shim has; "" where it may."""
    built, actual = numbers(artifact.environment.torch, 2), numbers(here.torch, 2)
    oldest = min(built, actual)
    if built[0] != actual[0] or oldest < FIRST_SHIM:
        return f"for torch {FIRST_SHIM[0]}.{FIRST_SHIM[1]} and newer ones of one major version"
    if not artifact.target.startswith("cpu:"):
        return "for code on CPUs: CUDA's own libraries differ between torch versions"
    if artifact.weights == "frozen":
        return "for live weights: oneDNN's packed ones are good for one version of oneDNN"
    return ""


def _cuda_rules(needed: Environment, here: Environment) -> list[Rule]:
    if not here.cuda_capability:
        issue = Issue(
            f"built for a GPU of capability {needed.cuda_capability}, torch {here.torch} sees no CUDA GPU here",
            expected=needed.cuda_capability,
            hint="check the driver and CUDA_VISIBLE_DEVICES, or build the model for a CPU target too",
        )
        return [Rule("GPU", needed.cuda_capability, "none", issue)]
    built, actual = numbers(needed.cuda_capability, 2), numbers(here.cuda_capability, 2)
    here_target = parse_target(cuda_target((actual[0], actual[1]))).name
    other_gpu = Issue(
        f"built for {cuda_target((built[0], built[1]))}, this GPU ({here.gpu}) is {here_target}",
        expected=needed.cuda_capability,
        actual=here.cuda_capability,
        hint=f"build the model with `{here_target}` among its targets",
    )
    other_cuda = Issue(
        f"built with torch for CUDA {needed.cuda}, this torch is for CUDA {here.cuda or 'none'}",
        expected=needed.cuda,
        actual=here.cuda,
        hint="use torch builds of one CUDA major version",
    )
    fits = built == actual or (needed.ptx and actual > built)
    same = numbers(needed.cuda, 1) == numbers(here.cuda or "0", 1)
    wanted = f"{needed.cuda_capability}{' or newer' if needed.ptx else ''}"
    return [
        Rule("GPU", wanted, f"{here.cuda_capability} ({here.gpu})", None if fits else other_gpu),
        Rule("CUDA", str(numbers(needed.cuda, 1)[0]), here.cuda or "none", None if same else other_cuda),
    ]
