"""The public suite `aotc.testing.ObjectsSuite` over our own backends, and a backend that another package adds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from processes import run_python
from store_backends import QUICK, STARTS, WRITTEN_OVER_A_NETWORK, Backend

from aotc.errors import StoreError
from aotc.store.opening import open_objects, open_remote
from aotc.store.remote.interface import Deadline, Limits, Traffic, retrying
from aotc.store.remote.objects.object_interface import Objects
from aotc.testing import ObjectsSuite

OBJECTS = [pytest.param(name, marks=STARTS[name][1]) for name in WRITTEN_OVER_A_NETWORK if name != "registry"]


class TestOurBackends(ObjectsSuite):
    @pytest.fixture(params=OBJECTS)
    def make_objects(
        self,
        request: pytest.FixtureRequest,
        backends_started: Mapping[str, Backend],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> Callable[[], Objects]:
        backend = backends_started[request.param]
        for name, value in backend.environment.items():
            monkeypatch.setenv(name, value)
        where = backend.new(tmp_path)

        def opened() -> Objects:
            """Its reads are tried again, as a transfer does: rclone closes a connection that it kept open."""
            objects = open_objects(where, QUICK, Traffic())
            read = objects.read
            again = functools.partial(retrying, QUICK, Deadline(QUICK.total, where))
            monkeypatch.setattr(objects, "read", lambda name, limit: again(lambda: read(name, limit)))
            return objects

        return opened


def test_a_package_adds_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point of `aotc.objects`."""
    installed = tmp_path / "somebodys-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[aotc.objects]\nmine = somebodys:objects\n")
    (tmp_path / "somebodys.py").write_text(
        "from aotc.store.remote.objects.folder import FolderObjects\n"
        f"def objects(url, limits, traffic):\n    return FolderObjects('file://{tmp_path}/' + url[7:], traffic)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "somebodys", raising=False)
    remote = open_remote("mine://shelf", Limits())
    remote.put_unit("sha256:" + "0" * 64, b"{}")
    assert (tmp_path / "shelf" / "oci-layout").exists()
    with pytest.raises(StoreError, match="is not a store that aotc knows"):
        open_remote("yours://shelf", Limits())


def test_pytest_is_imported_by_the_suite_only() -> None:
    """And the suite by nothing: a service's image has no pytest."""
    loaded = run_python(
        "import pkgutil, importlib, sys, aotc.store\n"
        "for one in pkgutil.walk_packages(aotc.store.__path__, 'aotc.store.'):\n"
        "    importlib.import_module(one.name)\n"
        "print('pytest' in sys.modules, 'aotc.testing' in sys.modules)"
    )
    assert loaded.split() == ["False", "False"]
