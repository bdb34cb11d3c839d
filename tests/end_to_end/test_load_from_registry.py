"""`aotc.load` of a bundle in a registry: compiled code that computes, from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_python import forked_python
from in_process import run_here
from registry_server import FaultProxy, needs, running_registry
from serving import LOAD

import aotc
from examples.models import transformer_block

pytestmark = needs("docker-registry")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, quickstart_store: Path) -> Iterator[FaultProxy]:
    """A registry with quickstart:v1 behind a proxy that counts."""
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        ran = run_here("push", f"{quickstart_store}#quickstart", f"oci://{server.host}/team/quickstart:v1")
        assert ran.returncode == 0, ran.stderr
        proxy = FaultProxy(server.port)
        yield proxy
        proxy.close()


def test_it_computes_and_no_compiler_is_imported_and_a_second_start_asks_once(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    where, cache = f"oci://{proxy.host}/team/quickstart:v1", str(tmp_path / "cache")
    proxy.seen.clear()
    assert forked_python(LOAD, where, "requests", AOTC_CACHE_DIR=cache).strip() == "[] True"
    methods = [request.method for request in proxy.seen]
    assert methods[0] == "HEAD" and set(methods[1:-2]) == {"GET"}  # the tag; the last two ask for what is attached
    digest = next(r.path.rpartition("/")[2] for r in proxy.seen if "/manifests/sha256:" in r.path)
    proxy.seen.clear()
    assert forked_python(LOAD, where, "requests", AOTC_CACHE_DIR=cache).strip() == "[] True"
    assert [request.method for request in proxy.seen] == ["HEAD"]
    proxy.seen.clear()
    pinned = f"oci://{proxy.host}/team/quickstart@{digest}"
    assert forked_python(LOAD, pinned, "requests", AOTC_CACHE_DIR=cache).strip() == "[] False"
    assert not proxy.seen


def test_a_component_is_looked_for_below_the_pipelines_repository(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    module = transformer_block(width=256, heads=4).eval()
    pipe = torch.nn.ModuleDict({"quickstart": module, "head": torch.nn.Identity()})
    assert aotc.attach(pipe, f"oci://{proxy.host}/team", tag="v1") == {"quickstart": module}
    assert isinstance(pipe["quickstart"], aotc.Compiled)
    with pytest.raises(aotc.NotFoundError, match="the components: quickstart, head"):
        aotc.attach(pipe, f"oci://{proxy.host}/team", tag="v2")


def test_inspect_and_verify_read_a_registry_too(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    where = f"oci://{proxy.host}/team/quickstart:v1"
    shown = run_here("inspect", where)
    assert shown.returncode == 0, shown.stderr
    assert "bucket batch=4,seq=128" in shown.stdout
    verified = run_here("verify", where, "--seeds", "1")
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.count("ok") == 2
