"""Why an artifact cannot run on a machine: every reason, with both values and a hint."""

from __future__ import annotations

from aotc.errors import Issue
from aotc.machine.environment import numbers
from aotc.machine.targets import best_cpu_target, cuda_target, parse_target
from aotc.records import Artifact, Environment


def explain_mismatch(artifact: Artifact, here: Environment) -> list[Issue]:
    needed = artifact.environment
    return [
        *_platform_issues(needed, here),
        *_cpu_issues(artifact, here),
        *_torch_issues(needed, here),
        *(_cuda_issues(needed, here) if needed.cuda_capability else ()),
    ]


def _platform_issues(needed: Environment, here: Environment) -> list[Issue]:
    issues = [
        Issue(
            f"built for {label} {expected}, this machine is {actual}",
            expected=expected,
            actual=actual,
            hint=f"build on, or for, {actual}",
        )
        for label, expected, actual in (
            ("operating system", needed.os, here.os),
            ("architecture", needed.machine, here.machine),
        )
        if expected != actual
    ]
    if needed.libc and numbers(here.libc or "0", 2) < numbers(needed.libc, 2):
        issues.append(
            Issue(
                f"its libraries need glibc {needed.libc}, here is {here.libc or 'another C library'}",
                expected=needed.libc,
                actual=here.libc,
                hint="build on the oldest distribution that you run on",
            )
        )
    return issues


def _cpu_issues(artifact: Artifact, here: Environment) -> list[Issue]:
    missing = sorted(set(artifact.environment.cpu_features) - set(here.cpu_features))
    best = best_cpu_target(here.cpu_features)
    if missing:
        add = f"add `{best}` to the model's targets" if best else "this CPU is below the oldest target"
        refused = "; where /proc/cpuinfo has them, the kernel refuses AMX to this process"
        return [
            Issue(
                f"built for {artifact.target}, this CPU has no {', '.join(missing)}",
                expected=" ".join(artifact.environment.cpu_features),
                actual=best or "below x86-64-v3",
                hint=add + (refused if "amx_tile" in missing else ""),
            )
        ]
    if artifact.weights == "frozen" and artifact.target.startswith("cpu:") and best != artifact.target:
        return [
            Issue(
                f"its frozen weights are packed for {artifact.target}, this CPU is {best}",
                expected=artifact.target,
                actual=best or "",
                hint="build frozen weights on the kind of CPU that serves them, or use `weights: live`",
            )
        ]
    return []


def _torch_issues(needed: Environment, here: Environment) -> list[Issue]:
    if numbers(needed.torch, 2) == numbers(here.torch, 2):
        return []
    return [
        Issue(
            f"built with torch {needed.torch}, this process has torch {here.torch}",
            expected=needed.torch,
            actual=here.torch,
            hint="rebuild with the service's torch; an artifact is good for one major.minor version",
        )
    ]


def _cuda_issues(needed: Environment, here: Environment) -> list[Issue]:
    if not here.cuda_capability:
        return [
            Issue(
                f"built for a GPU of capability {needed.cuda_capability}, torch {here.torch} sees no CUDA GPU here",
                expected=needed.cuda_capability,
                hint="check the driver and CUDA_VISIBLE_DEVICES, or build the model for a CPU target too",
            )
        ]
    issues = []
    built, actual = numbers(needed.cuda_capability, 2), numbers(here.cuda_capability, 2)
    if built != actual and not (needed.ptx and actual > built):
        here_target = parse_target(cuda_target((actual[0], actual[1]))).name
        issues.append(
            Issue(
                f"built for {cuda_target((built[0], built[1]))}, this GPU ({here.gpu}) is {here_target}",
                expected=needed.cuda_capability,
                actual=here.cuda_capability,
                hint=f"build on such a GPU with `{here_target}` among the model's targets",
            )
        )
    if numbers(needed.cuda, 1) != numbers(here.cuda or "0", 1):
        issues.append(
            Issue(
                f"built with torch for CUDA {needed.cuda}, this torch is for CUDA {here.cuda or 'none'}",
                expected=needed.cuda,
                actual=here.cuda,
                hint="use torch builds of one CUDA major version",
            )
        )
    return issues
