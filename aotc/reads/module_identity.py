"""What a module is: one answer for all who compare it with another.

A unit's key has it, the record of a build is compared with that of a module at a load, and `aotc.compile` remembers a
module by it. What else these compare is theirs: a key the manifest and the machine, a load only what matters to the
code, a remembered module what was asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.reads.attributes import module_attributes, origin_of, training_differs
from aotc.reads.sources import Trees, source_digests

IdentityFacts = dict[str, str]
"""By names as `attribute encoder.layer.0.eps` or `tensor embeddings.weight`; all of them as text."""

LONGEST = 200
"""Characters of a value that is kept as it is, to be shown when it has changed; of a longer one, its digest."""


class ModuleIdentity:
    """A module's class, code, attributes and forms of tensors. Each is looked at when it is first asked for, and once.

    Not the values of its tensors, nor whether the whole of it is in training mode: the same module can be in both.
    """

    def __init__(self, module: nn.Module, trees: Trees | None = None) -> None:
        """`trees`: see `aotc.reads.sources.file_identity`."""
        self.module, self._trees = module, trees

    @property
    def class_name(self) -> str:
        return type(self.module).__qualname__

    @functools.cached_property
    def training_differs(self) -> tuple[str, ...]:
        """The paths of the submodules whose training flag is not the module's own."""
        return training_differs(self.module)

    @functools.cached_property
    def sources(self) -> dict[str, str]:
        """The code of each class, by its name."""
        return source_digests(self.module, self._trees)

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """The user's files that the classes are made of, and those that these import, by their Python modules."""
        from aotc.reads.imported_files import imported_files

        return imported_files(self.module, self._trees)

    @functools.cached_property
    def attributes(self) -> dict[str, dict[str, Any]]:
        """The plain attributes of each submodule."""
        return module_attributes(self.module)

    @functools.cached_property
    def attributes_digest(self) -> str:
        return sha256_json(self.attributes)

    @functools.cached_property
    def tensors(self) -> dict[str, str]:
        """The form of each parameter and buffer: `float32 [3, 8]`, with strides and further names where it has them."""
        from aotc.reads.state_specs import state_forms

        return state_forms(self.module)

    def taken(self) -> ModuleIdentity:
        """Itself, with what a record has looked at: the module may be changed from now on."""
        _ = self.training_differs, self.sources, self.imports, self.attributes, self.attributes_digest
        return self

    def attribute_facts(self) -> IdentityFacts:
        """The plain attributes, without the origin of the weights."""
        return {
            f"attribute {path}.{name}".replace(" .", " "): shown(value)
            for path, attributes in self.attributes.items()
            for name, value in attributes.items()
            if not origin_of(name)
        }

    def facts(self) -> IdentityFacts:
        """All of it, as named texts."""
        facts = {"class": self.class_name}
        if self.training_differs:
            facts["parts in another training mode"] = shown(self.training_differs)
        facts |= {f"code of {name}": digest for name, digest in {**self.sources, **self.imports}.items()}
        return facts | self.attribute_facts() | {f"tensor {name}": form for name, form in self.tensors.items()}


def shown(value: object) -> str:
    """A value as a fact has it."""
    text = canonical_json(value).decode()
    return text if len(text) <= LONGEST else sha256_json(value)


NOWHERE = object()
"""In the place of a value that is not there."""


def value_differences(
    one: Any, other: Any, members: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Where two values differ, as their JSON does: the keys of the dicts that lead there, and both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from value_differences(one.get(name, NOWHERE), other.get(name, NOWHERE), (*members, name))
    elif one is not other and _exactly(one) != _exactly(other):
        yield members, one, other


def _exactly(value: Any) -> Any:
    """As text: True is not 1."""
    return value if value is NOWHERE else canonical_json(value)
