"""From a module and example inputs to a graph whose every input is named: `torch.export`, then lifting."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from aotc.compiler.capture.custom_backward import HOOKS, backwards_kept
from aotc.compiler.capture.distributed_tensors import export_program
from aotc.compiler.capture.legacy_collectives import check_collectives, collective_error
from aotc.compiler.capture.lifting.lift import Capture, lift
from aotc.compiler.capture.ranges.range_solver import NOT_PROVED
from aotc.compiler.capture.replaced_functions import INSTEAD, needless_moves_skipped
from aotc.compiler.capture.tensor_subclasses import opaque_parameters, unwrapped_parameters
from aotc.compiler.explain_failure import BEYOND, FREE_MEMORY, OUT_OF_MEMORY, lines_shown, model_line
from aotc.compiler.patches.machinery.apply import patched
from aotc.compiler.scoped import replaced
from aotc.errors import BuildError
from aotc.models.calls import arguments_of, passed
from aotc.models.fake_ranks import NO_GROUP, PARALLEL
from aotc.records import Signature, TensorLeaf

_log = logging.getLogger("aotc")

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


def capture(
    module: nn.Module,
    signature: Signature,
    leaves: Sequence[Any],
    dynamic_shapes: dict[str, Any] | None,
    frozen: bool,
    outside: Mapping[str, Tensor] = NOTHING,
    *,
    train: bool = False,
) -> Capture:
    """Capture `module` on example `leaves`; for a region, `outside` are the model's tensors. To `train` it, the graph
    must tell what forward computes without gradients.

    Raises BuildError for a model that cannot become an artifact, or that fails in eager; torch.export's own exceptions
    are explained by the worker.
    """
    if scripted := [path for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]:
        shown = ", ".join(f"`{path}`" for path in scripted[:3] if path) or "the model"
        raise BuildError(
            f"torch.jit scripted or traced {shown}: its code is not in Python, where torch.export captures",
            hint="let the factory build the original module, with the same state_dict",
            stage="export",
        )
    args, kwargs = arguments_of(signature, leaves)
    with torch.set_grad_enabled(train):
        try:
            with (
                _declaring(module, list(kwargs)),
                _hooks_put_back(),
                patched("export"),
                _Followed(),
                backwards_kept(),
                needless_moves_skipped(),
            ):
                program = _export_unwrapped(module, args, kwargs, dynamic_shapes, frozen)
        except Exception as error:
            if own := _own_failure(module, signature, leaves, error):
                raise own from error
            if refused := collective_error(error):
                raise refused from error
            if opaque := opaque_parameters(error, module):
                raise opaque from error
            raise
    check_collectives(program.graph_module)
    return lift(program, module, signature, leaves, frozen, outside, train=train)


_WITHIN_OPERATORS = "cast NotImplemented to Tensor"
"""torch.export's error where a tensor subclass implements the parts of an operator, as `addmm` of `linear`, and not the
operator."""


def _export_unwrapped(
    module: nn.Module, args: Any, kwargs: Any, dynamic_shapes: dict[str, Any] | None, frozen: bool
) -> Any:
    """The program on the plain tensors within the module's parameters, by aotc's names of these."""
    names: Mapping[str, str] = {}
    try:
        with unwrapped_parameters(module) as names:
            program = _export(module, args, kwargs, dynamic_shapes)
    except RuntimeError as refused:
        if not names or _WITHIN_OPERATORS not in str(refused):
            raise
        program = _export(module, args, kwargs, dynamic_shapes)
        if frozen:  # torch's compiler takes such tensors as constants
            return program
        program = program.run_decompositions({})
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        spec.target = names.get(spec.target, spec.target)
    return program


def _export(module: nn.Module, args: Any, kwargs: Any, dynamic_shapes: dict[str, Any] | None) -> Any:
    def export() -> Any:
        with _branches_on_data() as refusals:
            program = export_program(module, args, kwargs, dynamic_shapes)
        if dropped := next(filter(None, map(_line_that_caught, refusals)), ""):
            raise BuildError(
                "forward branches on a tensor's values, and catches the error by which torch.export refuses that: the "
                "compiled code would never take the branch",
                hint="write the branch as torch.where or torch.cond, or keep it out of the `try`",
                stage="export",
                source=dropped,
            )
        return program

    try:
        return export()
    except Exception as refused:
        if NOT_PROVED not in str(refused):
            raise
        try:
            with patched("export again"):
                return export()
        except Exception:
            _log.warning("torch.export also refuses the model when each size of its ranges is tried", exc_info=True)
        raise


@contextmanager
def _branches_on_data() -> Iterator[list[Exception]]:
    """While active, collect torch.export's refusals of branches on values. Torch catches some of them itself: only the
    traceback of one that the model's code caught has a line of the model."""
    refusals: list[Exception] = []
    init: Any = GuardOnDataDependentSymNode.__init__

    def noting(error: Any, *args: Any) -> None:
        init(error, *args)
        refusals.append(error)

    with replaced(GuardOnDataDependentSymNode, "__init__", noting):
        yield refusals


