"""What `aotc.compile` was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aotc.store.reference import is_remote

When = Literal["background", "exit", "now", "never"]


class Options(NamedTuple):
    """The arguments of `aotc.compile`, without the module."""

    factory: str | None
    kwargs: Mapping[str, Any] | None
    store: str
    ranges: Mapping[str, Sequence[int]]
    mode: str
    build: When
    seconds: float
    cores: int
    builds: int
    retry: bool
    train: bool = False
    regions: Sequence[str] | Literal["auto"] | None = None
    gpu: bool = False
    method: str = ""
    on_miss: Literal["eager", "error"] = "eager"
    fullgraph: bool = False
    dynamic: bool | None = None

    @property
    def url(self) -> str:
        """Where the store is a remote one, that this process works in a copy of; "" for any other."""
        return self.store if is_remote(self.store) and self.build != "never" else ""

    @property
    def asked(self) -> dict[str, Any]:
        """What another build would be needed for."""
        ranges = {dim: list(ends) for dim, ends in self.ranges.items()}
        asked: dict[str, Any] = {"factory": self.factory, "kwargs": self.kwargs, "mode": self.mode, "ranges": ranges}
        regions = self.regions if self.regions == "auto" else list(self.regions or ())
        asked |= {"train": self.train, "regions": regions, "method": self.method}
        given = {name: value for name, value in (asked | {"fullgraph": self.fullgraph}).items() if value}
        return given if self.dynamic is None else given | {"dynamic": self.dynamic}
