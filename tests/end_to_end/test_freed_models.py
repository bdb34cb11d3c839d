"""A model is freed with its last reference, whatever was done with it: a service that switches releases holds one.

Not when Python's garbage collector comes by: a model's tensors are few objects, so that may be after many releases.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ZOO
from safetensors.torch import save_file
from torch import nn

import aotc
from aotc.errors import BindError, LibraryError, MissError
from aotc.runtime.compiled import Compiled
from aotc.telemetry import sample_shapes, startup_report
from examples.models import transformer_block

Make = Callable[..., Compiled]
Held = list[Any]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def make(quickstart_store: Path, tmp_path: Path) -> Make:
    """Loads quickstart: with a module, or from a checkpoint's file."""

    def load(on_disk: bool = False, **options: Any) -> Compiled:
        module = transformer_block(width=256, heads=4).eval()
        if on_disk:
            save_file(module.state_dict(), tmp_path / "weights.safetensors")
            return aotc.load("quickstart", weights=tmp_path / "weights.safetensors", store=quickstart_store, **options)
        return aotc.load("quickstart", module, store=quickstart_store, **options)

    return load


def call(compiled: Any) -> None:
    """Twice in each bucket: by Python, then by the extension."""
    with torch.no_grad():
        for batch in (1, 4, 1, 4):
            compiled(torch.zeros(batch, 128, 256))


def miss(compiled: Compiled) -> None:
    with torch.no_grad():
        compiled(torch.zeros(2, 128, 256))


def sampled(make: Make) -> tuple[Compiled, Any]:
    compiled = make(on_disk=True)
    sample_shapes(compiled)
    sample = sample_shapes(compiled)
    call(compiled)
    assert sample.seen == 4
    return compiled, sample  # which outlives its model


def scraped(make: Make) -> tuple[Compiled, Any]:
    """By a registry that is told of another release."""
    client = pytest.importorskip("prometheus_client")
    from aotc.telemetry.prometheus import StatsCollector

    serving = {"quickstart:v1": make(on_disk=True)}
    registry = client.CollectorRegistry()
    registry.register(StatsCollector(lambda: serving))
    assert "quickstart:v1" in client.generate_latest(registry).decode()
    return serving.popitem()[1], registry


def observed(make: Make) -> tuple[Compiled, Any]:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from aotc.telemetry.opentelemetry import observe

    serving = {"quickstart:v1": make(on_disk=True)}
    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    observe(lambda: serving, provider.get_meter("service"))
    assert reader.get_metrics_data() is not None
    return serving.popitem()[1], provider


def reported(make: Make) -> tuple[Compiled, Any]:
    compiled = make()
    report = startup_report({"quickstart": compiled})
    return compiled, (report, compiled.stats(), compiled.explain(torch.zeros(2, 128, 256)))


def missed(make: Make) -> tuple[Compiled, Any]:
    compiled = make()
    with pytest.raises(MissError):
        miss(compiled)
    return compiled, None


def missed_in_eager(make: Make) -> tuple[Compiled, Any]:
    compiled = make(on_miss="eager")
    miss(compiled)
    return compiled, None


def missed_by_a_callable(make: Make) -> tuple[Compiled, Any]:
    seen: list[str] = []
    compiled = make(on_miss=lambda error, x: seen.append(str(error)))
    miss(compiled)
    assert len(seen) == 1
    return compiled, seen


def prepared(make: Make) -> tuple[Compiled, Any]:
    """What was prepared stays for other loads."""
    other = make(on_disk=True)
    assert other.forward.loaded is not None
    found = aotc.prepare("quickstart", store=other.forward.loaded.store)
    return found.load(transformer_block(width=256, heads=4).eval()), found


def attached(make: Make) -> tuple[Compiled, Any]:
    loaded = make().forward.loaded
    assert loaded is not None
    service = nn.ModuleDict({"quickstart": transformer_block(width=256, heads=4).eval()})
    aotc.attach(service, loaded.store)
    compiled = service.pop("quickstart")
    assert isinstance(compiled, Compiled)
    return compiled, service


def with_other_weights(make: Make) -> tuple[Compiled, Any]:
    compiled = make(concurrency=2)
    call(compiled)
    compiled.update_weights(transformer_block(width=256, heads=4).state_dict())
    call(compiled)
    compiled.refresh()
    return compiled, None


USES = [
    *(sampled, scraped, observed, reported, missed, missed_in_eager, missed_by_a_callable, prepared, attached),
    with_other_weights,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_it_is_freed_with_its_last_reference(make: Make, use: Callable[[Make], tuple[Compiled, Any]]) -> None:
    compiled, kept = use(make)
    call(compiled)
    forward = compiled.forward
    parts = {
        "call": forward,
        "library": forward._libraries[0],
        "state": forward._state,
        "module": forward.module or forward,
    }
    alive = {name: weakref.ref(part) for name, part in parts.items()}
    del compiled, forward, parts
    assert [name for name, part in alive.items() if part() is not None] == []
    del kept


def test_a_module_that_cannot_be_loaded_is_freed(quickstart_store: Path) -> None:
    module = transformer_block(width=128, heads=4).eval()
    alive = weakref.ref(module)
    with pytest.raises(BindError):
        aotc.load("quickstart", module, store=quickstart_store)
    del module
    assert alive() is None


def test_of_a_failed_call_nothing_is_kept(zoo: Any, zoo_store: Path) -> None:
    """Neither by the extension's error nor by that of Python."""
    compiled = aotc.load("pooled", zoo.Pooled().eval(), store=zoo_store)
    mask = torch.ones(4, 16, dtype=torch.bool)
    right, wrong = torch.zeros(4, 16, dtype=torch.int64), torch.full((4, 16), 99)
    with torch.no_grad():
        for ids in (wrong, right, right, wrong):
            if ids is right:
                compiled(ids, mask=mask)
                continue
            with pytest.raises(LibraryError):
                compiled(ids, mask=mask)
    assert compiled.stats().errors == {"LibraryError": 2}
    alive = weakref.ref(compiled.forward), weakref.ref(wrong)
    del compiled, wrong, ids
    assert [each() for each in alive] == [None, None]


def test_a_model_by_regions_is_freed_once_it_is_detached(regions_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attached, the module holds the code of its regions, which holds the module: that is a cycle."""
    monkeypatch.syspath_prepend(str(ZOO))
    from region_models import Stack

    module = Stack().eval()
    compiled = aotc.load("stack", module, store=regions_store)
    sample = sample_shapes(compiled)
    for _ in range(3):
        compiled(torch.zeros(4, 8))
    assert sample.seen == 3
    alive = weakref.ref(compiled.forward), weakref.ref(module), *map(weakref.ref, compiled.forward.regions.values())
    compiled.detach()
    del compiled, module
    assert [each() for each in alive] == [None] * len(alive)
