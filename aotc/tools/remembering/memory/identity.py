"""By what a module is remembered: what it is, what was asked of the build, and for which machine and versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

import aotc
from aotc.digest import sha256_json
from aotc.machine.environment import cpu_features
from aotc.machine.targets import best_cpu_target, cuda_target
from aotc.reads.module_identity import NOWHERE, IdentityFacts, ModuleIdentity, shown, value_differences
from aotc.reads.tensors import named_state
from aotc.tools.recording.peft_adapters import adapter_states


def facts_of(module: nn.Module, asked: Mapping[str, object]) -> IdentityFacts:
    """The facts of a module as it is now, and of what was `asked` of the build."""
    return {
        "class": type(module).__qualname__,
        "target": target_of(module),
        "torch": ".".join(str(torch.__version__).split("+")[0].split(".")[:2]),
        "aotc": aotc.__version__,
        **{f"option {name}": shown(value) for name, value in asked.items()},
        **ModuleIdentity(module).facts(),
        **({"adapters": shown(states)} if (states := adapter_states(module)) else {}),
    }


_OF_STRUCTURE = ("class", "forward", "forward hooks")


def structure_facts(module: nn.Module) -> IdentityFacts:
    """What a factory has to make as it is in the program: the classes of parts, forwards and hooks in the place of
    theirs, and the names and the shapes of tensors."""
    return structure_of(ModuleIdentity(module).facts())


def structure_of(facts: IdentityFacts) -> IdentityFacts:
    """The same of all facts of a module."""
    found = {}
    for name, value in facts.items():
        if name.startswith("tensor "):
            found[name] = value[value.index("[") : value.index("]") + 1]
        elif name.startswith("attribute ") and name.removeprefix("attribute ").rpartition(".")[2] in _OF_STRUCTURE:
            found[name] = value
    return found


def target_of(module: nn.Module) -> str:
    """The target of code for this machine and the module's device."""
    device = next((tensor.device for tensor in named_state(module).values()), torch.device("cpu"))
    if device.type == "cuda":
        return cuda_target(torch.cuda.get_device_capability(device))
    return best_cpu_target(cpu_features()) or "native"


def name_of(facts: IdentityFacts) -> str:
    """A readable name that is another one where a fact is: `bert-model-1f0c5a7d90ab`."""
    mode = "-train" if "option train" in facts else ""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", facts["class"].rpartition(".")[2]).lower()
    return f"{re.sub(r'[^a-z0-9]+', '-', words).strip('-')[:80] or 'model'}{mode}-{sha256_json(facts)[7:19]}"


def without_changes(facts: IdentityFacts, before: Mapping[str, str | None]) -> IdentityFacts:
    """The facts with those of `before` as they were; None is of one that was not there."""
    return {name: value for name, value in {**facts, **before}.items() if value is not None}


def differences(before: IdentityFacts, now: IdentityFacts) -> Iterator[str]:
    """Each fact that is another one, with both values."""
    found = {members[0]: values for members, *values in value_differences(before, now)}
    for name in dict.fromkeys([*before, *now]):
        if name in found:
            was, now_is = found[name]
            if was is NOWHERE:
                yield f"{name} is {now_is}, which there was none of"
            elif now_is is NOWHERE:
                yield f"{name} is there no more, and was {was}"
            else:
                yield f"{name} was {was} and is {now_is}"
