"""Resource requests of a unit to a cluster: cores, memory, a GPU of the right kind, or a custom resource of nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aotc.amounts import parse_size
from aotc.compiler.executors.local import memory_of
from aotc.compiler.messages import Unit
from aotc.errors import BuildError

SHARE_OF_GPU = 0.125
"""The share of a GPU that a unit requests: units on one GPU compile in parallel and take turns only to measure."""

MEMORY_MARGIN = 1.25
"""The factor by which a request exceeds the memory that an earlier build of the unit took."""

SERVERS = 1 << 29
"""Bytes of the two fork servers of a node: measured, rounded up."""

_TYPE = "accelerator_type:"
_TYPES: Mapping[str, tuple[str, ...]] = {
    "cuda:sm_70": ("V100",),
    "cuda:sm_75": ("T4",),
    "cuda:sm_80": ("A100", "A100-40G", "A100-80G"),
    "cuda:sm_86": ("A10G", "A10", "A40", "RTX-A6000"),
    "cuda:sm_89": ("L4", "L40S", "L40"),
    "cuda:sm_90": ("H100", "H200", "GH200", "H20"),
    "cuda:sm_100": ("B200", "GB200"),
}
"""By target, Ray's names of the GPUs of that architecture (`ray.util.accelerators`)."""


@dataclass(frozen=True)
class Ask:
    """Options of a Ray task; `memory` in bytes."""

    num_cpus: float = 1
    num_gpus: float = 0
    memory: int = 0
    accelerator_type: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        asked = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "memory": self.memory}
        kind = {"accelerator_type": self.accelerator_type} if self.accelerator_type else {}
        return {**asked, **kind, "resources": dict(self.resources)}

    def amounts(self) -> dict[str, float]:
        """The requested amounts, by the names of a node's resources."""
        kind = {f"{_TYPE}{self.accelerator_type}": 0.001} if self.accelerator_type else {}
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory), **kind, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}

    def fits(self, node: Mapping[str, float]) -> bool:
        return all(node.get(name, 0.0) >= amount for name, amount in self.amounts().items())

    def __str__(self) -> str:
        return _shown(self.amounts())


@dataclass(frozen=True)
class RayOptions:
    """`address` of the cluster; `asks`: resource requests by target or device; `runtime_env`: added to aotc's own; with
    `wait`, units may request resources that no node has now."""

    address: str | None = None
    asks: Mapping[str, Ask] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    wait: bool = False


def ask_for(unit: Unit, given: Mapping[str, Ask], nodes: Sequence[Mapping[str, float]], used: int = 0) -> Ask:
    """The resource request of a unit: `given` for its target or device; fields that are not given are estimated.

    If nodes have a custom resource with the target's name (`--resources='{"cpu:amx": 4}'`), a unit requests one of it.
    """
    target = unit.target
    memory = (int(used * MEMORY_MARGIN) or memory_of(unit)) + SERVERS
    ask = Ask(num_cpus=1, num_gpus=SHARE_OF_GPU if target.device == "cuda" else 0, memory=memory)
    if any(target.name in node for node in nodes):
        ask = replace(ask, resources={target.name: 1})
    elif target.device == "cuda":
        ask = replace(ask, accelerator_type=_most_common(_TYPES.get(target.name, ()), nodes))
    for name in (target.device, target.name):
        if name in given:
            ask = _over(ask, given[name])
    return ask


def _most_common(types: Iterable[str], nodes: Sequence[Mapping[str, float]]) -> str:
    counts = Counter({kind: sum(node.get("GPU", 0) for node in nodes if f"{_TYPE}{kind}" in node) for kind in types})
    kind, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return kind if count else ""


def _over(ask: Ask, given: Ask) -> Ask:
    """`ask`, with the fields that are set in `given` replaced."""
    said = {name: getattr(given, name) for name in ("num_cpus", "num_gpus", "memory") if getattr(given, name) >= 0}
    kind = given.accelerator_type or ask.accelerator_type
    return replace(ask, **said, accelerator_type=kind, resources=given.resources or ask.resources)


def parse_ask(text: str) -> tuple[str, Ask]:
    """`cuda=num_gpus:1,memory:8GiB` → the target or device, and its resource request. Raises BuildError.

    Names are those of Ray's tasks (`num_cpus`, `num_gpus`, `memory`, `accelerator_type`); any other name is a custom
    resource of nodes.
    """
    target, _, rest = text.rpartition("=")
    said: dict[str, Any] = {"num_cpus": -1.0, "num_gpus": -1.0, "memory": -1}
    resources: dict[str, float] = {}
    try:
        for part in rest.split(","):
            name, _, amount = part.rpartition(":")
            if name == "memory":
                said["memory"] = parse_size(amount)
            elif name == "accelerator_type":
                said["accelerator_type"] = amount
            elif re.fullmatch(r"\d+(\.\d+)?", amount) and name:
                (said if name in said else resources)[name] = float(amount)
            else:
                raise ValueError(part)
        if not target:
            raise ValueError(text)
    except ValueError as error:
        raise BuildError(
            f"--ask {text[:200]!r} cannot be read",
            hint="write --ask cuda:sm_90=num_gpus:1,memory:8GiB,accelerator_type:H100",
        ) from error
    return target, Ask(**said, resources=resources)


# -- nodes ------------------------------------------------------------------------------------------------------------


def node_resources(node: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(amount) for name, amount in node["Resources"].items()}


def node_lines(nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A line for each kind of node: its resources."""
    hidden = ("node:", "object_store_memory")
    shown = (
        _shown({name: amount for name, amount in sorted(node.items()) if not name.startswith(hidden)}) for node in nodes
    )
    for line, count in Counter(shown).items():
        yield f"{line}{f' ({count} such nodes)' if count > 1 else ''}"


def units_at_a_time(asks: Sequence[Ask], nodes: Sequence[Mapping[str, float]]) -> int:
    """The number of units that the nodes can run at the same time, by first fit."""
    free = [dict(node) for node in nodes]
    taken = 0
    for ask in asks:
        node = next((node for node in free if ask.fits(node)), None)
        if node is not None:
            taken += 1
            for name, amount in ask.amounts().items():
                node[name] -= amount
    return taken


def _shown(amounts: Mapping[str, float]) -> str:
    words = []
    for name, amount in amounts.items():
        if name.startswith(_TYPE):
            words.append(f"a GPU of type {name.removeprefix(_TYPE)}")
        else:
            words.append(f"{name} {amount / (1 << 30):.1f} GiB" if name == "memory" else f"{name} {amount:g}")
    return ", ".join(words) or "nothing"
