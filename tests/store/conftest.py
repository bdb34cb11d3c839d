from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from registry_server import FaultProxy, RegistryServer, running_registry

from aotc.store.layout.store import Store


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced to the disk: most of the time of these tests is that, and no test of a process sees it."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def proxy(registry: RegistryServer) -> Iterator[FaultProxy]:
    """Counts the requests to the registry, and lets all through unless a test sets `fault`."""
    proxy = FaultProxy(registry.port)
    yield proxy
    proxy.close()


@pytest.fixture
def failing_os(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let a function of `os` fail with an errno: root passes every permission check, so the tests cannot use those."""
    import os

    def fail(function: str, number: int) -> None:
        def failing(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, function, failing)

    return fail
