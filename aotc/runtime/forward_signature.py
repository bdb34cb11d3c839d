"""The signature of a model's forward, from the module or the record."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import msgspec

from aotc.reads.attributes import own_forward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from aotc.records import Signature

_KINDS: Mapping[str, inspect._ParameterKind] = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "extra": inspect.Parameter.KEYWORD_ONLY,
}


def signature_of(recorded: Signature, module: nn.Module | None, method: str = "") -> inspect.Signature:
    """The module's own, all its parameters and annotations included; of the parameters that were built without one."""
    if module is not None and method:
        return inspect.signature(own_forward(module, method))
    if module is not None:
        forward = vars(module).get("forward", own_forward(module))
        return inspect.signature(own_forward(module) if getattr(forward, "is_compiled_code", False) else forward)
    parameters = [
        inspect.Parameter(
            parameter.name,
            _KINDS[parameter.kind],
            default=inspect.Parameter.empty if parameter.default is msgspec.UNSET else parameter.default,
        )
        for parameter in recorded.parameters
        if parameter.name.isidentifier()
    ]
    # Not validated: one without a default may follow one that has one, since a record does not hold every default.
    return inspect.Signature(parameters, __validate_parameters__=False)