def _line_that_caught(refusal: Exception) -> str:
    return lines_shown(traceback.extract_tb(refusal.__traceback__))


class _Followed(TorchFunctionMode):
    """While active, functions that torch.export cannot trace are replaced by equivalent ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FOLLOWED.get(func, func)(*args, **(kwargs or {}))


_FOLLOWED: Mapping[Any, Callable[..., Any]] = {
    vars(torch._C.TensorBase)["data"].__get__: Tensor.detach,  # `x.data`: both share the memory of `x`
    **INSTEAD,
    **HOOKS,
}


def _own_failure(module: nn.Module, signature: Signature, leaves: Sequence[Any], error: Exception) -> BuildError | None:
    """The error for a model that fails in the same way in eager, else None: then the cause is not the export."""
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # which forward may write to
    args, kwargs = arguments_of(signature, copies)
    try:
        module(*args, **kwargs)
    except Exception as own:
        if type(own) is not type(error) or re.search("(fake|functional) ?tensor", str(own), re.IGNORECASE):
            return None  # export may have left such tensors in the module
        return model_fails(signature, own)
    return None


_NO_BACKWARD_OF_FLEX = "FlexAttention does not support backward on CPU"


def model_fails(signature: Signature, error: Exception) -> BuildError:
    """The error for a model that raised `error` in eager."""
    given = ", ".join(parameter.name for parameter in passed(signature))
    first, *_ = str(error).strip().splitlines() or [""]
    hint = "list all `inputs` that it needs, of the shapes, dtypes and values that it takes"
    if any(isinstance(leaf, TensorLeaf) and "int" in leaf.dtype for leaf in signature.leaves):
        hint += (
            ". Integers that it reads as values (indices, image tokens, lengths) need an `init`: "
            "`{randint: [0, dim]}`, the values that aotc.record keeps, or package.module:function"
        )
    if isinstance(error, IndexError):
        hint = BEYOND
    elif re.search(OUT_OF_MEMORY, f"{type(error).__name__} {first}"):
        hint = FREE_MEMORY
    elif _NO_BACKWARD_OF_FLEX in str(error):
        hint = (
            "torch has it on a GPU only: build this model there (`targets: [cuda]`), or train on a CPU with "
            "F.scaled_dot_product_attention and `attn_mask` (transformers: `attn_implementation: sdpa`)"
        )
    elif NO_GROUP in str(error):
        hint = PARALLEL
    return BuildError(
        f"the model itself fails when it is called with its inputs ({given}): {type(error).__name__}: {first[:400]}",
        hint=hint,
        stage="export",
        source=model_line(error),
        in_eager=True,
    )


@contextmanager
def _declaring(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While active, forward declares those of `names` that it takes through `**kwargs` as parameters of its own.

    torch.export expects `**kwargs` nested in one place and flat in another, and its guards name them so: dynamic shapes
    cannot be given for them. A declared parameter is the same everywhere.
    """
    forward = module.forward
    declared = inspect.signature(forward)
    extras = [name for name in names if name not in declared.parameters]
    if not extras:
        yield
        return

    def declaring(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = [parameter for parameter in declared.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extras]
    vars(declaring)["__signature__"] = declared.replace(parameters=[*own, *more])
    before = vars(module).get("forward")
    vars(module)["forward"] = declaring
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


@contextmanager
def _hooks_put_back() -> Iterator[None]:
    """Restore torch's registration hooks: after a failed export, torch 2.11 leaves one that refuses buffers with data,
    in any module."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)
