"""Differences as a tree for a terminal. Only names and values go in, as plain text: nothing in them is markup."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.text import Text
from rich.tree import Tree

from aotc.errors import one_line
from aotc.tools.inspection.artifact_picks import PickChange
from aotc.tools.inspection.binaries import BinaryDifference, SectionDifference
from aotc.tools.inspection.compare import (
    ArtifactDifference,
    BundleDifference,
    FileDifference,
    ValueChange,
    VariantDifference,
)
from aotc.tools.inspection.kernels import KernelDifference

_SIGNS = {"added": ("+ ", "green"), "removed": ("- ", "red"), "changed": ("~ ", "yellow"), "renamed": ("→ ", "yellow")}


def difference_tree(
    a: str, b: str, difference: BundleDifference, *, sources: bool = False, in_bytes: bool = False
) -> Tree:
    """What `aotc diff` shows: a summary first.

    `a` and `b` are the references as given; `sources`: also how kernels' sources differ; `in_bytes`: also where in
    their bytes files do.
    """
    head = _lines(f"A {a}  {difference.a}", f"B {b}  {difference.b}", _summary(difference))
    tree = Tree(head, guide_style="dim")
    for target in difference.targets_equal:
        tree.add(_text(f"{target}: equal"))
    for target in difference.targets_removed:
        tree.add(_signed("removed", f"{target}: only in A"))
    for target in difference.targets_added:
        tree.add(_signed("added", f"{target}: only in B"))
    for artifact in difference.artifacts:
        _add_artifact(tree.add(_text(artifact.target, "bold")), artifact, sources, in_bytes)
    return tree


def _summary(difference: BundleDifference) -> str:
    """One line: what is equal, and how much of what is not."""
    if difference.equal:
        return "equal"
    variants = [variant for artifact in difference.artifacts for variant in artifact.variants]
    counts = {
        "target": len(difference.targets_added) + len(difference.targets_removed),
        "record field": sum(len(changed) for one in difference.artifacts for changed in one.record.values()),
        "bucket": len(variants)
        + sum(len(one.buckets_added) + len(one.buckets_removed) for one in difference.artifacts),
        "kernel": sum(len(variant.kernels) for variant in variants),
        "pick": sum(len(variant.picks) for variant in variants),
    }
    parts = [f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items() if count]
    return f"they differ: {', '.join(parts) or 'in files alone'}"


def _add_artifact(tree: Tree, artifact: ArtifactDifference, sources: bool, in_bytes: bool) -> None:
    tree.add(_lines(f"A {artifact.a}", f"B {artifact.b}", style="dim"))
    for part, changed in artifact.record.items():
        _add_changes(tree, part, changed)
    _add_files(tree, artifact.files, in_bytes)
    for bucket in artifact.buckets_removed:
        tree.add(_signed("removed", f"bucket {bucket}"))
    for bucket in artifact.buckets_added:
        tree.add(_signed("added", f"bucket {bucket}"))
    for variant in artifact.variants:
        _add_variant(tree.add(_text(f"bucket {variant.bucket}", "bold")), variant, sources, in_bytes)
    if artifact.buckets_equal:
        tree.add(_text(f"buckets that are equal: {artifact.buckets_equal}", "dim"))


def _add_variant(tree: Tree, variant: VariantDifference, sources: bool, in_bytes: bool) -> None:
    tree.add(_text(variant.reason, "italic"))
    if variant.key_factors:
        _add_changes(tree, "factors of the key", variant.key_factors)
    if variant.record:
        _add_changes(tree, "record", variant.record)
    if variant.kernels:
        kernels = tree.add("kernels")
        for kernel in variant.kernels:
            node = kernels.add(_signed(kernel.status, _kernel(kernel)))
            if sources and kernel.source_diff:
                node.add(_lines(*kernel.source_diff.split("\n")))
    if variant.picks:
        picks = tree.add("picks")
        for pick in variant.picks:
            status = "added" if pick.first is None else "removed" if pick.second is None else "changed"
            picks.add(_signed(status, _pick(pick)))
    _add_files(tree, variant.files, in_bytes)


def _add_changes(tree: Tree, title: str, changed: Iterable[ValueChange]) -> None:
    node = tree.add(_text(title))
    for change in changed:
        status = "added" if change.a is msgspec.UNSET else "removed" if change.b is msgspec.UNSET else "changed"
        values = " → ".join(_value(value) for value in (change.a, change.b) if value is not msgspec.UNSET)
        node.add(_signed(status, f"{change.path}  {values}"))


def _kernel(kernel: KernelDifference) -> str:
    operators = " + ".join(kernel.operators_a or kernel.operators_b)
    if kernel.status == "renamed":
        return f"{kernel.kind} {kernel.name_a} → {kernel.name_b}: the same source"
    if kernel.status != "changed":
        return f"{kernel.calls_a or kernel.calls_b} × {kernel.kind} {kernel.name_a or kernel.name_b}: {operators}"
    what = []
    if kernel.source_a != kernel.source_b:
        lines = kernel.source_diff.splitlines()[2:]
        removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
        what.append(f"source, {removed} lines removed and {added} added")
    if kernel.calls_a != kernel.calls_b:
        what.append(f"calls {kernel.calls_a} → {kernel.calls_b}")
    if kernel.operators_a != kernel.operators_b:
        what.append(f"operators {operators} → {' + '.join(kernel.operators_b)}")
    return f"{kernel.kind} {kernel.name_a}: {'; '.join(what) or 'kind'}"


def _pick(pick: PickChange) -> str:
    about = (*pick.inputs, *pick.arguments)
    asked = f"{pick.kind} {pick.subject} ({', '.join(about)})" if about else f"{pick.kind} {pick.subject}"
    chosen = " → ".join(str(candidate) for candidate in (pick.first, pick.second) if candidate)
    return f"{asked}: {chosen}" + ("" if pick.cost is None else f", {pick.cost:+.1%} time")


def _add_files(tree: Tree, files: Iterable[FileDifference], in_bytes: bool) -> None:
    for file in files:
        sizes = " → ".join(f"{side.size:,} bytes {side.digest[:19]}" for side in (file.a, file.b) if side)
        reason = f": {file.reason}" if file.reason else ""
        node = tree.add(_signed(file.status, f"file {file.name}  {sizes}{reason}"))
        if file.bytes and in_bytes:
            _add_bytes(node, file.bytes)


def _add_bytes(tree: Tree, difference: BinaryDifference) -> None:
    for finding in difference.findings:
        tree.add(_text(finding, "italic"))
    for section in difference.sections:
        node = tree.add(_text(_section(section)))
        if section.symbols:
            node.add(_text("in " + " ".join(section.symbols), "dim"))
    for status, texts in (("removed", difference.texts_a), ("added", difference.texts_b)):
        for text in texts:
            tree.add(_signed(status, f"text {text!r}"))
    if difference.more_texts:
        tree.add(_text(f"and {difference.more_texts} more texts that only one of them holds", "dim"))


def _section(section: SectionDifference) -> str:
    name = section.name or "the whole file, which is not an ELF file"
    if section.size_a is None or section.size_b is None:
        there = "B" if section.size_a is None else "A"
        return f"{name}: only in {there}, {section.size_a or section.size_b or 0:,} bytes"
    sizes = f"; {section.size_a:,} → {section.size_b:,} bytes" if section.size_a != section.size_b else ""
    first = "" if section.first is None else f", the first at offset {section.first:#x}"
    return f"{name}: {section.differing:,} of {min(section.size_a, section.size_b):,} bytes differ{first}{sizes}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _signed(status: str, text: str) -> Text:
    sign, style = _SIGNS[status]
    return _text(sign + text, style)


def _text(text: str, style: str = "") -> Text:
    """A line in which no control character of a name or source reaches the terminal."""
    return Text(one_line(text), style=style)


def _lines(*texts: str, style: str = "") -> Text:
    return Text("\n", style=style).join(_text(text, style) for text in texts)
