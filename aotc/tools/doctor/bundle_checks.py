"""Would a bundle load here: each rule of each artifact, and what `aotc.load` would take."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from aotc.amounts import counted
from aotc.errors import AotcError, EnvironmentMismatchError, Issue, NotFoundError, StoreError
from aotc.machine.compatibility import Rule, rules
from aotc.machine.environment import this_environment
from aotc.machine.this_host import Compat, numbers
from aotc.records import Artifact, Parallel
from aotc.runtime.fetch import runnable
from aotc.store.layout.bundle import Bundle, BundleEntry, each_file, read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference, is_remote
from aotc.store.remote.remote_store import RemoteStore
from aotc.tools.caches.origin import rules as cache_rules
from aotc.tools.caches.origin import this_origin, variable_rules
from aotc.tools.caches.restore import cache_of
from aotc.tools.doctor.checks import Check, CheckStatus, failing, from_error, from_issue
from aotc.tools.doctor.machine import check_code_memory, targets_here
from aotc.tools.doctor.remotes import open_once
from aotc.tools.doctor.signature_check import check_signature

_OF_MACHINE = {"operating system", "architecture", "CPU features", "packed weights", "GPU"}
"""Rules that another target keeps, and no other torch."""


def check_bundle(reference: Reference, where: str, compat: Compat = "minor") -> list[Check]:
    """Whether `aotc.load` of the reference would succeed in this process, as far as the bundle tells without a module;
    of a compiler cache, whether `aotc cache restore` would.

    The store is the folder or URL `where`; of a folder, the files that a load takes are read and checked; of a remote
    one, records are read and no code is fetched. A rule that an
    artifact breaks is a `fail` where no artifact of the bundle loads, else a `warn`. `compat` is that of `aotc.load`.
    Libraries for training are opened, unless trusted keys are set and none has signed the bundle.
    """
    checks: list[Check] = []
    with failing(checks, "bundle", "reference"):
        store: ReadableStore = RemoteStore(open_once(where)) if is_remote(where) else Store.open(where)
        bundle = read_bundle(store, reference)
        targets = ", ".join(entry.target for entry in bundle.artifacts)
        checks.append(Check("bundle", "reference", "ok", f"{reference.name} is {bundle.digest}, for {targets}"))
        checks += (signed := check_signature(store, bundle, reference))
        if any(entry.is_cache for entry in bundle.artifacts):
            cache = cache_of(store, bundle)
            here = this_origin()
            checks += [_check_of(cache.target, rule, "fail") for rule in cache_rules(cache, here)]
            return [*checks, *(_check_of(cache.target, rule, "warn") for rule in variable_rules(cache, here))]
        checks += check_code_memory("bundle")
        checks += _artifacts(store, bundle, compat, trusted=all(check.status != "fail" for check in signed))
    return checks


def _artifacts(store: ReadableStore, bundle: Bundle, compat: Compat, trusted: bool) -> list[Check]:
    records: dict[str, Artifact] = {}
    unread: dict[str, AotcError] = {}
    for entry in bundle.artifacts:
        try:
            records[entry.target] = read_artifact(store, entry)
        except AotcError as error:
            unread[entry.target] = error

    def read(entry: BundleEntry) -> Artifact:
        if entry.target in unread:
            raise unread[entry.target]
        return records[entry.target]

    taken: list[BundleEntry] = []
    stopped: list[AotcError] = []  # as a load stops: at a record that it reads before the one that it would take
    for kind in sorted({entry.target.partition(":")[0] for entry in bundle.artifacts}):
        try:
            here = [entry for entry in bundle.artifacts if not isinstance(unread.get(entry.target), NotFoundError)]
            taken += runnable([entry for entry in here if entry.target.startswith(f"{kind}:")], read, compat)
        except EnvironmentMismatchError:
            continue
        except AotcError as error:
            stopped.append(error)
    lost: CheckStatus = "warn" if taken else "fail"
    checks: list[Check] = []
    kept: dict[str, list[Rule]] = {}
    by_shim: list[str] = []
    sound: list[str] = []
    for entry in bundle.artifacts:
        part = f"artifact {entry.target}"
        if entry.target in unread:
            checks += from_error(part, "record", unread[entry.target], lost)
            continue
        artifact = records[entry.target]
        machine = this_environment("cuda" if entry.target.startswith("cuda:") else "cpu")
        kept[entry.target] = rules(artifact, machine, compat)
        if _broken(kept[entry.target]) and not _broken(rules(artifact, machine, "abi")):
            by_shim.append(entry.target)
        checks += [_check_of(part, rule, lost) for rule in kept[entry.target]]
        if any(one.target == entry.target for one in taken):
            found = _contents(part, store, artifact)
            if compat == "abi":
                found += _symbols(part, store, artifact)
            if artifact.parallel is not None:
                found.append(ranks_of(part, artifact.parallel, artifact.target))
            if artifact.trains and trusted and isinstance(store, Store) and not _failed(found):
                found += _training(part, store, artifact)
            checks += found
            if not _failed(found):
                sound.append(entry.target)
    asked = " with compat='abi'" if compat == "abi" else ""
    if sound:
        which = ", as the module's device asks" if len(sound) > 1 else ""
        return [*checks, Check("bundle", "loads", "ok", f"aotc.load{asked} takes {' or '.join(sound)}{which}")]
    if taken:
        names = " or ".join(one.target for one in taken)
        about, hint = f"aotc.load{asked} takes {names}, and fails", "mend what fails above"
        return [*checks, Check("bundle", "loads", "fail", about, hint=hint)]
    if stopped:
        hint = stopped[0].hint or "`aotc fsck` lists all damage"
        return [*checks, Check("bundle", "loads", "fail", f"aotc.load fails: {stopped[0].message}", hint=hint)]
    return [*checks, _nearest(kept, by_shim)]


def _check_of(part: str, rule: Rule, lost: CheckStatus) -> Check:
    if rule.issue is None:
        return Check(part, rule.name, "ok", rule.here, rule.needed)
    return Check(part, rule.name, lost, rule.here, rule.needed, rule.issue.hint)


def _contents(part: str, store: ReadableStore, artifact: Artifact) -> list[Check]:
    """Of an artifact that would be taken: are its files whole, and the packages of the operators that it calls here."""
    checks = []
    if isinstance(store, Store):
        damaged: dict[str, str] = {}
        for file in {file.blob: file for file in each_file(artifact)}.values():
            try:
                store.blobs.verify(file)
            except StoreError as error:
                damaged[file.name] = error.message
        hint = "build or fetch the bundle again; `aotc fsck` lists all damage"
        checks += [Check(part, "files", "fail", f"{name}: {about}", hint=hint) for name, about in damaged.items()]
        if not damaged:
            checks.append(Check(part, "files", "ok", "all are in the store, with the bytes of their digests"))
    for need in artifact.operators:
        package = need.module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            issue = Issue(f"{need.name}: its module {need.module} is not installed", hint=f"install {package} here")
            checks.append(from_issue(part, "operator", issue))
    return checks


def _failed(checks: Sequence[Check]) -> bool:
    return any(check.status == "fail" for check in checks)


def ranks_of(part: str, parallel: Parallel, target: str) -> Check:
    """Of code for several ranks: is there a GPU for each, and torch's collectives."""
    needed = f"{parallel.size} ranks of {parallel.dim}, each of which loads with ranks=aotc.Ranks(GROUP)"
    if not torch.distributed.is_available():
        about = f"torch {torch.__version__} without torch.distributed"
        return Check(part, "ranks", "fail", about, needed, "install a torch that has it")
    if target.startswith("cpu:"):
        return Check(part, "ranks", "ok", "a CPU, which can run all of them", needed)
    count = torch.cuda.device_count()
    enough = count >= parallel.size
    hint = f"run the other {parallel.size - count} ranks on other machines of their own, and check these too"
    return Check(part, "ranks", "ok" if enough else "warn", counted(count, "GPU"), needed, "" if enough else hint)


