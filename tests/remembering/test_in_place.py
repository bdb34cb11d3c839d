"""What `aotc.compile` returns: a module in the place of the module. Nothing is built here."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Net
from torch import nn
from torch.optim.swa_utils import AveragedModel

import aotc
from aotc.store.extras import install_hint
from aotc.tools.remembering.memory.identity import differences, facts_of, name_of


def remembered(module: nn.Module, store: Path, **options: Any) -> Any:
    return aotc.compile(module, store=store, build="never", **options)


def test_it_has_the_attributes_of_the_module(tmp_path: Path) -> None:
    net = Net().eval()
    model = remembered(net, tmp_path)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert model.state_dict().keys() == net.state_dict().keys()
    parent = nn.ModuleDict({"net": model})
    assert list(parent.state_dict()) == [f"net.{name}" for name in net.state_dict()]
    model.width = 9
    assert net.width == 9
    assert model.train().training is net.training is True


def test_a_copy_is_remembered_as_the_module_is_and_has_its_own_tensors(tmp_path: Path) -> None:
    model = remembered(Net().eval(), tmp_path)
    averaged = AveragedModel(model)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for copied in (copy.deepcopy(model), averaged.module, copy.deepcopy(nn.ModuleDict({"net": model}))["net"]):
        assert copied.__class__ is Net and type(copied.module) is Net
        assert torch.equal(copied.head.weight, model.head.weight)
        assert copied.head.weight is not model.head.weight
        with torch.no_grad():
            assert torch.equal(copied(ids), model(ids))
        assert copied.explain().name == model.explain().name
        assert copied.stats().eager == 1
    assert model.stats().eager == 3
    shallow = copy.copy(model)
    assert shallow.head.weight is model.head.weight and shallow.module is not model.module
    assert copy.deepcopy(aotc.compile(Net(), store=tmp_path, build="never", train=True)).train().explain().forms == 0


@pytest.mark.parametrize("called", [False, True])
def test_it_has_the_module_s_class_and_what_is_pickled_is_the_module(tmp_path: Path, called: bool) -> None:
    model = remembered(Net().eval(), tmp_path)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        want = model(ids) if called else model.module(ids)
    assert model.__class__ is Net and isinstance(model, Net)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    parent = nn.ModuleDict({"net": model})
    copies = [pickle.loads(pickle.dumps(model, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    copies += [pickle.loads(pickle._dumps(model)), torch.load(saved, weights_only=False)]  # type: ignore[attr-defined]
    copies += [pickle.loads(pickle.dumps(parent))["net"]]
    for each in copies:
        assert type(each) is Net
        with torch.no_grad():
            assert torch.equal(each(ids), want)

    class Other(Net):
        pass

    model.__class__ = Other
    assert type(model.module) is Other and model.__class__ is Other


def test_calls_in_training_mode_and_calls_that_record_gradients_are_eager_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = remembered(Net(), tmp_path)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert model(ids).requires_grad
    model.eval()
    model(ids).sum().backward()
    assert model.head.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(model(ids), model.module(ids))
    told = [record.getMessage() for record in caplog.records]
    assert sum("training mode" in text for text in told) == 1
    assert sum("torch.no_grad()" in text for text in told) == 1


def test_a_call_that_fails_in_eager_is_not_built(tmp_path: Path) -> None:
    model = aotc.compile(Net().eval(), store=tmp_path, build="now")
    with torch.no_grad(), pytest.raises(RuntimeError, match="scalar type"):
        model(torch.zeros(1, 4))
    assert model.explain().forms == 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"kwargs": {"dtype": torch.float16}}, "kwargs is a dict"),
        ({"ranges": {"seq": 5}}, "ranges is a dict"),
        ({"seconds": 0}, "seconds is 0, and may be more than 0"),
        ({"cores": -1, "builds": 0}, "cores is -1"),
    ],
)
def test_what_an_argument_cannot_be_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(aotc.BindError) as caught:
        aotc.compile(Net(), build="never", **options)
    assert said in str(caught.value)


def test_what_another_module_remembers_and_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    model = remembered(Net().eval(), tmp_path)
    folder = tmp_path / ".aotc" / "remembered"
    folder.mkdir(parents=True)
    (folder / "other.json").write_text("{")
    (folder / "old.json").write_text('{"version": 0}')
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(model(ids), model.module(ids))


def test_calls_that_no_code_takes_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = remembered(Net().eval(), tmp_path)
    with torch.no_grad():
        for length in (3, 4, 5):
            for _ in range(4):
                model(torch.zeros(1, length, dtype=torch.int64))
    told = [text for text in (record.getMessage() for record in caplog.records) if "no code takes" in text]
    assert len(told) == 1 and "run in eager" in told[0]


def test_off_gives_the_module_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTC_COMPILE", "off")
    net = Net()
    assert aotc.compile(net, store=tmp_path) is net


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(aotc.BindError, match="is not a module"):
        aotc.compile(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(aotc.BindError, match="build is 'later', and may be one of background, exit, now, never"):
        aotc.compile(Net(), build="later")  # type: ignore[arg-type]
    with pytest.raises(aotc.StoreError, match="is not a store that aotc knows"):
        aotc.compile(Net(), store="ftp://host/models")


def test_without_pyyaml_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(aotc.ManifestError, match=r"PyYAML is missing\n.*aotc\[build\]"):
        aotc.compile(Net(), store=tmp_path)
    assert isinstance(remembered(Net(), tmp_path), Net)


def test_a_line_of_torch_compile_is_taken(tmp_path: Path) -> None:
    net = Net().eval()
    ids = torch.zeros(2, 4, dtype=torch.int64)
    for given in (
        {"fullgraph": True, "dynamic": True, "mode": "max-autotune"},
        {"backend": "inductor", "options": None, "dynamic": False, "mode": None},
    ):
        model = remembered(net, tmp_path, **given)
        with torch.no_grad():
            assert torch.equal(model(ids), net(ids))
    assert aotc.compile(net, disable=True) is net
    assert aotc.compile(model=net, store=tmp_path, build="never").module is net  # type: ignore[call-arg]
    assert aotc.compile(fullgraph=True, store=tmp_path, build="never")(net).module is net


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ({"backend": "eager"}, "backend is 'eager'", "another backend has no code"),
        ({"options": {"max_autotune": True}}, "options is {'max_autotune': True}", "give mode="),
        ({"dynamic": "auto"}, "dynamic is 'auto', and may be None, True or False", ""),
        ({"recompile_limit": 8}, "recompile_limit=8 is torch.compile's alone", "builds= bounds the builds"),
        ({"modes": "default"}, "modes is not an argument of aotc.compile", "write mode="),
    ],
)
def test_other_arguments_of_torch_compile_are_refused_with_what_to_do(
    tmp_path: Path, given: dict[str, Any], said: str, hint: str
) -> None:
    with pytest.raises(aotc.BindError) as caught:
        remembered(Net(), tmp_path, **given)
    assert isinstance(caught.value, TypeError)
    assert said in str(caught.value) and hint in str(caught.value)


def test_a_library_that_a_store_lacks_is_told_at_once_with_a_hint_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    monkeypatch.delitem(sys.modules, "aotc.store.remote.registry.session", raising=False)
    with pytest.raises(aotc.StoreError, match="needs a library that is not installed: requests") as caught:
        aotc.compile(Net(), store="oci://127.0.0.1:9/team/remembered")
    assert caught.value.hint.startswith("pip install 'requests>=")  # no index has aotc, of which it would be an extra
    monkeypatch.setattr("importlib.metadata.requires", lambda name: None)
    assert install_hint("oci") == "pip install 'aotc[oci]'"


def test_the_name_is_the_same_for_other_values_of_weights_and_another_one_for_other_forms() -> None:
    asked: dict[str, Any] = {"mode": "default"}
    facts = facts_of(Net().eval(), asked)
    name = name_of(facts)
    assert name.startswith("net-")
    assert name_of(facts_of(Net().train(), asked)) == name
    others = {
        "dtype": facts_of(Net().eval().half(), asked),
        "attribute": facts_of(Net(words=60).eval(), asked),
        "option": facts_of(Net().eval(), {"mode": "max-autotune"}),
        "strides": facts_of(_with_strides(Net().eval()), asked),
    }
    assert len({name, *map(name_of, others.values())}) == 5
    assert [*differences(facts, others["option"])] == ['option mode was "default" and is "max-autotune"']
    assert "tensor head.weight was float32 [3, 8] and is float32 [3, 8] strides [1, 3]" in [
        *differences(facts, others["strides"])
    ]


def _with_strides(net: Net) -> Net:
    net.head.weight.data = net.head.weight.data.t().contiguous().t()
    return net
