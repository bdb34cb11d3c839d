"""`aotc verify --bisect` of an artifact with a planted fault, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from doctoring import copy_store
from in_process import run_here

from aotc.records import Argument
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.reference import parse_reference


def test_a_wrong_weight_is_named_with_both_values(quickstart_store: Path, tmp_path: Path) -> None:
    """The record binds two weights of one shape in each other's place, as a faulty build or editor would."""
    store = copy_store(quickstart_store, tmp_path)
    (entry,) = read_bundle(store, parse_reference("quickstart")).artifacts
    artifact = read_built(store, entry)
    first, other = names = ("attention.out.bias", "feed_forward.2.bias")
    swapped = {Argument(state=one): Argument(state=two) for one, two in (names, names[::-1])}
    variants = tuple(
        msgspec.structs.replace(one, arguments=tuple(swapped.get(each, each) for each in one.arguments))
        for one in artifact.variants
    )
    publish(store, "quickstart", "latest", [msgspec.structs.replace(artifact, variants=variants)])
    ran = run_here("verify", "quickstart", "--store", store.path, "--seeds", "1", "--bisect", "--json")
    assert ran.returncode == 1, ran.stderr
    reports = json.loads(ran.stdout)
    (found,) = [report["bisection"] for report in reports if report["bisection"]]
    assert found["stages"][0]["name"] == "artifact in the store" and found["stages"][0]["outcome"] == "wrong"
    culprit = found["culprit"]
    assert (culprit["kind"], culprit["names"]) in (("weight", [first]), ("weight", [other]))
    assert culprit["numbers"]["compiled"] != culprit["numbers"]["eager"]
    assert "`aotc build … --force`" in found["conclusion"]  # a plain build would find the faulty one up to date