def _training(part: str, store: Store, artifact: Artifact) -> list[Check]:
    """Of code for training: do the libraries of forward and backward open."""
    from aotc.runtime.libraries.files import read_all
    from aotc.runtime.load import open_variant

    kind = artifact.target.partition(":")[0]
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())
    checks: list[Check] = []
    with failing(checks, part, "training"):
        for each in (artifact, *artifact.kinds):
            files = read_all(each.variants, store.blobs)
            for variant in each.variants:
                open_variant(files[variant.files], variant, device, concurrency=1)
    return checks or [Check(part, "training", "ok", "the libraries of forward and backward open")]


def _symbols(part: str, store: ReadableStore, artifact: Artifact) -> list[Check]:
    """Of code of another torch minor: does this torch have everything that it calls? Every lack is a check."""
    built, here = artifact.environment.torch, str(torch.__version__)
    if numbers(built, 2) == numbers(here, 2):
        return []
    if not isinstance(store, Store):
        about = "not looked for: no code is fetched"
        return [Check(part, "symbols", "warn", about, hint="`aotc fetch --target` it, and check the local store")]
    from aotc.runtime.libraries.files import read_all
    from aotc.runtime.libraries.torch_abi import check_symbols

    checks: list[Check] = []
    with failing(checks, part, "symbols"):
        for kind in (artifact, *artifact.kinds):
            files = read_all(kind.variants, store.blobs)
            check_symbols(kind, lambda variant, files=files: files[variant.files])  # type: ignore[misc]
    return checks or [Check(part, "symbols", "ok", f"torch {here} has all that the code of torch {built} calls")]


def _broken(found: Sequence[Rule]) -> list[str]:
    return [rule.name for rule in found if rule.issue]


def _nearest(kept: dict[str, list[Rule]], by_shim: Sequence[str]) -> Check:
    """What would have to differ least, and what to build instead."""
    broken = {target: [rule for rule in found if rule.issue] for target, found in kept.items()}
    version = torch.__version__.partition("+")[0]
    if not broken:
        hint = f"build it for {_listed(targets_here())} with torch {version}"
        return Check("bundle", "loads", "fail", "no artifact of the bundle can be read here", hint=hint)
    kinds = {target.partition(":")[0] for target in targets_here()}
    nearest = min(broken, key=lambda target: (target.partition(":")[0] not in kinds, len(broken[target])))
    other = targets_here() if _OF_MACHINE & {rule.name for rule in broken[nearest]} else [nearest]
    hint = f"build it for {_listed(other)} with torch {version}"
    if by_shim:
        hint += f"; or check `--compat abi`, for aotc.load(…, compat='abi') of {_listed(by_shim)}"
    differs = "; ".join(f"{rule.name} {rule.needed}, here {rule.here}" for rule in broken[nearest])
    return Check("bundle", "loads", "fail", f"nothing in the bundle; {nearest} comes nearest: {differs}", hint=hint)


def _listed(targets: Sequence[str]) -> str:
    return " or ".join(targets) or "another machine: this one runs no target"
