"""The safetensors files of a checkpoint: one, the shards of an index, or what a folder holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from aotc.checkpoints.checkpoint_forms import TensorHeader
from aotc.checkpoints.mapped_file import MappedFile
from aotc.errors import BindError, Issue

INDEX = ".safetensors.index.json"

_OTHER_FORMATS = {".bin", ".pt", ".pth", ".ckpt"}
CONVERTED = "other formats are converted once: safetensors.torch.save_file(torch.load(...), path)"
_UNREADABLE = "give a safetensors file, its index, or their folder, that this user may read"


class SafetensorsFiles:
    """safetensors files, mapped: one, or the shards of an index. Raises BindError.

    `forms` and `file_of` have each tensor's form and file.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.forms: dict[str, TensorHeader] = {}
        self.file_of: dict[str, MappedFile] = {}
        self.opened: list[MappedFile] = []
        self.files, file_of = _files(path)
        opened = {file.name: _open(file) for file in self.files}
        self.opened = list(opened.values())
        held = {file: frozenset(shard.tensors) for file, shard in opened.items()}
        for name, file in {**_outside(path, held, file_of), **file_of}.items():
            if name not in held[file]:
                continue
            entry = opened[file].tensors[name]
            self.forms[name] = TensorHeader(entry.dtype, entry.shape)
            self.file_of[name] = opened[file]
        if absent := sorted(file_of.keys() - self.forms.keys()):
            nowhere = [name for name in absent if not any(name in names for names in held.values())]
            raise BindError(
                f"{path} names tensors that are in none of its files: {', '.join(nowhere[:5])}"
                if nowhere
                else f"{path} names tensors in files that do not hold them: {', '.join(absent[:5])}",
                issues=tuple(_absence(name, file_of[name], held) for name in absent[:5]),
                hint="the checkpoint is not whole, or of two: download it again",
            )


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
        hint="give the file or the index itself" if indices or files or not others else CONVERTED,
    )


def _open(file: Path) -> MappedFile:
    try:
        return MappedFile(file)
    except OSError as error:
        raise BindError(f"{file} cannot be read: {error.strerror}", hint=_UNREADABLE) from error
    except (ValueError, RecursionError) as error:
        raise BindError(f"{file} cannot be read as safetensors: {error}", hint=CONVERTED) from error
