"""What a compiled module depends on, as named facts: their digest is in its name, and two sets of them are compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

import aotc
from aotc.digest import canonical_json, sha256_json
from aotc.machine.environment import cpu_features
from aotc.machine.targets import best_cpu_target, cuda_target
from aotc.reads.attributes import module_attributes, origin_of, training_differs
from aotc.reads.imported_files import imported_files
from aotc.reads.sources import source_digests
from aotc.reads.tensors import dtype_name, named_state
from aotc.tools.remembering.peft_adapters import adapter_states

IdentityFacts = dict[str, str]
"""By names as `attribute encoder.layer.0.eps` or `tensor embeddings.weight`; all of them as text."""

LONGEST = 200
"""Characters of a value that is kept as it is, to be shown when it has changed; of a longer one, its digest."""


def facts_of(module: nn.Module, asked: Mapping[str, object]) -> IdentityFacts:
    """The facts of a module as it is now, and of what was `asked` of the build.

    Not the values of its tensors, nor whether it is in training mode, in which it is not compiled.
    """
    facts = {
        "class": type(module).__qualname__,
        "target": target_of(module),
        "torch": ".".join(str(torch.__version__).split("+")[0].split(".")[:2]),
        "aotc": aotc.__version__,
    }
    if parts := training_differs(module):
        facts["parts in another training mode"] = _shown(parts)
    facts |= {f"option {name}": _shown(value) for name, value in asked.items()}
    code = {**source_digests(module), **imported_files(module)}
    facts |= {f"code of {name}": digest for name, digest in code.items()}
    facts |= attribute_facts(module)
    if states := adapter_states(module):
        facts["adapters"] = _shown(states)
    for name, tensor in named_state(module).items():
        strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
        facts[f"tensor {name}"] = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{strides}"
    return facts


def attribute_facts(module: nn.Module) -> IdentityFacts:
    """The plain attributes of a module and its parts, but for where its weights came from."""
    return {
        f"attribute {path}.{name}".replace(" .", " "): _shown(value)
        for path, attributes in module_attributes(module).items()
        for name, value in attributes.items()
        if not origin_of(name)
    }


_OF_STRUCTURE = ("class", "forward", "forward hooks")


def structure_facts(module: nn.Module) -> IdentityFacts:
    """What a factory has to make as it is in the program: the classes of parts, forwards and hooks in the place of
    theirs, and the names and the shapes of tensors."""
    tensors = {f"tensor {name}": f"any {list(tensor.shape)}" for name, tensor in named_state(module).items()}
    return structure_of(attribute_facts(module) | tensors)


def structure_of(facts: IdentityFacts) -> IdentityFacts:
    """The same of all facts of a module."""
    found = {}
    for name, value in facts.items():
        if name.startswith("tensor "):
            found[name] = value.partition(" ")[2].partition(" strides")[0]
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
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            if name not in before:
                yield f"{name} is {now[name]}, which there was none of"
            elif name not in now:
                yield f"{name} is there no more, and was {before[name]}"
            else:
                yield f"{name} was {before[name]} and is {now[name]}"


def _shown(value: object) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= LONGEST else sha256_json(value)
