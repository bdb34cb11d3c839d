"""`aotc.load` of a store that somebody changed: refused before a byte is mapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from doctoring import publish_changed, replace_variant
from processes import run_python

import aotc
from aotc.digest import sha256_bytes
from aotc.records import Argument, Artifact, Output, Variant
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference


def files_of(store: Store, model: str) -> list[Path]:
    """Every file that a load of the model reads, but `index.json`, of which not all matters."""
    bundle = read_bundle(store, parse_reference(model))
    artifact = read_artifact(store, bundle.artifacts[0])
    blobs = [bundle.digest, bundle.artifacts[0].digest, sha256_bytes(artifact.encode())]
    blobs += [file.blob for variant in artifact.variants for file in variant.files]
    return [store.path / "oci-layout", *map(store.blobs.path, dict.fromkeys(blobs))]


def test_a_changed_byte_anywhere_is_refused_before_a_library_is_opened(
    copied: Store, zoo: Any, opened: list[Any]
) -> None:
    module = zoo.Linear().eval()
    for path in files_of(copied, "linear"):
        data = path.read_bytes()
        for position in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:position] + bytes([data[position] ^ 0x04]) + data[position + 1 :])
            with pytest.raises(aotc.AotcError):
                aotc.load("linear", module, store=copied.path)
            assert opened == [], path
        path.write_bytes(data)
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.allclose(aotc.load("linear", module, store=copied.path)(x), module(x), atol=1e-5)
    assert len(opened) == 2


def change_variant(change: Callable[[Variant], Variant]) -> Callable[[Artifact], Artifact]:
    return lambda artifact: replace_variant(artifact, 0, change(artifact.variants[0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda variant: msgspec.structs.replace(variant, arguments=(*variant.arguments, Argument(leaf=0))),
        lambda variant: msgspec.structs.replace(variant, arguments=variant.arguments[:-1]),
        lambda variant: msgspec.structs.replace(variant, outputs=(Output(index=1),)),
    ],
    ids=["an argument more", "an argument less", "an output that is not there"],
)
def test_a_record_of_another_library_is_refused_at_load(
    copied: Store, zoo: Any, change: Callable[[Variant], Variant]
) -> None:
    publish_changed(copied, "linear", change_variant(change), "lying")
    with pytest.raises(aotc.CorruptError, match=r"the library of bucket batch=2 takes 3 tensors and gives 1"):
        aotc.load("linear:lying", zoo.Linear().eval(), store=copied.path)


def test_a_lying_record_is_found_out_by_the_library_where_every_call_is_checked(copied: Store, zoo: Any) -> None:
    """As FORMAT.md says: a record can be wrong about its library's inputs, and only the library itself knows."""

    def swap(variant: Variant) -> Variant:
        first, second, *rest = variant.arguments
        return msgspec.structs.replace(variant, arguments=(second, first, *rest))

    publish_changed(copied, "linear", change_variant(swap), "lying")
    code = """
import sys, torch, aotc, models
compiled = aotc.load("linear:lying", models.Linear().eval(), store=sys.argv[1])
try:
    with torch.no_grad():
        compiled(torch.randn(2, 8))
except aotc.LibraryError as error:
    print(error)
"""
    assert "the library failed" in run_python(code, copied.path, AOTI_RUNTIME_CHECK_INPUTS="1")
