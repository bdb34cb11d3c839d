"""A model's regions: the submodules that a manifest's patterns name, and the calls that the model makes to them.

What a region is given is not in the manifest: it is what the code around it computes. So the whole model is run eagerly
on example inputs, with something in the place of each region's forward that looks at the arguments first.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aotc.errors import BuildError, Issue, ManifestError
from aotc.manifest.findings import did_you_mean
from aotc.manifest.inputs import InputTree
from aotc.manifest.types import ModelSpec
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.models.factory import told
from aotc.models.input_forms import input_forms
from aotc.models.signature import UnnamedArguments, convention, named_arguments
from aotc.reads.attributes import forward_hooks
from aotc.reads.tensors import dtype_name
from aotc.records import TUPLE, Dims, Parameter, Region, Signature, TensorLeaf, bucket_name
from aotc.tensors.layouts import laid_out

_TENSORS = frozenset({Tensor, nn.Parameter, nn.Buffer})


# -- which submodules -------------------------------------------------------------------------------------------------


def region_paths(spec: ModelSpec, module: nn.Module) -> list[str]:
    """The paths that the spec's patterns match, in the module's order; a submodule with several paths by its first.

    Raises ManifestError for patterns that match nothing, and for regions within regions.
    """
    parts = {path: part for path, part in module.named_modules(remove_duplicate=False) if path}
    paths: dict[int, str] = {}
    for path, part in parts.items():
        if any(matches(pattern, path) for pattern in spec.regions):
            paths.setdefault(id(part), path)
    issues = [
        Issue(f"the region `{pattern}` matches no submodule", hint=_nearest(pattern, parts))
        for pattern in spec.regions
        if not any(matches(pattern, path) for path in parts)
    ]
    for path in paths.values():
        outer = next((other for other in paths.values() if path.startswith(f"{other}.")), None)
        if outer is not None:
            hint = f"leave out the pattern that matches one of them: {', '.join(map(repr, spec.regions))}"
            issues.append(Issue(f"the region `{path}` lies within the region `{outer}`", hint=hint))
    if issues:
        raise ManifestError(f"the regions of `{spec.name}` are not those of its module", issues=tuple(issues[:5]))
    return list(paths.values())


def matches(pattern: str, path: str) -> bool:
    """Compare name by name: `*` matches one name of a path, or a part of one, and never a `.`."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted))


def _nearest(pattern: str, parts: Mapping[str, nn.Module]) -> str:
    patterns = dict.fromkeys(generalised(path) for path in parts)
    return did_you_mean(pattern, patterns) or "the paths are those of named_modules()"


def generalised(path: str) -> str:
    """The pattern of a path: `layers.*.mlp` for `layers.0.mlp`."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


# -- what they are called with ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a region's forward: the parameters that were given, and their leaves with the leaves' paths."""

    parameters: tuple[Parameter, ...]
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]


Observe = Callable[[str, Call, Callable[[], Any]], Any]
"""Called in the place of a region's forward: with its path, the call, and the forward, whose result it gives."""


def run_eagerly(
    spec: ModelSpec,
    module: nn.Module,
    signature: Signature,
    dims: Dims,
    folder: Path,
    seed: int = 0,
    *,
    stage: str = "",
    train: bool = False,
) -> Any:
    """What the model returns at these sizes, run once, on the device that it is on, in the modes of its manifest; to
    `train` it, with gradients, with which torch calls other operators.

    Raises BuildError where it fails.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    args, kwargs = arguments_of(signature, signature_leaves(spec, signature, dims, device, seed, folder))
    with modes_of(spec, device.type), torch.set_grad_enabled(train):
        try:
            return module(*args, **kwargs)
        except BuildError:
            raise
        except Exception as error:
            raise BuildError(
                f"the model itself fails at {bucket_name(dict(dims))}: {told(error)}",
                hint="a build runs the model at every bucket: mend its inputs or the model",
                stage=stage,
            ) from error


class Example(NamedTuple):
    """An example call of a region: its leaves, and the model's spec in the form of inputs at which it is so called."""

    spec: ModelSpec
    leaves: list[Any]


