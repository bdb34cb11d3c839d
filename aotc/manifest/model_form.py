"""One model of a manifest as it is written, for the checks of the second pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aotc.expressions import Expression
from aotc.manifest.findings import Findings
from aotc.manifest.inputs import leaf_path
from aotc.manifest.types import Key, KeyPath


@dataclass(frozen=True)
class ModelForm:
    """One model with the defaults applied, and where each of its keys stands in the file."""

    name: str
    own: Mapping[str, Any]
    defaults: Mapping[str, Any]
    findings: Findings

    def path(self, key: str, *keys: Key) -> KeyPath:
        inherited = key not in self.own and key in self.defaults
        return ("defaults", key, *keys) if inherited else ("models", self.name, key, *keys)

    def get(self, key: str, default: Any) -> Any:
        return self.own.get(key, self.defaults.get(key, default))

    def typed(self, key: str, empty: Any) -> Any:
        """The value, or an empty one if its type is wrong, which another check reports."""
        value = self.get(key, empty)
        return value if isinstance(value, type(empty)) else empty

    def sound(self, key: str, *keys: Key) -> bool:
        return self.findings.sound(self.path(key, *keys))

    def report(self, path: KeyPath, message: str, *, hint: str = "") -> None:
        # A default can suit one model and not another.
        text = f"{message} (for the model `{self.name}`)" if path[0] == "defaults" else message
        self.findings.add(path, text, hint=hint)


@dataclass(frozen=True)
class TensorForm:
    """A tensor of a model's inputs, and the expressions over dims of its shape by axis."""

    keys: KeyPath
    form: Mapping[str, Any]
    expressions: Mapping[int, Expression]

    @property
    def name(self) -> str:
        return leaf_path(self.keys)

    @property
    def dims(self) -> frozenset[str]:
        return frozenset().union(*(expression.names for expression in self.expressions.values()))


def dims_of(tensors: Iterable[TensorForm]) -> frozenset[str]:
    return frozenset().union(*(tensor.dims for tensor in tensors))
