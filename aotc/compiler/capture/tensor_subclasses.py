"""Turn parameters of a tensor subclass, such as torchao's quantised ones, into plain ones while a module is captured.

With torch's own helper, the module computes each from its inner plain tensors, which are then inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from aotc.compiler.capture.distributed_tensors import local_parameters
from aotc.errors import BuildError
from aotc.tensors.subclasses import holders, inner_name, inner_tensors, is_dtensor, is_wrapper


@contextmanager
def unwrapped_parameters(module: nn.Module) -> Iterator[Mapping[str, str]]:
    """While active, the module's parameters and buffers are plain tensors. Yields aotc's names by torch's names.

    Raises BuildError for a subclass whose inner tensors a load could not find.
    """
    wrapped = {
        path: {
            key: tensor
            for table in (part._parameters, part._buffers)
            for key, tensor in table.items()
            if is_wrapper(tensor)
        }
        for path, part in module.named_modules(remove_duplicate=False)
    }
    names: dict[str, str] = {}
    for path, tensors in wrapped.items():
        for key, tensor in tensors.items():
            _check(inner_name(path, key), tensor)
            for number, inner in enumerate(inner_tensors(tensor)):
                theirs = f"parametrizations.{key}.original{'' if is_dtensor(tensor) else number}"
                names[inner_name(path, theirs)] = inner_name(path, f"{key}.{inner}")
    if not names:
        yield names
        return
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

    parts = {part: type(part) for path, part in module.named_modules() if wrapped[path]}
    tables = [(table, dict(table)) for part in parts for table in (part._parameters, part._buffers)]
    try:
        for part in parts:
            local_parameters(part)
        unwrap_tensor_subclass_parameters(module)
        tied: dict[int, nn.Module] = {}
        for path, tensors in wrapped.items():  # torch.export finds tied parameters by their objects
            for key, tensor in tensors.items():
                held = module.get_submodule(inner_name(path, f"parametrizations.{key}"))
                held._parameters = tied.setdefault(id(tensor), held)._parameters
        for part, cls in parts.items():  # reads of attributes are recorded by the name of the class
            type(part).__name__, type(part).__qualname__ = cls.__name__, cls.__qualname__
        yield names
    finally:
        for part, cls in parts.items():
            part._modules.pop("parametrizations", None)
            part.__class__ = cls
        for table, tensors in tables:
            table.clear()
            table.update(tensors)


def _check(name: str, tensor: Any) -> None:
    for path, holder in holders(tensor).items():
        if is_dtensor(holder):
            continue
        if hidden := [key for key in holder.__tensor_flatten__()[0] if key not in vars(holder)]:  # type: ignore[attr-defined]
            raise BuildError(
                f"`{inner_name(name, path)}` is a {type(holder).__name__}, whose tensors are not its own attributes: "
                f"{', '.join(hidden)}",
                hint="give the factory's module plain tensors, or use `weights: frozen`",
                stage="export",
            )


class OpaqueParameters(BuildError):
    """torch.export cannot look into the module's parameters."""


def opaque_parameters(error: Exception, module: nn.Module) -> OpaqueParameters | None:
    """The error for a module that torch.export refuses and whose parameters are of a class that it cannot look into:
    neither torch's own nor a wrapper, as those of bitsandbytes, which keep scales in Python attributes."""
    found = [
        (name, type(tensor))
        for name, tensor in module.named_parameters()
        if not is_wrapper(tensor) and type(tensor).__module__.partition(".")[0] != "torch"
    ]
    if not found:
        return None
    name, cls = found[0]
    first, *_ = str(error).strip().splitlines() or [""]
    return OpaqueParameters(
        f"`{name}` is a {cls.__module__}.{cls.__qualname__}, whose Python attributes are lost under torch.export: "
        f"{type(error).__name__}: {first[:200]}",
        hint="quantise with torchao's `quantize_`, or leave these modules to eager, with regions around them",
        stage="export",
    )
