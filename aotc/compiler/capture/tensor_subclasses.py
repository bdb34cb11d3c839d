"""Parameters of a tensor subclass, as torchao's quantised ones, as plain parameters while a module is captured.

torch's own helper lets the module compute each from the plain tensors within it, which are then inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from aotc.errors import BuildError
from aotc.tensors.subclasses import holders, inner_name, inner_tensors, is_wrapper


@contextmanager
def unwrapped_parameters(module: nn.Module) -> Iterator[Mapping[str, str]]:
    """Within, the module's parameters and buffers are plain tensors; what torch calls them, and what aotc does.

    Raises BuildError for a subclass whose tensors no load could find.
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
                theirs = f"parametrizations.{key}.original{number}"
                names[inner_name(path, theirs)] = inner_name(path, f"{key}.{inner}")
    if not names:
        yield names
        return
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

    parts = {part: type(part) for path, part in module.named_modules() if wrapped[path]}
    tables = [(table, dict(table)) for part in parts for table in (part._parameters, part._buffers)]
    try:
        unwrap_tensor_subclass_parameters(module)
        tied: dict[int, nn.Module] = {}
        for path, tensors in wrapped.items():  # torch.export finds what is tied by the objects
            for key, tensor in tensors.items():
                held = module.get_submodule(inner_name(path, f"parametrizations.{key}"))
                held._parameters = tied.setdefault(id(tensor), held)._parameters
        for part, cls in parts.items():  # by whose name the attributes that capture reads are noted
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
        if hidden := [key for key in holder.__tensor_flatten__()[0] if key not in vars(holder)]:  # type: ignore[attr-defined]
            raise BuildError(
                f"`{inner_name(name, path)}` is a {type(holder).__name__}, whose tensors are no attributes of its own: "
                f"{', '.join(hidden)}",
                hint="give the factory's module plain tensors, or use `weights: frozen`",
                stage="export",
            )
