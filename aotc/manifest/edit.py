"""Edit the text of a manifest, and keep all else in it: comments, order, layout.

By the positions of PyYAML's nodes. ruamel.yaml writes a manifest anew, and so moves lists and comments, and drops the
braces of `[{batch: 2}]`.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from aotc.errors import Issue, ManifestError
from aotc.manifest.read import read_manifest
from aotc.manifest.sizes import parse_size, size_text
from aotc.records import TUPLE, Bucket

WIDTH = 110
"""Columns of a comment."""


class BucketChange(msgspec.Struct, frozen=True):
    """What one bucket of the manifest becomes, and why."""

    bucket: Bucket
    instead: tuple[Bucket, ...]
    reasons: tuple[str, ...]


class Problem(msgspec.Struct, frozen=True):
    """Why a bucket cannot be captured whatever its sizes, with the line of the model. `in_parts`: perhaps parts of the
    model can. `related`: a dim, and the expression of other dims that it has to be."""

    bucket: Bucket
    message: str
    hint: str = ""
    source: str = ""
    in_parts: bool = False
    related: tuple[str, str] | None = None


class ByRegions(msgspec.Struct, frozen=True):
    """Regions of a model that cannot be captured whole. `eager` are the outermost submodules outside of them, and
    `share` is the part of the time of a call in eager that is spent within the regions."""

    patterns: tuple[str, ...]
    eager: tuple[str, ...]
    share: float


class CheckJob(msgspec.Struct, frozen=True):
    """What to check: a manifest in a file, and models of it."""

    manifest: str
    models: tuple[str, ...]


class ModelEdit(msgspec.Struct, frozen=True):
    """Of one model: the `init`s of inputs that become others, by their paths, dims that become expressions of others,
    then the buckets to change, and the first problem that no other sizes help; `regions` may. `left`: the buckets that
    were not looked at."""

    model: str
    changes: tuple[BucketChange, ...] = ()
    problem: Problem | None = None
    regions: ByRegions | None = None
    related: dict[str, str] = {}
    inits: dict[str, Any] = {}
    left: int = 0


def edited(text: str, edits: Sequence[ModelEdit], *, comments: bool = True) -> tuple[str, list[ManifestError]]:
    """The manifest with what can be edited of these, and an error with what to write for each that cannot."""
    errors: list[ManifestError] = []
    for edit in edits:
        try:
            for path, init in edit.inits.items():
                text = with_init(text, edit.model, path, init)
            for dim, size in edit.related.items():
                text = with_related(text, edit.model, dim, size, comments=comments)
        except ManifestError as error:  # then the buckets are other ones
            errors.append(error)
            continue
        for change in edit.changes:
            reasons = change.reasons if comments else ()
            try:
                text = with_buckets(text, edit.model, change.bucket, change.instead, reasons)
            except ManifestError as error:
                errors.append(error)
    return text, errors


def rewrite(path: Path, text: str) -> None:
    """Write a manifest's text in the place of another.

    Raises ManifestError for a text with mistakes, and leaves the file as it was.
    """
    unfinished = path.resolve().with_name(f".{path.name}.edited.tmp.yaml")
    try:
        unfinished.write_bytes(text.encode())
        read_manifest(unfinished)
        shutil.copymode(path, unfinished)
        unfinished.rename(path.resolve())
    finally:
        unfinished.unlink(missing_ok=True)


def with_related(text: str, model: str, dim: str, size: str, *, comments: bool = True) -> str:
    """The manifest with an expression in the place of a dim of the model, in shapes, and without the dim in buckets.

    Raises ManifestError with the expression to write where these are not written out in the model, see `with_buckets`.
    """
    edits: list[tuple[int, int, str]] = []
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("models", model, "inputs"):
        node = _child(node, key)
    for shape in _shapes(node):
        for entry in shape.value:
            named = isinstance(entry, yaml.ScalarNode) and re.search(rf"\b{dim}\b", entry.value)
            if named and _is_within(entry, shape) and not _is_shared(text, entry):
                written = size if entry.value == dim else re.sub(rf"\b{dim}\b", f"({size})", entry.value)
                plain = written if written.isidentifier() else f'"{written}"'
                edits.append((entry.start_mark.index, _end(entry), plain))
    items = _items(text, model)
    edits += [_without(item.node, dim) for item in items if any(name.value == dim for name, _ in item.node.value)]
    edited = _apply(text, edits)
    if not edits or len(_items(edited, model)) != len(items) or _names(edited, model, dim):
        hint = f'write "{size}" for `{dim}` in the shapes, and leave `{dim}` out of the buckets'
        raise ManifestError(f"{model} cannot be edited where it stands: `{dim}` must be `{size}`", hint=hint)
    return with_lines(edited, model, f"the model needs `{dim}` to be `{size}`") if comments else edited


def with_init(text: str, model: str, path: str, init: Mapping[str, Any]) -> str:
    """The manifest with another `randint` or `constant` for an input. Raises ManifestError where its `init` is not
    written out in the model."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("models", model, "inputs"):
        node = _child(node, key)
    ((name, value),) = init.items()
    written = f"{{{name}: {_flow(value)}}}"
    for tensor in _tensor_nodes(node, "", path):
        now = _child(tensor, "init")
        if now is not None and not _is_shared(text, now) and _is_within(now, tensor):
            return _apply(text, [(now.start_mark.index, _end(now), written)])
    raise ManifestError(f"{model} cannot be edited where it stands", hint=f"write `init: {written}` for `{path}`")


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)


