"""Lines of `aotc inspect` about ranks, gradients and empty arguments."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from sample_artifacts import stored_artifact

from aotc.cli.inspect import _empty_text, _gradients_text
from aotc.records import Argument, Backward, Gradient, Parameter, StateSpec, TensorLeaf
from aotc.store.layout.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def test_tensors_with_and_without_gradients_are_counted_and_named(store: Store, tmp_path: Path) -> None:
    artifact = stored_artifact(store, tmp_path, (1,))
    (variant,) = artifact.variants
    arguments = (Argument(leaf=0), Argument(state="weight"), Argument(state="frozen"))
    trained = msgspec.structs.replace(
        variant, arguments=arguments, backward=Backward("b.so", 1, (0,), (), (Gradient(output=0, argument=1),))
    )
    artifact = msgspec.structs.replace(
        artifact,
        variants=(trained,),
        state=tuple(StateSpec(name, "float32", (2,), (1,)) for name in ("weight", "frozen")),
        signature=msgspec.structs.replace(artifact.signature, leaves=(TensorLeaf("x", "float32", (1,)),)),
    )
    assert list(_gradients_text(artifact)) == [
        "1 module tensor with gradient: weight",
        "1 module tensor without gradient: frozen",
        "1 input without gradient: x",
    ]
    assert not list(_gradients_text(msgspec.structs.replace(artifact, variants=(variant,))))


def test_arguments_that_were_empty_at_the_build_are_guards() -> None:
    parameters = (Parameter("x", 0), Parameter("options", {}), Parameter("extras", []), Parameter("more", {"a": 1}))
    assert list(_empty_text(parameters)) == ["options is an empty dict", "extras is an empty list"]
