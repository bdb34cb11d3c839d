"""Weights by name, from a checkpoint instead of a module: safetensors files, or a mapping of tensors.

The forms (dtype and shape) of all tensors are known and compared before one of them is read, so everything that is
wrong with a checkpoint is said at once, and nothing is half done. On a CPU, tensors of a file are views of the mapped
file, which is private to the process: what is written to them stays in it. To a GPU they are copied straight from the
mapping, by several threads (`staged`), so the host never holds a whole copy.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

from aotc.errors import BindError, Issue
from aotc.reads.tensors import NO_SUBCLASSES, dtype_name, same_bits
from aotc.runtime.checkpoints.mapped_file import MappedFile
from aotc.runtime.state.call_state import ALIGNMENT, DENSE_COPY, lacks_values, names_of, used_strides
from aotc.tensors.layouts import with_strides
from aotc.tensors.overlaps import overlaps_itself

if TYPE_CHECKING:
    from aotc.records import StateSpec

Weights = str | os.PathLike[str] | Mapping[str, Tensor]
"""A safetensors file, a shard index (`*.safetensors.index.json`), a folder that holds either, or names and tensors."""

INDEX = ".safetensors.index.json"
COPIERS = 4
"""Threads that copy to a GPU; one alone spends its time on the page faults of the mapping."""

_OTHER_FORMATS = {".bin", ".pt", ".pth", ".ckpt"}
_CONVERTED = "other formats are converted once: safetensors.torch.save_file(torch.load(...), path)"
_UNREADABLE = "give a safetensors file, its index, or their folder, that this user may read"
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class TensorHeader(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: str
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """Tensors by name."""

    where: str
    """The checkpoint, for messages."""

    @property
    def subclasses(self) -> Mapping[str, Any]:
        """By the names of parameters of a subclass of Tensor, which `forms` has not: what it is known of the subclass,
        as `aotc.tensors.subclasses` describes it."""
        ...

    @property
    def forms(self) -> Mapping[str, TensorHeader]: ...

    def read(self, name: str) -> Tensor:
        """The tensor, wherever and in whatever layout it lies."""
        ...

    owned: bool
    """Whether the tensors of `read` are reachable from nowhere else."""


def open_weights(weights: Weights | Checkpoint) -> Checkpoint:
    """Raises BindError where there is no checkpoint, or it cannot be read. One that is open stays as it is."""
    if isinstance(weights, MappingCheckpoint | FileCheckpoint):
        return weights
    if isinstance(weights, Mapping):
        if any(hasattr(tensor, "__tensor_flatten__") for tensor in weights.values()):
            from aotc.tensors.subclasses import unwrapped, wrappers

            return MappingCheckpoint(unwrapped(weights), wrappers(weights))
        return MappingCheckpoint(weights)
    if not isinstance(weights, str | os.PathLike):
        raise BindError(
            f"weights is {type(weights).__name__}",
            hint="give a safetensors file, a shard index, a folder that holds either, or a mapping of names to tensors",
        )
    return FileCheckpoint(Path(weights))


def by_inner_names(checkpoint: Checkpoint, specs: Sequence[StateSpec]) -> Checkpoint:
    """The checkpoint by the names that `specs` give to the tensors within parameters of a subclass, as quantised ones
    are. Raises BindError where the subclass or its context (a block size) is not that of the specs."""
    if all(spec.subclass is None for spec in specs):
        return checkpoint
    from aotc.runtime.checkpoints.checkpoint_subclasses import Renamed

    return Renamed(checkpoint, specs)


class MappingCheckpoint:
    """The caller's own tensors. Raises BindError for values that are not plain tensors."""

    where = "the mapping"
    owned = False

    def __init__(self, tensors: Mapping[str, Tensor], subclasses: Mapping[str, Any] = NO_SUBCLASSES) -> None:
        self.subclasses = subclasses
        odd = [issue for name, tensor in tensors.items() for issue in _odd(name, tensor)]
        if odd:
            raise BindError("the mapping's values are not all plain tensors", issues=tuple(odd))
        self.tensors = dict(tensors)
        self.forms = {name: TensorHeader(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().resolve_conj().resolve_neg()


def _odd(name: object, tensor: object) -> Iterator[Issue]:
    if not isinstance(name, str):
        yield Issue(f"a name is expected, {name!r:.100} came")
    elif not isinstance(tensor, Tensor) or type(tensor) not in _PLAIN:
        yield Issue(f"a tensor is expected, {type(tensor).__name__} came", where=name)
    elif lack := lacks_values(tensor):
        yield Issue(f"a dense tensor with values in memory is expected, {lack} came", where=name, hint=DENSE_COPY)


class FileCheckpoint:
    """safetensors files, mapped: one, or the shards of an index. Raises BindError."""

    owned = True

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.forms: dict[str, TensorHeader] = {}
        self._file_of: dict[str, MappedFile] = {}
        self.files, file_of = _files(path)
        opened = {file.name: _open(file) for file in self.files}
        self._opened = list(opened.values())
        held = {file: frozenset(shard.tensors) for file, shard in opened.items()}
        for name, file in {**_outside(path, held, file_of), **file_of}.items():
            if name not in held[file]:
                continue
            entry = opened[file].tensors[name]
            self.forms[name] = TensorHeader(entry.dtype, entry.shape)
            self._file_of[name] = opened[file]
        if absent := sorted(file_of.keys() - self.forms.keys()):
            nowhere = [name for name in absent if not any(name in names for names in held.values())]
            raise BindError(
                f"{path} names tensors that are in none of its files: {', '.join(nowhere[:5])}"
                if nowhere
                else f"{path} names tensors in files that do not hold them: {', '.join(absent[:5])}",
                issues=tuple(_absence(name, file_of[name], held) for name in absent[:5]),
                hint="the checkpoint is not whole, or of two: download it again",
            )

    @property
    def subclasses(self) -> Mapping[str, Any]:
        from aotc.runtime.checkpoints.checkpoint_subclasses import described_in

        return {name: each for part in self._opened for name, each in described_in(part.metadata)}

    def read(self, name: str) -> Tensor:
        with torch.inference_mode(False):  # calls outside of it may write to them, and a module holds them
            try:
                return self._file_of[name].tensor(name)
            except ValueError as error:
                raise BindError(f"{self.where} cannot be read as safetensors: {error}", hint=_CONVERTED) from error


def _outside(path: Path, held: Mapping[str, Collection[str]], file_of: Mapping[str, str]) -> dict[str, str]:
    """The names that the index does not say, and their files. Raises BindError for a name in two files."""
    found: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if name not in file_of and (other := found.setdefault(name, file)) != file:
                raise BindError(
                    f"`{name}` is in {other} and in {file}, and {path} does not say which counts",
                    hint="the checkpoint is of two: download it again",
                )
    return found


def _absence(name: str, file: str, held: Mapping[str, Collection[str]]) -> Issue:
    there = [other for other, names in held.items() if name in names]
    return Issue(
        f"is not in {file}, where the index says it is; it is in {there[0] if there else 'none of the files'}",
        where=name,
        expected=file,
        actual=", ".join(there),
    )


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and what its index says: in which of them a name is."""
    try:
        return _found_files(path)
    except OSError as error:
        raise BindError(f"there are no weights to be read at {path}: {error.strerror}", hint=_UNREADABLE) from error


def _found_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise BindError(f"there are no weights at {path}", hint="give a safetensors file, its index, or their folder")
    if not path.name.endswith(INDEX):
        return [path], {}
    try:
        names = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, ValueError, RecursionError) as error:
        hint = "it is JSON with a `weight_map` from names to files, as save_pretrained writes it"
        raise BindError(f"the shard index {path} cannot be read: {error}", hint=hint) from error
    files = sorted(set(names.values()))
    if strange := [name for name in files if Path(name).name != name]:
        raise BindError(
            f"the shard index {path} names files elsewhere: {', '.join(strange[:5])}", hint="put the shards beside it"
        )
    if absent := [name for name in files if not (path.parent / name).is_file()]:
        raise BindError(
            f"shards of {path} are missing: {', '.join(absent)}", hint="the checkpoint is not whole: download it again"
        )
    return [path.parent / name for name in files], names


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _in_folder(folder: Path) -> Path:
    """The checkpoint of a folder: its one index, else its one safetensors file, else `model.safetensors`."""
    indices, files = sorted(folder.glob(f"*{INDEX}")), sorted(folder.glob("*.safetensors"))
    for found in (indices, files):
        if len(found) == 1:
            return found[0]
        if named := [path for path in found if path.name.removesuffix(".index.json") == "model.safetensors"]:
            return named[0]
    others = [path for path in sorted(folder.iterdir()) if path.suffix in _OTHER_FORMATS]
    seen = ", ".join(path.name for path in ((*indices, *files) or others)[:5]) or "nothing of the kind"
    raise BindError(
        f"the folder {folder} holds not one safetensors checkpoint but {seen}",
        hint="give the file or the index itself" if indices or files or not others else _CONVERTED,
    )


def _open(file: Path) -> MappedFile:
    try:
        return MappedFile(file)
    except OSError as error:
        raise BindError(f"{file} cannot be read: {error.strerror}", hint=_UNREADABLE) from error
    except (ValueError, RecursionError) as error:
        raise BindError(f"{file} cannot be read as safetensors: {error}", hint=_CONVERTED) from error


# -- matching ---------------------------------------------------------------------------------------------------------


def check_forms(
    checkpoint: Checkpoint, specs: Sequence[StateSpec], ignored: Collection[str], *, partial: bool = False
) -> None:
    """Compare the forms of a checkpoint's tensors with `specs`. With `partial`, tensors may be missing, though not all.

    `ignored` are names that may be there and are not used. Raises BindError with everything that is missing,
    unexpected, mis-shaped or mis-typed.
    """
    forms = checkpoint.forms
    names = {name for spec in specs for name in names_of(spec)}
    if partial and forms.keys() <= {*ignored} - names:
        raise BindError(
            f"{checkpoint.where} has none of the model's tensors: nothing would be replaced",
            hint="were they chosen by a prefix that none of the names has?",
        )
    missing = [spec.name for spec in specs if not partial and forms.keys().isdisjoint(names_of(spec))]
    unexpected = sorted(forms.keys() - names - set(ignored))
    issues = [
        *(Issue("is missing", where=name) for name in missing),
        *(
            Issue("is not a tensor of the model", where=name, hint=hint)
            for name, hint in _with_meant(unexpected, names - forms.keys())
        ),
        *(issue for spec in specs for name in names_of(spec) if name in forms for issue in _issues(spec, name, forms)),
    ]
    if issues:
        known = missing if not partial else [name for spec in specs for name in names_of(spec)]
        raise BindError(
            f"the tensors of {checkpoint.where} are not those that the artifact was built for",
            issues=tuple(issues),
            hint=_hint(known, unexpected),
        )


def _with_meant(unexpected: Sequence[str], known: Collection[str]) -> Iterable[tuple[str, str]]:
    """Each name, and a hint at the one that was meant."""
    if not unexpected:
        return ()
    return zip(unexpected, mistyped(unexpected, known), strict=True)


COMPARED = 10
"""Unknown names for each of which the nearest known one is looked for."""


def mistyped(names: Sequence[str], known: Collection[str]) -> list[str]:
    """A hint for each unknown name: the known one that it most likely stands for, or ""."""
    if len(names) > COMPARED:  # the names of another model
        return [""] * len(names)
    prefixed = any(f".{name}".endswith(f".{one}") or f".{one}".endswith(f".{name}") for name in names for one in known)
    if prefixed:  # those of a model around this one or inside it
        return [""] * len(names)
    found = (difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in names)
    return [f"did you mean `{matches[0]}`?" if matches else "" for matches in found]


def _issues(spec: StateSpec, name: str, forms: Mapping[str, TensorHeader]) -> Iterator[Issue]:
    there = forms[name]
    for label, expected, actual in (
        ("dtype", spec.dtype, there.dtype),
        ("shape", list(spec.shape), list(there.shape)),
    ):
        if expected != actual:
            hint = f"convert it, or build with `dtype: {actual}`" if label == "dtype" else ""
            yield Issue(
                f"built for {label} {expected}, the checkpoint's is {actual}",
                where=name,
                expected=str(expected),
                actual=str(actual),
                hint=hint,
            )


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    longer, shorter = _prefix(missing, unexpected), _prefix(unexpected, missing)
    if longer:
        return (
            f"the checkpoint's names begin with `{longer}`, as those of a model around this one do: pass a mapping "
            f"of the tensors that do, with `name.removeprefix({longer!r})` for names"
        )
    if shorter:
        return (
            f"the artifact's names begin with `{shorter}` and the checkpoint's do not, as those of a model inside this "
            f"one: pass a mapping with `{shorter!r} + name` for names"
        )
    return (
        "load a checkpoint of the model and dtype of the artifact's manifest, or pass a mapping of what belongs to it"
    )


def _prefix(short: Sequence[str], long: Sequence[str]) -> str:
    """What at least half of the names in `short` lack at their beginning to be names in `long`; "" if nothing is."""
    there = set(long)
    ends = {name: [other.removesuffix(name) for other in long if other.endswith(f".{name}")] for name in short[:3]}
    for prefix, _ in Counter(prefix for found in ends.values() for prefix in found).most_common(3):
        if 2 * sum(prefix + name in there for name in short) >= len(short):
            return prefix
    return ""


# -- reading ----------------------------------------------------------------------------------------------------------


def read_tensors(
    checkpoint: Checkpoint, specs: Iterable[StateSpec], device: torch.device, own: Callable[[StateSpec], bool]
) -> dict[str, Tensor]:
    """The tensors of those `specs` that the checkpoint holds, by the specs' own names, in the layout that was compiled.

    Where `own(spec)`, the caller's memory is copied, else it is used where it can be. Raises BindError where names of
    one tensor hold different values, or a tensor cannot be laid out.
    """
    found: dict[str, tuple[StateSpec, Tensor]] = {}
    loose = []
    for spec in specs:
        there = [name for name in names_of(spec) if name in checkpoint.forms]
        if there:
            tensor = checkpoint.read(there[0])
            loose += [
                Issue(f"is one tensor with `{there[0]}` in the artifact, and has other values here", where=name)
                for name in there[1:]
                if not same_bits(tensor, checkpoint.read(name))
            ]
            found[spec.name] = spec, tensor
    if loose:
        hint = "give one name of each alone, or save the checkpoint from a module that ties them"
        raise BindError(f"tied weights are not equal in {checkpoint.where}", hint=hint, issues=tuple(loose))
    with Placing(device) as placing:
        return {
            name: placing.place(tensor, spec, copy=not checkpoint.owned and own(spec))
            for name, (spec, tensor) in found.items()
        }


class Placing:
    """Puts tensors where and how they were compiled for. What it gave is filled when the context ends.

    They are plain tensors also under `torch.inference_mode()`, so that calls outside of it may write to them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Placing:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            _copy_all(self._copies, self._device)

    def place(self, tensor: Tensor, spec: StateSpec, *, copy: bool) -> Tensor:
        """The tensor itself where it is right already and no `copy` is asked for. Raises BindError."""
        strict = self._device.type == "cuda" or tensor.dtype is torch.int8
        alignment = ALIGNMENT if strict else tensor.element_size()
        wanted = used_strides(spec.shape, spec.stride)
        fits = used_strides(tensor.shape, tensor.stride()) == wanted and tensor.data_ptr() % alignment == 0
        if fits and not copy and tensor.device == self._device:
            return with_strides(tensor, spec.stride)
        # An axis of stride 0 repeats one slice.
        repeated = [axis for axis, step in enumerate(wanted) if step == 0 and spec.shape[axis] > 1]
        once = tensor
        for axis in repeated:
            once = once.narrow(axis, 0, 1)
        if overlaps_itself(once.shape, spec.stride) or (repeated and not same_bits(once.expand(spec.shape), tensor)):
            raise BindError(
                f"`{spec.name}` was compiled with strides {list(spec.stride)}; the checkpoint's values cannot lie so",
                hint="load with the module",
            )
        try:
            with torch.inference_mode(False):
                placed = torch.empty_strided(once.shape, spec.stride, dtype=tensor.dtype, device=self._device)
        except RuntimeError as error:
            if self._device.type == "cuda":
                raise  # torch's own OutOfMemoryError, which a service may wait for
            raise BindError(
                f"`{spec.name}` was compiled with strides {list(spec.stride)}, for which there is no memory: {error}",
                hint="free memory, or load with the module",
            ) from error
        self._copies.append((placed, once))
        return placed.expand(spec.shape)


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    if device.type != "cuda":
        with torch.inference_mode(False), torch.no_grad():
            for placed, tensor in copies:
                placed.copy_(tensor)
        return
    from aotc.runtime.checkpoints.staged import copy_to_gpu

    if copies := copy_to_gpu(copies, device):
        copy_plainly(copies, device)


def copy_plainly(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """To a GPU by `copy_`, in some threads."""
    here = torch.cuda.current_stream(device)
    largest_first = sorted(copies, key=lambda copy: -copy[1].nbytes)
    with ThreadPoolExecutor(COPIERS) as pool:
        parts = [largest_first[first::COPIERS] for first in range(COPIERS)]
        list(pool.map(lambda part: _copy_part(part, device, here), parts))


def _copy_part(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device, here: torch.cuda.Stream) -> None:
    """On a stream of its own, after what the caller's stream did before: it may have used that memory."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(here)
    with torch.cuda.stream(stream), torch.no_grad():
        for placed, tensor in copies:
            placed.copy_(tensor)
    stream.synchronize()