def _tensor_nodes(node: yaml.Node | None, path: str, wanted: str) -> Iterator[yaml.Node]:
    """The mappings of the tensor at a path within a model's inputs."""
    if isinstance(node, yaml.MappingNode):
        keys = [name.value for name, _ in node.value]
        if path == wanted and "shape" in keys:
            yield node
        for name, value in node.value:
            inner = path if keys == [TUPLE] and path else f"{path}.{name.value}".lstrip(".")
            yield from _tensor_nodes(value, inner, wanted)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _tensor_nodes(item, f"{path}[{index}]", wanted)


def _shapes(node: yaml.Node | None) -> Iterator[yaml.SequenceNode]:
    """The shapes within a model's inputs, and the limits of their values."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value in ("shape", "randint") and isinstance(value, yaml.SequenceNode):
                yield value
            else:
                yield from _shapes(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _shapes(item)


def _without(mapping: yaml.MappingNode, dim: str) -> tuple[int, int, str]:
    """The edit that removes a key of a mapping, with the comma in front of it or behind it."""
    place = next(index for index, (name, _) in enumerate(mapping.value) if name.value == dim)
    name, value = mapping.value[place]
    if place + 1 < len(mapping.value):
        return name.start_mark.index, mapping.value[place + 1][0].start_mark.index, ""
    before = _end(mapping.value[place - 1][1]) if place else name.start_mark.index
    return before, _end(value), ""


def _names(text: str, model: str, dim: str) -> bool:
    """Whether the model still names a dim."""
    own: Any = yaml.safe_load(text)["models"][model]
    return bool(re.search(rf"\b{dim}\b", str([own.get(key) for key in ("inputs", "buckets", "grid", "outputs")])))


def _apply(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    for start, stop, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def with_lines(text: str, model: str, comment: str, lines: Sequence[str] = ()) -> str:
    """The manifest with a comment, and lines below it, in front of a model's `inputs`, which begin a line."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("models", model):
        node = _child(node, key)
    begins = [name.start_mark for name, _ in node.value if name.value == "inputs"] if node is not None else []
    rows = text.splitlines(keepends=True)
    for mark in begins:
        indent = " " * mark.column
        added = [*_comment(comment, indent), *(f"{indent}{line}" for line in lines)]
        rows.insert(mark.line, "".join(f"{row}\n" for row in added))
    return "".join(rows)


def with_buckets(text: str, model: str, bucket: Bucket, instead: Sequence[Bucket], reasons: Sequence[str]) -> str:
    """The manifest with `instead` in the place of a bucket of the model, below a comment of the `reasons`.

    Raises ManifestError with the buckets to write where the bucket is not written out in the model's `buckets`: where
    it comes from `grid`, `defaults`, an anchor, an alias or a merge.
    """
    items = _items(text, model)
    found = [item for item in items if _bucket_of(item) == bucket]
    if not found:
        raise _by_hand(model, bucket, instead)
    edited = text
    for item in reversed(found):
        edited = _replaced(edited, item, bucket, instead, reasons)
    if [_bucket_of(item) for item in _items(edited, model)] != _expected(items, bucket, instead):
        raise _by_hand(model, bucket, instead)
    return edited


