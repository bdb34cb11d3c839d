"""Every model of the zoo, by its record: what fits runs without torch and gives eager's values, the rest is refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from processes import ZOO

import aotc.standalone
from aotc.errors import LibraryError
from aotc.manifest import read_manifest
from aotc.models.auto_inputs import with_inputs
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.models.factory import build_module
from aotc.models.launch import NOT_MEASURED, READS_A_VALUE, unmeasured_launch
from aotc.models.signature import make_signature
from aotc.records import Artifact, LaunchPick, tuned_dims
from aotc.standalone.misfits import misfits
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.tensors.contents import contents
from aotc.tensors.rounding import difference


@pytest.fixture(scope="module")
def artifacts(zoo_store: Path) -> dict[str, Artifact]:
    store = Store.open(zoo_store)
    bundles = {tag.model: read_bundle(store, tag.reference) for tag in store.tags()}
    return {name: read_artifact(store, bundle.artifacts[0]) for name, bundle in bundles.items()}


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [each for each in contents(value).values() if isinstance(each, torch.Tensor)]


def test_what_fits_by_its_record_gives_eager_s_values(zoo_store: Path, artifacts: dict[str, Artifact]) -> None:
    """A call of each bucket, with seeded inputs, also what it writes into them; and the library ran it."""
    fitting = [name for name, artifact in artifacts.items() if misfits(artifact) == ()]
    assert {"linear", "frozen", "pooled", "generated", "generated-frozen", "convolution", "cache", "autocast"} <= {
        *fitting
    }
    manifest = read_manifest(str(ZOO / "manifest.yaml"), fitting)
    for name in fitting:
        torch.manual_seed(0)
        module = build_module(manifest.models[name], manifest.folder)
        spec = with_inputs(manifest, manifest.models[name], module)
        signature, frozen = make_signature(spec, module), artifacts[name].weights == "frozen"
        weights = None if frozen else {key: value.clone() for key, value in module.state_dict().items()}
        model = aotc.standalone.load(f"{zoo_store}#{name}", weights=weights)
        for seed, bucket in enumerate(spec.buckets):
            leaves = signature_leaves(spec, signature, tuned_dims(bucket), "cpu", seed, manifest.folder)
            (args, kwargs), (own_args, own_kwargs) = (
                arguments_of(signature, each) for each in (leaves, copy.deepcopy(leaves))
            )
            with modes_of(spec, "cpu"):
                expected = tensors_in((module(*args, **kwargs), args, kwargs))
            given = tensors_in((model(*own_args, **own_kwargs), own_args, own_kwargs))
            assert len(given) == len(expected) and difference(expected, given) <= 1, (name, bucket)
        counts = model.stats()
        assert (counts.calls, counts.misses) == (len(spec.buckets), 0), name


def test_code_that_reads_a_value_is_told_by_its_record(artifacts: dict[str, Artifact]) -> None:
    """For a GPU that the build machine lacks, it is launched directly: a capture cannot wait for a value."""
    models = read_manifest(str(ZOO / "manifest.yaml"), ["looping", "linear"]).models
    for name, reason in (("looping", READS_A_VALUE), ("linear", NOT_MEASURED)):
        one = msgspec.structs.replace(artifacts[name], variants=artifacts[name].variants[:1])
        assert unmeasured_launch(models[name], one) == LaunchPick(graph=name == "linear", reason=reason)


def test_what_does_not_fit_is_refused_by_the_names_in_its_record(
    zoo_store: Path, artifacts: dict[str, Artifact]
) -> None:
    refused = {name: reasons for name, artifact in artifacts.items() if (reasons := misfits(artifact))}
    assert {"bag", "derived", "mixed", "noisy", "pooling", "recurrent"} <= {*refused}
    for name, reasons in refused.items():
        weights = {} if artifacts[name].weights == "frozen" else _zeros(artifacts[name])
        with pytest.raises(LibraryError) as caught:
            aotc.standalone.load(f"{zoo_store}#{name}", weights=weights)
        said = str(caught.value)
        by_name = next((reason for reason in reasons if not reason.startswith("it calls ")), "")
        called = [re.sub("it calls |aoti_torch_cpu_", "", reason) for reason in reasons]
        assert by_name in said if by_name else all(call in said for call in called), (name, said)


def _zeros(artifact: Artifact) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in artifact.state
        if spec.persistent
    }
