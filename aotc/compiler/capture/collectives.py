"""Collectives of a parallel model: the group that they go through, and whether all ranks run the same code.

A functional collective is an operator with the name of a process group, which differs from process to process. Captured
code names the group of the artifact's mesh dim instead (`aotc.records.Parallel.group_name`), under which a load puts
the group that it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from aotc.compiler.capture.lifting.lift import Capture
from aotc.digest import canonical_json, sha256_json
from aotc.errors import BuildError
from aotc.reads.tensors import dtype_name, tensor_digest
from aotc.records import Parallel

_ARGUMENT = "group_name"


def name_groups(graph: fx.GraphModule, parallel: Parallel) -> None:
    """Let every collective of the graph go through the artifact's group.

    Raises BuildError for a collective of a group that has not all of the ranks.
    """
    for part in _graphs(graph):
        for node in part.graph.nodes:
            if (position := _position_of_group(node)) is None:
                continue
            name = node.args[position] if position < len(node.args) else node.kwargs[_ARGUMENT]
            size = cast("Any", torch._C)._distributed_c10d._resolve_process_group(name).size()
            if size != parallel.size:
                raise BuildError(
                    f"the model calls {node.target} on a group of {size} ranks; `parallel` has {parallel.size}",
                    hint="an artifact has one group: let all its collectives go through that of the mesh dim "
                    f"`{parallel.dim}`",
                    stage="export",
                )
            if position < len(node.args):
                node.update_arg(position, parallel.group_name)
            else:
                node.update_kwarg(_ARGUMENT, parallel.group_name)
        part.recompile()


def _graphs(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield from (part for part in graph.modules() if isinstance(part, fx.GraphModule))


def _position_of_group(node: fx.Node) -> int | None:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    names = [argument.name for argument in schema.arguments]
    return names.index(_ARGUMENT) if _ARGUMENT in names else None


def code_digest(captured: Capture) -> str:
    """A digest of all that the compiler is given: equal ones give equal code."""
    return sha256_json([*_lines(captured.graph), *_record(captured)])


def _record(captured: Capture) -> list[str]:
    examples = [_form(example) for example in captured.examples]
    parts = captured.arguments, captured.outputs, captured.output_tree, captured.mutated_leaves
    state = captured.storage_leaves, captured.mutated_state, captured.guards
    return [*map(str, examples), *(canonical_json(part).decode() for part in (*parts, *state))]


def _lines(graph: fx.GraphModule) -> Iterator[str]:
    for path, part in graph.named_modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                value: Any = node.meta.get("val")
                constant = _constant(part, node) if node.op == "get_attr" else ""
                yield f"{path} {node.op} {node.target} {node.args} {node.kwargs} {_form(value)} {constant}"


def _constant(part: fx.GraphModule, node: fx.Node) -> str:
    value: Any = part
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return tensor_digest(value) if isinstance(value, Tensor) else ""


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)} {list(value.stride())} {value.device.type}"
    return str([_form(item) for item in value]) if isinstance(value, list | tuple) else str(value)