def bucket_text(bucket: Bucket) -> str:
    """`{batch: 1, seq: {range: [8, 64]}}`."""
    return "{" + ", ".join(f"{dim}: {size_text(size)}" for dim, size in bucket.items()) + "}"


def _by_hand(model: str, bucket: Bucket, instead: Sequence[Bucket]) -> ManifestError:
    return ManifestError(
        f"the bucket {bucket_text(bucket)} of {model} cannot be edited: it is not written out in `buckets`, or an "
        "anchor shares it",
        issues=(Issue("these buckets can be captured", where=model, hint=", ".join(map(bucket_text, instead))),),
    )


def _expected(items: Sequence[_Item], bucket: Bucket, instead: Sequence[Bucket]) -> list[Bucket | None]:
    expected: list[Bucket | None] = []
    for was in map(_bucket_of, items):
        expected += instead if was == bucket else [was]
    return expected


# -- the nodes of YAML ------------------------------------------------------------------------------------------------


class _Item:
    """A bucket's node in the sequence `buckets`."""

    def __init__(self, node: yaml.MappingNode, sequence: yaml.SequenceNode) -> None:
        self.node = node
        self.in_block = not sequence.flow_style


def _items(text: str, model: str) -> list[_Item]:
    """The buckets that are written out where the model is, in a list of their own; [] where they are not."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("models", model, "buckets"):
        node = _child(node, key)
    if not isinstance(node, yaml.SequenceNode) or _is_shared(text, node):
        return []
    return [
        _Item(item, node)
        for item in node.value
        if isinstance(item, yaml.MappingNode)
        and _is_within(item, node)
        and not _is_shared(text, item)
        and all(_is_within(value, item) and not _is_shared(text, value) for _, value in item.value)
    ]


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value of a key that stands in the mapping itself: an alias is not followed."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(name, yaml.ScalarNode) and name.value == key:
            return value if node is not None and _is_within(value, node) else None
    return None


def _is_within(node: yaml.Node, outer: yaml.Node) -> bool:
    """False for an alias: its node stands where its anchor does."""
    return bool(outer.start_mark.index <= node.start_mark.index and node.end_mark.index <= outer.end_mark.index)


def _is_shared(text: str, node: yaml.Node) -> bool:
    return text[node.start_mark.index : node.start_mark.index + 1] == "&"


def _bucket_of(item: _Item) -> Bucket | None:
    try:
        plain = yaml.safe_load(yaml.serialize(item.node, Dumper=yaml.SafeDumper))
        return {dim: parse_size(value) for dim, value in plain.items()}
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _end(node: yaml.Node) -> int:
    """Where a node ends, without the comments and the empty lines behind it that belong to a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


# -- the text ---------------------------------------------------------------------------------------------------------


def _replaced(text: str, item: _Item, bucket: Bucket, instead: Sequence[Bucket], reasons: Sequence[str]) -> str:
    """The first new bucket is written over the sizes of the old one, and the others follow it."""
    first, *others = instead
    order = [name.value for name, _ in item.node.value]
    written = [bucket_text({dim: other[dim] for dim in order}) for other in others]
    begin, end = item.node.start_mark.index, _end(item.node)
    if item.in_block:
        begin = text.rindex("-", 0, begin)
    line = text.rfind("\n", 0, begin) + 1
    indent = text[line : line + len(text[line:]) - len(text[line:].lstrip(" "))]
    if item.in_block:
        at = end + len(text[end:].partition("\n")[0])
        further = "".join(f"\n{indent}- {other}" for other in written)
    else:
        at, further = end, "".join(f", {other}" for other in written)
    comment = "".join(f"{row}\n" for reason in reasons for row in _comment(reason, indent))
    edits = [(line, line, comment), (at, at, further)]
    for name, value in item.node.value:
        if first[name.value] != bucket[name.value]:
            edits.append((value.start_mark.index, _end(value), size_text(first[name.value])))
    return _apply(text, edits)


def _comment(reason: str, indent: str) -> list[str]:
    first = f"{indent}# "
    return textwrap.wrap(" ".join(reason.split()), WIDTH, initial_indent=first, subsequent_indent=f"{first}  ")
