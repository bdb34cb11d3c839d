"""`aotc fsck` and `aotc gc` as a person or a job runs them: exit codes, what is printed, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from in_process import run_here
from sample_artifacts import CREATED, stored_artifact

from aotc.cli import main
from aotc.store.layout import reader as store_reader
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.near_stores import nearest_first
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference


@pytest.fixture
def published(store: Store, work: Path) -> Store:
    for version in (1, 2):
        publish(store, "tiny", f"v{version}", [stored_artifact(store, work, (version,))], created=CREATED)
    garbage = store.blobs.put_bytes(b"x" * 3000)
    os.utime(store.blobs.path(garbage.digest), (0, 0))
    return store


def aotc(store: Store, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, "--store", store.path, TMPDIR=str(store.path.parent), **environment)


def test_a_clean_store_with_garbage_exits_with_0(published: Store) -> None:
    ran = aotc(published, "fsck")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "garbage: 1 file, 2.9 KiB" in ran.stdout
    assert "0 errors" in ran.stdout


def test_damage_exits_with_1_and_names_all_of_it(published: Store) -> None:
    digest = read_bundle(published, parse_reference("tiny:v1")).artifacts[0].digest
    published.blobs.path(digest).write_bytes(b"?")
    ran = aotc(published, "fsck")
    assert ran.returncode == 1
    assert f"error: blob corrupt: blobs/sha256/{digest[7:]}" in ran.stderr
    assert "needed by tiny:v1" in ran.stderr
    assert ran.stderr.count("error: ") == 1 and ran.stdout.endswith(", 1 error\n")
    report: dict[str, Any] = json.loads(aotc(published, "fsck", "--json").stdout)
    assert report["clean"] is False
    assert {"blob corrupt", "tag"} <= {finding["kind"] for finding in report["findings"]}
    repaired = aotc(published, "fsck", "--repair")
    assert f"repaired: blobs/sha256/{digest[7:]}: removed" in repaired.stdout
    assert repaired.returncode == 1  # tiny:v1 lacks that blob until somebody builds it again


def test_a_folder_that_is_no_store_exits_with_2(tmp_path: Path) -> None:
    assert run_here("fsck", "--store", tmp_path / "absent").returncode == 2
    assert run_here("gc", "--store", tmp_path / "absent").returncode == 2


def test_gc_says_what_it_frees(published: Store) -> None:
    said = aotc(published, "gc", "--dry-run")
    assert said.returncode == 0
    assert "2.9 KiB: nothing names it" in said.stdout
    assert "2.9 KiB would be freed" in said.stdout
    freed = json.loads(aotc(published, "gc", "--json").stdout)
    assert freed["freed"] == 3000
    assert [removal["kind"] for removal in freed["removed"]] == ["blob"]
    assert json.loads(aotc(published, "gc", "--json").stdout)["freed"] == 0


def test_tags_go_only_when_that_is_asked(published: Store) -> None:
    assert aotc(published, "gc", "--older-than", "0", "--grace", "0").returncode == 0
    assert len(published.tags()) == 2
    over = aotc(published, "gc", "--max-size", "10B")
    assert over.returncode == 1
    assert "over the size limit" in over.stderr
    assert "--untag" in over.stderr
    ran = aotc(published, "gc", "--untag", "--keep", "tiny:v1", "--keep-last", "0", "--grace", "0")
    assert ran.returncode == 0
    assert "tag tiny:v2: not among those to keep" in ran.stdout
    assert [str(entry) for entry in published.tags()] == ["tiny:v1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--untag",), "--untag needs a rule"),
        (("--keep", "x:*"), "add --untag"),
        (("--older-than", "soon"), "'soon' is not an age"),
        (("--max-size", "big"), "'big' is not a size"),
    ],
)
def test_options_that_make_no_sense_exit_with_2(published: Store, arguments: tuple[str, ...], text: str) -> None:
    ran = aotc(published, "gc", *arguments)
    assert ran.returncode == 2
    assert text in ran.stderr
    assert len(published.tags()) == 2


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("fsck --store file:///srv/store", "name the folder itself: /srv/store"),
        ("fsck --store s3://bucket/x", "`aotc fetch s3://bucket/x#MODEL:TAG --all --store FOLDER`"),
        ("gc --store s3://bucket/x", "aotc deletes nothing from a remote store"),
        ("sign m --key K --store s3://bucket/x", "`aotc fetch s3://bucket/x#MODEL:TAG --all --store FOLDER`"),
        ("fetch s3://bucket/x#m --store s3://bucket/y", "fetch into a folder, and `aotc push` from there"),
        ("merge s3://bucket/x --into folder", "`aotc fetch s3://bucket/x#MODEL:TAG --all --store FOLDER`"),
        ("merge folder --into file:///srv/store", "name the folder itself: /srv/store"),
        ("merge folder --into s3://bucket/x", "merge into a folder, and `aotc push` from there"),
    ],
)
def test_a_url_in_the_place_of_a_folder_is_told_what_to_do_and_makes_none(
    tmp_path: Path, command: str, hint: str
) -> None:
    ran = run_here(*command.split(), cwd=tmp_path)
    assert ran.returncode == 2 and "is not a folder" in ran.stderr
    assert hint in ran.stderr.partition("hint: ")[2]
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_goes_from_folder_to_folder_and_a_tag_back_by_the_folders_urls(
    published: Store, tmp_path: Path
) -> None:
    served = Store(tmp_path / "served")
    for tag in ("v1", "v2"):
        assert aotc(served, "fetch", "--all", f"file://{published.path}#tiny:{tag}", "--tag", "stable").returncode == 0
        assert aotc(served, "fetch", "--all", f"file://{published.path}#tiny:{tag}").returncode == 0
    before = {str(entry): entry.digest for entry in served.tags()}
    assert before["tiny:stable"] == before["tiny:v2"] == read_bundle(published, parse_reference("tiny:v2")).digest
    back = aotc(served, "fetch", "--all", f"file://{served.path}#tiny:v1", "--tag", "stable")
    assert back.returncode == 0 and "  0 of " in back.stdout, back.stdout
    assert {str(entry): entry.digest for entry in served.tags()} == {**before, "tiny:stable": before["tiny:v1"]}


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("push", "{store}#tiny:v1", "{store}-2#tiny:v1"), "or file:///FOLDER#model:tag"),
        (("fetch", "{store}#tiny:v1", "--store", "{store}-2"), "file:///FOLDER#model:tag of a folder"),
    ],
)
def test_a_folder_in_the_place_of_a_remote_is_told_its_url(
    published: Store, command: tuple[str, ...], hint: str
) -> None:
    ran = run_here(*(part.format(store=published.path) for part in command))
    assert ran.returncode == 2
    assert hint in ran.stderr


def test_a_fetch_that_is_refused_leaves_no_folder(published: Store, tmp_path: Path) -> None:
    """It would be no store. One that was there stays."""
    generated = run_here("sign", "--generate-key-pair", tmp_path / "cosign", COSIGN_PASSWORD="x")
    assert generated.returncode == 0, generated.stderr
    keys, source = {"AOTC_TRUSTED_KEYS": str(tmp_path / "cosign.pub")}, f"file://{published.path}#tiny:v1"
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        ran = run_here("fetch", source, "--store", tmp_path / name, AOTC_CACHE_DIR=str(tmp_path / "cache"), **keys)
        assert ran.returncode == 2 and "is not signed" in ran.stderr
    assert not (tmp_path / "new").exists() and (tmp_path / "empty").exists()


def test_ls_lists_the_others_where_a_bundle_is_damaged(store: Store, work: Path) -> None:
    for version in (1, 2, 3):
        publish(store, "tiny", f"v{version}", [stored_artifact(store, work, (version,))], created=CREATED)
    bundle = read_bundle(store, parse_reference("tiny:v2"))
    store.blobs.path(bundle.artifacts[0].digest).unlink()
    ran = CliRunner().invoke(main, ["ls", "--store", str(store.path)])
    assert ran.exit_code == 1
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == ["tiny:v1", "tiny:v3"]
    assert "error: tiny:v2: the blob" in ran.stderr and "fsck" in ran.stderr
    ran = CliRunner().invoke(main, ["ls", "--store", str(store.path), "--json"])
    listed = {row["tag"]: row.get("error", "") for row in json.loads(ran.stdout)}
    assert ran.exit_code == 1 and [tag for tag, error in listed.items() if not error] == ["v1", "v3"] and listed["v2"]


def test_ls_names_the_bundle_that_lacks_a_file(published: Store) -> None:
    (entry,) = read_bundle(published, parse_reference("tiny:v1")).artifacts
    published.blobs.path(read_artifact(published, entry).variants[0].files[0].blob).unlink()
    ran = CliRunner().invoke(main, ["ls", "--store", str(published.path)])
    assert ran.exit_code == 1 and "error: tiny:v1: missing files: model.so" in ran.stderr


def test_ls_of_a_bundle_that_was_fetched_in_part_lists_what_is_there(store: Store, work: Path, tmp_path: Path) -> None:
    both = [stored_artifact(store, work, (1,), target=f"cpu:x86-64-{level}") for level in ("v3", "v4")]
    publish(store, "tiny", "v1", both)
    fetched = Store(tmp_path / "fetched")
    assert aotc(fetched, "fetch", f"file://{store.path}#tiny:v1", "--target", "cpu:x86-64-v3").returncode == 0
    ran = CliRunner().invoke(main, ["ls", "--store", str(fetched.path)])
    assert ran.exit_code == 0 and ran.stdout.splitlines()[1].split()[:4] == ["tiny:v1", "cpu:x86-64-v3", "no", "1"]


def test_ls_of_a_tag_says_to_name_the_model(published: Store) -> None:
    ran = CliRunner().invoke(main, ["ls", "tiny:v1", "--store", str(published.path)])
    assert ran.exit_code == 2
    assert "hint: write tiny; `aotc inspect tiny:v1` shows the bundle" in ran.stderr


@pytest.mark.parametrize("command", ["doctor", "inspect", "verify", "picks", "sign", "tag", "rm", "ls"])
def test_two_stores_that_differ_are_refused(published: Store, command: str) -> None:
    more = {"sign": ["--key", "k"], "tag": ["new"]}.get(command, [])
    what = f"{published.path}#tiny{'' if command == 'ls' else ':v1'}"
    ran = CliRunner().invoke(main, [command, what, *more, "--store", "other"])
    assert ran.exit_code == 2
    assert f"the reference names the store {published.path}, and --store names other" in ran.stderr


def test_ls_reads_the_index_once_and_each_bundle_once(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "tiny", "v1", [stored_artifact(store, work, (1,))], created=CREATED)
    bundle = store.resolve(parse_reference("tiny:v1"))
    for version in range(20):
        store.set_tag("tiny", f"again{version}", bundle)
    reads: list[str] = []
    kept = store_reader.read_limited
    monkeypatch.setattr(
        store_reader, "read_limited", lambda path, limit: (reads.append(path.name), kept(path, limit))[1]
    )
    ran = CliRunner().invoke(main, ["ls", "--store", str(store.path)])
    assert len(ran.stdout.splitlines()) == 22
    assert reads.count("index.json") == 1


def test_a_missing_name_among_many_long_ones_is_said_at_once() -> None:
    names = [f"tiny:v{number:06}".ljust(120, "x") for number in range(10_000)]
    begin = time.process_time()
    nearest = nearest_first("tiny:v004242".ljust(121, "y"), names)
    assert time.process_time() - begin < 2.0  # comparing them all in full takes 10 s and more
    assert nearest[0].startswith("tiny:v004242") and sorted(nearest) == names
