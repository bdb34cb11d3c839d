"""YAML text to plain data, with the line of every key: all that the checks need to say where a mistake stands.

Only what JSON can hold comes out. Hostile text (alias bombs, endless nesting) is refused by fixed limits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from aotc.errors import Issue, ManifestError
from aotc.manifest.types import KeyPath, place

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 30

_MERGE = "tag:yaml.org,2002:merge"
_MAPPING = "tag:yaml.org,2002:map"
_SEQUENCE = "tag:yaml.org,2002:seq"


@dataclass
class Document:
    """A YAML file's data, the 1-based line of each key path, and the mistakes found on the way."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)


class _TooLarge(Exception):
    """A limit is passed; the message says which."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with limits. It also reads `1e-5` as a number, as YAML 1.2 does."""

    depth = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        self.nodes += 1
        _check_limits(self.depth, self.nodes)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def read_document(content: bytes, file: str) -> Document:
    """Parse a manifest's bytes; `file` is the name used in messages.

    Mistakes that leave the rest readable (a duplicate key, a date) are in the document's `issues`. Raises ManifestError
    where nothing can be read: not UTF-8, a syntax error, or a limit passed.
    """
    text = _decode(content, file)
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document = Document()
        if node is not None:
            walker = _Walker(loader, document, file)
            document.data = walker.value(node, ())
        return document
    except yaml.YAMLError as error:
        raise _unreadable(_syntax_issue(error, text, file)) from None
    except _TooLarge as error:
        raise _unreadable(
            Issue(str(error), where=file, hint="write the manifest out in a smaller, flatter form")
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def _decode(content: bytes, file: str) -> str:
    if len(content) > MAX_BYTES:
        message = f"the file has {len(content)} bytes; a manifest may have {MAX_BYTES}"
        raise _unreadable(Issue(message, where=file, hint="split it into several manifests"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"the file is not UTF-8: byte 0x{content[error.start]:02x} cannot be decoded"
        raise _unreadable(Issue(message, where=f"{file}:{line}", hint="save the manifest as UTF-8")) from None


def _unreadable(issue: Issue) -> ManifestError:
    return ManifestError("the manifest cannot be read", issues=(issue,))


def _syntax_issue(error: yaml.YAMLError, text: str, file: str) -> Issue:
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        return Issue(f"the character {_code_point(error)} is not allowed in YAML", where=f"{file}:{line}")
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        parts = [part for part in (error.context, error.problem) if part]
        return Issue(f"not valid YAML: {', '.join(parts)}", where=f"{file}:{line}", hint=_syntax_hint(error))
    return Issue(f"not valid YAML: {error}", where=file)


def _code_point(error: yaml.reader.ReaderError) -> str:
    character = error.character
    return f"U+{character:04X}" if isinstance(character, int) else repr(character)


def _syntax_hint(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "indent with spaces; YAML allows no tabs"
    if "mapping values are not allowed" in problem:
        return "look for a missing indent, or a `:` inside an unquoted text"
    if "but found another document" in problem:
        return "a manifest is one document: remove the `---` between the parts"
    return "look at this line and the one before it: indentation, brackets, quotes"


def _check_limits(depth: int, nodes: int) -> None:
    if depth > MAX_DEPTH:
        raise _TooLarge(f"the YAML is nested more than {MAX_DEPTH} levels deep")
    if nodes > MAX_NODES:
        raise _TooLarge(f"the YAML has more than {MAX_NODES} values, counting what aliases repeat")


class _Walker:
    """Turns nodes into data. It counts what it visits, so that aliases cannot unfold without end."""

    def __init__(self, loader: _Loader, document: Document, file: str) -> None:
        self.loader = loader
        self.document = document
        self.file = file
        self.visited = 0

    def value(self, node: yaml.Node, path: KeyPath, *, depth: int = 0) -> Any:
        self.visited += 1
        _check_limits(depth, self.visited)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
            return self.mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE:
            return self.sequence(node, path, depth)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        return self.refuse(path, f"the YAML tag `{node.tag}` is not used in manifests", "remove the tag")

    def sequence(self, node: yaml.SequenceNode, path: KeyPath, depth: int) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.document.lines[(*path, index)] = item.start_mark.line + 1
            items.append(self.value(item, (*path, index), depth=depth + 1))
        return items

    def mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        # What `<<` brings comes first, so that the mapping's own values and lines replace it.
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged.update(self.merge(value_node, path, depth))
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE or (key := self.key(key_node, path, line)) is None:
                continue
            if key in own:
                self.duplicate(key, path, line)
                continue
            self.document.lines[(*path, key)] = line
            own[key] = self.value(value_node, (*path, key), depth=depth + 1)
        return {**merged, **own}

    def merge(self, node: yaml.Node, path: KeyPath, depth: int) -> dict[str, Any]:
        """The mapping, or the list of mappings (the first wins), that `<<` brings in."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in reversed(sources):
            if isinstance(source, yaml.MappingNode):
                merged.update(self.value(source, path, depth=depth + 1))
            else:
                self.refuse(path, "`<<` needs a mapping", "write `<<: *name` with the anchor of a mapping")
        return merged

    def key(self, node: yaml.Node, path: KeyPath, line: int) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
            if flaw := _text_flaw(node.value):
                self.document.issues.append(Issue(f"a key {flaw}", where=f"{self.file}:{line}", hint=_LEAVE_OUT))
                self.document.broken.add(path)
                return None
            return str(node.value)
        text = f"`{node.value}`" if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        # YAML 1.1 reads on, off, yes and no as booleans.
        self.document.issues.append(
            Issue(f"the key {text} is not text", where=f"{self.file}:{line}", hint="quote it if it is meant as text")
        )
        self.document.broken.add(path)
        return None

    def duplicate(self, key: str, path: KeyPath, line: int) -> None:
        first = place(self.file, self.document.lines, (*path, key))
        what = "the model" if path == ("models",) else "the key"
        self.document.issues.append(
            Issue(
                f"{what} `{key}` is there twice; the first is at {first}",
                where=f"{self.file}:{line}",
                hint="remove or rename one of the two",
            )
        )

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            value = self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError, TypeError):
            return self.refuse(path, f"`{node.value[:60]}` cannot be read as {_kind(node)}", "quote it if it is text")
        if isinstance(value, float) and not math.isfinite(value):
            hint = "write a finite number, such as the lowest of the dtype"
            return self.refuse(path, f"`{node.value[:60]}` is not a finite number", hint)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return self.refuse(path, f"`{node.value[:60]}` does not fit into 64 bits", "quote it if it is text")
        if isinstance(value, str) and (flaw := _text_flaw(value)):
            return self.refuse(path, f"the text {flaw}", _LEAVE_OUT)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return self.refuse(path, f"`{node.value[:60]}` reads as {_kind(node)} in YAML", "quote it if it is text")

    def refuse(self, path: KeyPath, message: str, hint: str) -> None:
        self.document.issues.append(Issue(message, where=place(self.file, self.document.lines, path), hint=hint))
        self.document.broken.add(path)


_LEAVE_OUT = "leave this character out"


def _text_flaw(text: str) -> str:
    """Why a text cannot be a name, a path or part of a record; "" if it can."""
    found = re.search("[\0\ud800-\udfff]", text)
    return f"has the character U+{ord(found[0]):04X}, which cannot be written in UTF-8 or in a path" if found else ""


def _kind(node: yaml.ScalarNode) -> str:
    return {"timestamp": "a date", "int": "an integer", "float": "a number", "binary": "bytes"}.get(
        node.tag.rsplit(":", 1)[-1], f"`{node.tag}`"
    )
