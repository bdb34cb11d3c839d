"""`aotc tag`, `aotc rm` and `aotc ls MODEL`, as a person calls them."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sample_artifacts import CREATED, make_artifact, make_variant, put_file, stored_artifact
from signing import NOW, key_by_openssl, needs_openssl, private_key, signed

from aotc.cli import main
from aotc.errors import NotFoundError
from aotc.store.layout import oci
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, put_unit
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.tagging import set_tags

KEYS = ("AOTC_TRUSTED_KEYS", "AOTC_SIGNED_AFTER", "AOTC_STORE")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def versions(store: Store, work: Path) -> dict[str, str]:
    """The digests of tiny:v1 and tiny:v2, which share a file; `latest` names v2."""
    found = {}
    for number in (1, 2):
        artifact = stored_artifact(store, work, (number,))
        for tag in (f"v{number}", "latest"):
            found[f"v{number}"] = publish(store, "tiny", tag, [artifact], created=CREATED)
    return found


def aotc(store: Store, *arguments: object) -> Result:
    ran = CliRunner().invoke(main, [*map(str, arguments), "--store", str(store.path)])
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    return ran


def named(store: Store, name: str) -> str:
    return store.resolve(parse_reference(name)).digest


def test_one_command_rolls_back_and_says_what_the_tag_named(store: Store, versions: dict[str, str]) -> None:
    ran = aotc(store, "tag", "tiny:v1", "tiny:latest")
    assert ran.exit_code == 0 and ran.stderr == ""
    assert f"tagged tiny:latest  {versions['v1']}  (was {versions['v2']})" in ran.stdout
    assert named(store, "tiny:latest") == versions["v1"]
    assert "(as before)" in aotc(store, "tag", "tiny:v1", "latest").stdout


def test_a_tag_that_moves_away_from_a_bundle_without_another_name_tells_how_to_keep_it(
    store: Store, versions: dict[str, str]
) -> None:
    assert aotc(store, "rm", "tiny:v2").exit_code == 0
    ran = aotc(store, "tag", "tiny:v1", "latest")
    (command,) = [line.strip() for line in ran.stdout.splitlines() if line.startswith("  aotc tag")]
    assert aotc(store, *command.split()[1:]).exit_code == 0
    assert named(store, "tiny:previous") == versions["v2"]


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ("tiny", "write tiny:latest"),
        ("other:v1", "write tiny:TAG"),
        ("/elsewhere#tiny:v1", "`aotc push` and `aotc fetch`"),
        ("tiny@sha256:" + 64 * "0", "write tiny:TAG"),
        ("v 3", "letters, digits"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused_before_any_is_set(
    store: Store, versions: dict[str, str], new: str, told: str
) -> None:
    ran = aotc(store, "tag", "tiny:v1", "good", new)
    assert ran.exit_code == 2 and told in ran.stderr
    assert {entry.tag for entry in store.tags()} == {"latest", "v1", "v2"}


def test_a_removed_tag_leaves_what_gc_will_free_and_it_comes_back_by_its_digest(
    store: Store, versions: dict[str, str]
) -> None:
    ran = aotc(store, "rm", "tiny:v1", "--json")
    (removed,) = json.loads(ran.stdout)
    assert removed["name"] == "tiny:v1" and removed["digest"] == versions["v1"] and removed["others"] == []
    freed = collect(store, Policy(grace=0), dry_run=True)
    assert removed["unreached"]["free"] == freed.freed > 0
    assert aotc(store, "tag", f"tiny@{versions['v1']}", "v1").exit_code == 0
    assert collect(store, Policy(grace=0), dry_run=True).freed == 0


def test_blobs_of_finished_units_are_told_apart(store: Store, work: Path) -> None:
    variant = make_variant((put_file(store, work, "model.so", b"\0" * 100_000),), 4)
    artifact = make_artifact((variant,))
    publish(store, "tiny", "v1", [artifact])
    key = "sha256:" + 64 * "a"
    put_unit(store, UnitRecord(key=key, artifact=artifact, factors={}, seconds=1.0, created=CREATED))
    (removed,) = json.loads(aotc(store, "rm", "tiny:v1", "--json").stdout)
    assert removed["unreached"]["in_units"] == variant.files[0].blob_size
    assert "finished units keep, until `aotc gc --older-than AGE`" in _removed_again(store, artifact)


def _removed_again(store: Store, artifact: object) -> str:
    publish(store, "tiny", "v1", [artifact])  # type: ignore[list-item]
    return aotc(store, "rm", "tiny:v1").stdout


def test_a_tag_that_another_tag_shadows_names_it(store: Store, versions: dict[str, str]) -> None:
    assert "tiny:latest still names the bundle" in aotc(store, "rm", "tiny:v2").stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tiny", "write tiny:latest to remove that one"),
        ("tiny:v3", "there is"),
        ("tiny@sha256:" + 64 * "0", "bytes are removed by `aotc gc`"),
    ],
)
def test_only_a_tag_that_is_spelled_out_is_removed(
    store: Store, versions: dict[str, str], name: str, told: str
) -> None:
    ran = aotc(store, "rm", name)
    assert ran.exit_code == 2 and told in ran.stderr
    assert len(store.tags()) == 3


def test_a_bundle_that_was_fetched_in_part_stays_so_under_its_new_name(
    store: Store, work: Path, tmp_path: Path
) -> None:
    both = [stored_artifact(store, work, (1,), target=target) for target in ("cpu:x86-64-v3", "cpu:x86-64-v4")]
    publish(store, "tiny", "v1", both, created=CREATED)
    source = parse_reference(f"file://{store.path}#tiny:v1")
    fetch(source, tmp_path / "fetched", of_targets("cpu:x86-64-v3"))
    fetched = Store.open(tmp_path / "fetched")
    set_tags(str(fetched.path), parse_reference("tiny:v1"), ["stable"])
    (entry,) = [one for one in fetched.entries() if one.annotation(oci.REF_NAME) == "tiny:stable"]
    assert entry.annotation(oci.SPARSE) == "true"
    assert aotc(fetched, "rm", "tiny:v1").exit_code == aotc(fetched, "gc", "--dry-run").exit_code == 0


def test_the_rest_of_what_gc_removed_gets_no_name(store: Store, versions: dict[str, str]) -> None:
    bundle = read_bundle(store, parse_reference("tiny:v1"))
    manifest = oci.read_document(store.blobs, bundle.artifacts[0].digest, oci.ImageManifest)
    store.blobs.path(manifest.layers[0].digest).unlink()
    with pytest.raises(NotFoundError, match="1 of the blobs"):
        set_tags(str(store.path), parse_reference(f"tiny@{bundle.digest}"), ["again"])
    assert {entry.tag for entry in store.tags()} == {"latest", "v1", "v2"}


def test_ls_of_a_model_shows_its_tags_the_last_one_first(store: Store, versions: dict[str, str], work: Path) -> None:
    publish(store, "other", "v1", [stored_artifact(store, work, (3,), model="other")])
    time.sleep(0.001)  # the clock of `published` counts microseconds
    assert aotc(store, "tag", "tiny:v1", "stable").exit_code == 0
    header, *rows = [line.split() for line in aotc(store, "ls", "tiny").stdout.splitlines()]
    assert header[-3:-1] == ["verified", "signed"]
    assert [row[0] for row in rows] == ["tiny:stable", "tiny:latest", "tiny:v2", "tiny:v1"]
    assert {*rows[0][-3:-1], *rows[1][-3:-1]} == {"no"}
    assert "signed" not in aotc(store, "ls").stdout
    assert "other:v1" in CliRunner().invoke(main, ["ls", f"file://{store.path}"]).stdout
    missing = aotc(store, "ls", "tinny")
    assert missing.exit_code == 2 and "there is tiny" in missing.stderr


@needs_openssl
def test_a_name_that_no_signature_is_for_is_told_and_shown(
    store: Store, versions: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_by_openssl(tmp_path, "release")
    key = private_key(private)
    signed(store, versions["v1"], key, "tiny:v1")
    told = aotc(store, "tag", "tiny:v1", "stable").stderr
    assert "the bundle is signed for tiny:v1: with trusted keys, a load as tiny:stable is refused" in told
    command = told.partition("name: aotc ")[2].strip().replace("KEY", str(private))
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    assert aotc(store, *command.split()).exit_code == 0
    assert aotc(store, "tag", "tiny:v1", "stable").stderr == ""

    def states() -> dict[str, str]:
        return {row["tag"]: row["signed"] for row in json.loads(aotc(store, "ls", "tiny", "--json").stdout)}

    assert states() == {"v1": "unchecked", "stable": "unchecked", "v2": "no", "latest": "no"}
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(public))
    signed(store, versions["v2"], key, "tiny:v2")
    assert states() == {"v1": "trusted", "stable": "trusted", "v2": "trusted", "latest": "other-name"}
    assert "is refused" in aotc(store, "tag", "tiny:v2", "new").stderr


@needs_openssl
def test_a_rollback_that_hosts_would_refuse_is_told(store: Store, versions: dict[str, str], tmp_path: Path) -> None:
    """A host that has accepted the newer signature for a name takes no older one (SECURITY.md)."""
    key = private_key(key_by_openssl(tmp_path, "release")[0])
    signed(store, versions["v1"], key, "tiny:latest", at=NOW - timedelta(days=7))
    signed(store, versions["v2"], key, "tiny:latest", at=NOW)
    told = aotc(store, "tag", "tiny:v1", "latest").stderr
    assert "a host that has loaded that one refuses this one" in told and "aotc sign" in told
    assert aotc(store, "tag", "tiny:v2", "latest").stderr == ""  # forwards


@needs_openssl
def test_a_signed_bundle_is_pushed_only_to_names_that_it_is_signed_for(
    store: Store, versions: dict[str, str], tmp_path: Path
) -> None:
    """Unless that is asked for, or the signature for the name is there already. An unsigned one may have any name."""
    key = private_key(key_by_openssl(tmp_path, "a")[0])
    there = f"file://{tmp_path}/there"
    assert aotc(store, "push", "tiny:v2", f"{there}#tiny:stable").exit_code == 0
    signed(store, versions["v1"], key, "tiny:v1")
    refused = aotc(store, "push", "tiny:v1", f"{there}#tiny:stable")
    assert refused.exit_code != 0 and "tiny:stable cannot be pushed: the bundle is signed for tiny:v1" in refused.stderr
    assert "--as tiny:stable" in refused.stderr and "--unsigned-name" in refused.stderr
    assert named(Store.open(tmp_path / "there"), "tiny:stable") == versions["v2"]
    assert aotc(store, "push", "tiny:v1", f"{there}#tiny:stable", "--unsigned-name").exit_code == 0
    assert aotc(store, "push", "tiny:v1", f"{there}#tiny:v1").exit_code == 0
    signed(Store.open(tmp_path / "there"), versions["v1"], key, "tiny:canary")
    assert aotc(store, "push", "tiny:v1", f"{there}#tiny:canary").exit_code == 0