def example_of(
    spec: ModelSpec, module: nn.Module, signature: Signature, region: Region, dims: Dims, folder: Path, seed: int = 0
) -> Example:
    """What the model gives a region at these sizes: the leaves of the first such call of its first instance, in the
    layouts that the region's signature says. `signature` is the model's. To train it, those leaves require gradients
    that do in a call of any instance. Raises BuildError."""
    seen: list[list[Any]] = []
    differentiable: set[int] = set()
    paths = region.instances if spec.train else region.instances[:1]

    def observe(path: str, call: Call, forward: Callable[[], Any]) -> Any:
        if has_form(region.signature, call):
            differentiable.update(index for index, leaf in enumerate(call.leaves) if _requires_grad(leaf))
            if not seen and path == region.instances[0]:
                seen.append([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves])
        return forward()

    for form in input_forms(spec):
        with observed(module, paths, observe):
            run_eagerly(form, module, signature, dims, folder, seed, stage="regions", train=spec.train)
        if seen:
            leaves = zip(region.signature.leaves, seen[0], strict=True)
            laid = [laid_out(value, leaf.layout) if isinstance(leaf, TensorLeaf) else value for leaf, value in leaves]
            for index in differentiable:
                laid[index].requires_grad_()
            return Example(form, laid)
    raise never_called(region.name, dims)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def has_form(signature: Signature, call: Call) -> bool:
    """Whether a call has the structure and the constants of a region's signature, and tensors where it has some."""
    if call.parameters != signature.parameters or call.paths != tuple(leaf.path for leaf in signature.leaves):
        return False
    return all(
        isinstance(value, Tensor) and dtype_name(value.dtype) == leaf.dtype and value.dim() == len(leaf.shape)
        if isinstance(leaf, TensorLeaf)
        else repr(value) == repr(leaf.value)
        for leaf, value in zip(signature.leaves, call.leaves, strict=True)
    )


def never_called(path: str, dims: Dims) -> BuildError:
    return BuildError(
        f"the region `{path}` is not called when the model is run at {bucket_name(dict(dims))}",
        hint="name a module whose forward this call runs; a ModuleList has no forward",
        stage="regions",
    )


@contextmanager
def observed(module: nn.Module, paths: Sequence[str], observe: Observe) -> Iterator[None]:
    """While active, calls of these submodules' forwards go to `observe`.

    Raises BuildError for a call whose arguments a record cannot describe.
    """
    instances = {path: module.get_submodule(path) for path in paths}
    for path, instance in instances.items():
        _check_plain(path, instance)
    try:
        for path, instance in instances.items():
            vars(instance)["forward"] = functools.partial(_call_observed, path, instance.forward, observe)
        yield
    finally:
        for instance in instances.values():
            vars(instance).pop("forward", None)


def _call_observed(path: str, forward: Callable[..., Any], observe: Observe, *args: Any, **kwargs: Any) -> Any:
    return observe(path, read_call(path, forward, args, kwargs), lambda: forward(*args, **kwargs))


def _check_plain(path: str, instance: nn.Module) -> None:
    if forward_hooks(instance) or "forward" in vars(instance):
        raise BuildError(
            f"the region `{path}` has hooks, or a forward of its own in the place of its class's",
            hint="only the class's forward is compiled: let the factory add none of these",
            stage="regions",
        )


def read_call(path: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call in the terms of a record.

    Raises BuildError for an argument that a record cannot hold.
    """
    reader = _Reader(path)
    try:
        given = named_arguments(forward, args, kwargs)
    except UnnamedArguments as error:
        message = "arguments that have no name"
        raise reader.refuse(f"*{error.name}", message, "give each parameter a name") from None
    parameters = [
        Parameter(argument.name, reader.tree(argument.value, argument.name), argument.kind, argument.default)
        for argument in convention(forward, given)
    ]
    return Call(tuple(parameters), tuple(reader.paths), tuple(reader.leaves))


class _Reader:
    """Collects the leaves of one call's arguments."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.paths: list[str] = []
        self.leaves: list[Any] = []

    def tree(self, value: Any, path: str) -> InputTree:
        if type(value) in (list, tuple, torch.Size):
            trees = [self.tree(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return trees if type(value) is list else [TUPLE, *trees]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.tree(item, f"{path}.{key}") for key, item in value.items()}
        plain = value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value))
        if not plain and (type(value) not in _TENSORS or value.layout is not torch.strided):
            raise self.refuse(
                path,
                f"a {type(value).__module__}.{type(value).__qualname__}",
                "take a region that is given tensors and plain values, in lists, tuples and dicts; where this is a "
                "cache, pass `use_cache: false` as an input of the manifest",
            )
        self.paths.append(path)
        self.leaves.append(value)
        return len(self.leaves) - 1

    def refuse(self, path: str, what: str, hint: str) -> BuildError:
        message = f"the region `{self.region}` is given {what} as `{path}`, which a record cannot describe"
        return BuildError(message, hint=hint, stage="regions")
