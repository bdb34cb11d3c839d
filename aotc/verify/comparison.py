"""Compiled code, eager and a float64 reference of one model, called alike and compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.errors import BindError, VerifyError
from aotc.machine.targets import parse_target
from aotc.machine.this_host import Compat
from aotc.manifest.types import ModelSpec
from aotc.models.calls import Called, arguments_of, has_drawn, modes_of, signature_leaves, writable_buffers
from aotc.models.extreme_calls import AtExtremes, compare_at_extreme_values, rounds_to_8_bits
from aotc.models.extreme_inputs import Draw, freedoms
from aotc.models.factory import build_module, told
from aotc.models.float64_reference import forget_failed_traces, in_double, in_float64
from aotc.models.input_forms import input_forms
from aotc.models.tolerance import QUANTISED, TF32, Judgement, failed, judge, may_use_tf32
from aotc.reads.tensors import plain_state, same_bits
from aotc.records import Dims, Signature, TensorLeaf
from aotc.runtime.call import CompiledCall
from aotc.runtime.compiled import Compiled
from aotc.runtime.load import load
from aotc.runtime.options import Graphs, Ranks
from aotc.store.signing.policy import Trust
from aotc.tensors.contents import Contents, contents, same_values
from aotc.tensors.rounding import Result
from aotc.tensors.sharing import differences, kept_in_place, module_tensors
from aotc.tensors.subclasses import is_wrapper
from aotc.verify.kept_results import KeptResult, keep, of_call_before, shared
from aotc.verify.other_weights import change_weights, copy_state, is_plain

if TYPE_CHECKING:
    from aotc.verify.rank_processes import RankProcesses


class VerifyJob(msgspec.Struct, frozen=True):
    """What to verify: a reference in a store, the model's factory in `folder`, the steps from `first` to `end`;
    `compat` as `aotc.load` has it. `standalone`: what `aotc.standalone.load` gives in a process without torch, of the
    Python that this command starts, "" for this one; None for what `aotc.load` gives."""

    ref: str
    store: str
    spec: ModelSpec
    folder: str
    target: str
    seeds: int
    compat: Compat = "minor"
    first: int = 0
    end: int | None = None
    standalone: str | None = None


class CouldNotRun(Exception):
    """The model itself cannot be run or compared, which says nothing of its compiled code."""


class JudgedCode(NamedTuple):
    """Compiled code to judge, the module whose tensors it uses, and how that came to have its weights."""

    call: Any
    module: nn.Module
    weights: str = ""


class JudgedRun(NamedTuple):
    """One call: what it gave, its inputs and the module's buffers as they are then, and the parameters that it changed,
    as they were before; `own` are the module's tensors, without those that it replaced by others."""

    subject: JudgedCode
    outputs: Contents
    kept: KeptResult
    inputs: Mapping[str, Tensor]
    buffers: Sequence[Tensor]
    changed: Mapping[str, Tensor]
    own: Mapping[str, Tensor]


class Verdicts(NamedTuple):
    """Of the outputs by their paths, and of all that is written."""

    outputs: dict[str, Judgement]
    written: list[Judgement]

    def all(self) -> list[Judgement]:
        return [*self.outputs.values(), *self.written]


class Comparison:
    """The compiled callable, eager, and a float64 reference of one model, each with a module of its own."""

    def __init__(self, job: VerifyJob) -> None:
        self.job, self.spec, self.folder = job, job.spec, Path(job.folder)
        self.forms = input_forms(job.spec)
        """What the inputs are filled with: the one of each seed in turn."""
        self.device = torch.device(parse_target(job.target).device)
        self.ranks: RankProcesses | None = None
        if job.spec.parallel:
            from aotc.verify.rank_processes import RankProcesses

            self.ranks = RankProcesses(self.device.type)
        self.module = build_module(job.spec, self.folder).to(self.device)
        self.compiled = self._compiled_of(self.module)
        self.device = self.compiled.device
        self.signature: Signature = self.compiled.artifact.signature
        self.eager = self.copy_of(self.module)
        self.widenings: list[Callable[[], AbstractContextManager[None]]] = [in_float64, nullcontext]
        """Ways to run the reference that are still to be tried. With none left, eager is the reference."""
        self.reference = self._wide_copy()
        self.draws = False
        """Whether eager drew random numbers."""
        self.rounds = False
        """Whether eager rounded values to 8 bits."""
        self.finite = True
        """Whether all that eager has given with the model's own weights was finite."""
        self.overflows = False
        """Whether with other weights eager's last result was not, though all before were."""
        self._kept: dict[str, KeptResult] = {}
        self._others: list[JudgedCode] = []

    def compare(self, dims: Dims, seed: int) -> Verdicts:
        """Judge every output, and every input, buffer and changed parameter as they are after the call: the model may
        write to them. And that results of the call before are still what they were.

        Raises CouldNotRun where the model itself fails. VerifyError where the result has another structure than
        eager's, a parameter was written over, or a result does not belong to the caller; whatever compiled code raises.
        """
        return self.compare_subjects([JudgedCode(self.compiled, self.module)], dims, seed)

    def compare_subjects(self, subjects: Sequence[JudgedCode], dims: Dims, seed: int) -> Verdicts:
        try:
            form = self.forms[seed % len(self.forms)]
            leaves = signature_leaves(form, self.signature, dims, self.device, seed, self.folder)
        except Exception as error:  # an init function of the user's
            raise CouldNotRun(f"the inputs cannot be made: {told(error)}") from error
        try:
            return self._compare_runs(subjects, leaves)
        except Exception:
            for module in (*(subject.module for subject in subjects), self.reference):
                copy_state(self.eager, module)  # so that the next call is judged for itself
            raise

    def _compare_runs(self, subjects: Sequence[JudgedCode], leaves: Sequence[Any]) -> Verdicts:
        runs = [self._run_compiled(subject, leaves) for subject in subjects]
        exact = self.run_reference(leaves)
        eager = self.run_eager(leaves)
        if self._has_drawn():  # in float64 it draws others, and what they change would count as eager's error
            self.draws, exact = True, None
        if exact is None or exact.outputs.keys() != eager.outputs.keys():
            exact = eager
        finite = all(map(_is_finite, eager.outputs.values()))
        if subjects[0].weights:
            self.overflows = self.finite and not finite
        else:
            self.finite &= finite
        verdicts = Verdicts({}, [])
        before = dict(self._kept)
        self._kept |= {"eager": eager.kept, **{run.subject.weights: run.kept for run in runs}}
        for run in runs:
            way = run.subject.weights
            outputs, written = self._judge(run, eager, exact, before)
            verdicts.outputs.update({f"{way}{path}": _said(way, one) for path, one in outputs.items()})
            verdicts.written.extend(_said(way, one) for one in written)
        return verdicts

    # -- running ------------------------------------------------------------------------------------------------------

    def _run(self, subject: JudgedCode, leaves: Sequence[Any], autocast: bool = True) -> JudgedRun:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = arguments_of(self.signature, own)
        torch.manual_seed(0)
        state = plain_state(subject.module)
        with modes_of(self.spec, self.device.type, autocast=autocast):
            outputs = contents(subject.call(*args, **kwargs))
        pairs = zip(self.signature.leaves, own, strict=True)
        inputs = {leaf.path: value for leaf, value in pairs if isinstance(leaf, TensorLeaf)}
        buffers = [buffer.clone() for buffer in subject.module.buffers()]  # the next call writes to them
        in_place = kept_in_place(state, plain_state(subject.module))
        return JudgedRun(subject, outputs, keep(outputs), inputs, buffers, {}, in_place)

    def _run_compiled(self, subject: JudgedCode, leaves: Sequence[Any]) -> JudgedRun:
        try:
            run = self._run(subject, leaves)
        except Exception:
            self.run_eager(leaves)
            raise
        return run._replace(changed=self._changed_parameters(subject.module))

    def run_eager(self, leaves: Sequence[Any]) -> JudgedRun:
        try:
            if not any(map(is_wrapper, self.eager.parameters())):
                return self._run(JudgedCode(self.eager, self.eager), leaves)
            with RoundingTo8Bits() as rounding:  # type: ignore[no-untyped-call]
                run = self._run(JudgedCode(self.eager, self.eager), leaves)
            self.rounds |= rounding.rounded
            return run
        except Exception as error:  # the model's own
            raise CouldNotRun(f"the model fails in eager: {told(error)}") from error

    def run_reference(self, leaves: Sequence[Any]) -> JudgedRun | None:
        """In float64; None where the model cannot be run so."""
        wide = [*map(in_double, leaves)]
        while self.widenings:
            try:
                with self.widenings[0]():
                    return self._run(JudgedCode(self.reference, self.reference), wide, autocast=False)
            except Exception:  # its own operators may raise anything
                del self.widenings[0]
                forget_failed_traces()
                self.reference = self._wide_copy()
        return None

    def _has_drawn(self) -> bool:
        """Whether the last run took numbers from torch's generator, which it found as a seed leaves it."""
        return has_drawn(self.device)

    @property
    def _floor(self) -> float:
        return max(QUANTISED if self.rounds else 0.0, TF32 if may_use_tf32(self.eager) else 0.0)

    # -- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, run: JudgedRun, eager: JudgedRun, exact: JudgedRun, before: Mapping[str, KeptResult]) -> Verdicts:
        parameters = self._check_parameters(run.changed, run.subject.module)
        if odd := run.outputs.keys() ^ eager.outputs.keys():
            counts = [sum(not isinstance(part, type) for part in one.outputs.values()) for one in (eager, run)]
            raise VerifyError(
                f"eager gives {counts[0]} outputs, compiled gives {counts[1]}"
                if counts[0] != counts[1]
                else f"output{min(odd)} is in one of eager's result and the compiled code's only"
            )
        outputs = {
            path: _judge(run.outputs[path], value, exact.outputs[path], f"output{path}", self._floor)
            for path, value in eager.outputs.items()
        }
        written = [
            *(
                _judge(run.inputs[path], value, exact.inputs[path], path, self._floor)
                for path, value in eager.inputs.items()
            ),
            *map(_judge, run.buffers, eager.buffers, exact.buffers),
            *parameters,
        ]
        if found := self._findings(run, eager, before):
            written.append(failed(found[0]))
        return Verdicts(outputs, written)

    def _findings(self, run: JudgedRun, eager: JudgedRun, before: Mapping[str, KeptResult]) -> list[str]:
        """What is amiss with the memory of the compiled code's results, and not with eager's."""
        kept = [before.get(run.subject.weights), before.get("eager")]
        changed, expected = (earlier.changed() if earlier else set() for earlier in kept)
        given, of_eager = (
            shared(one.kept, one.inputs, one.own, of_call_before(earlier))
            for one, earlier in zip((run, eager), kept, strict=True)
        )
        apart = set(of_call_before(kept[1]))
        apart |= set(module_tensors(eager.own)) if self.spec.weights == "frozen" else set()
        apart |= {other for _, other in of_eager} if self.spec.train else set()
        return sorted(changed - expected) + differences(of_eager, given, apart)

    def _changed_parameters(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Those that the compiled call changed, as they were before: as eager has them, which is yet to be called."""
        pairs = zip((module or self.module).named_parameters(), self.eager.parameters(), strict=True)
        return {name: before.detach().clone() for (name, now), before in pairs if not _same(now, before)}

    def _check_parameters(self, changed: Mapping[str, Tensor], module: nn.Module | None = None) -> list[Judgement]:
        """Judge the parameters that eager writes to. Where compiled code changes another one, it wrote to memory that
        is not its own."""
        now, eager = dict((module or self.module).named_parameters()), dict(self.eager.named_parameters())
        exact = dict(self.reference.named_parameters())
        own = {name for name, before in changed.items() if not _same(eager[name], before)}
        memory = {now[name].untyped_storage().data_ptr() for name in own}  # which others may have a part of
        overwritten = [name for name in changed if now[name].untyped_storage().data_ptr() not in memory]
        missed = {name for name in now if name not in changed and not _same(now[name], eager[name])}
        judgements = [_judge(now[name], eager[name], exact[name], name, self._floor) for name in sorted(own | missed)]
        for name in (*own, *missed, *overwritten):  # so that the next call is judged for itself
            now[name].data.copy_(eager[name].data)
        if overwritten:
            raise VerifyError(
                f"the compiled code wrote over the parameter {overwritten[0]}, which the model only reads"
                + (f", and over {len(overwritten) - 1} more" if overwritten[1:] else ""),
                hint="it writes to memory that is not its own: do not serve it, and report its model",
            )
        return judgements

    # -- extreme inputs -----------------------------------------------------------------------------------------------

    def compare_at_extremes(self, dims: Dims, draw: Draw, subject: JudgedCode | None = None) -> AtExtremes:
        """Judge one call with extreme inputs, which the model itself may not take. `subject`: other code than the
        artifact's."""
        code = subject or JudgedCode(self.compiled, self.module)
        copy_state(self.eager, code.module)  # other weights may have been set
        signature, written = self.signature, writable_buffers(self.eager)
        leaves = signature_leaves(self.spec, signature, dims, self.device, 0, self.folder)
        eager, ours = (Called(module, signature, written, leaves) for module in (self.eager, code.module))

        def compiled(values: Sequence[Any]) -> Result:
            return ours._replace(leaves=values).call(code.call)

        step = TF32 if may_use_tf32(self.eager) else 0.0
        with modes_of(self.spec, self.device.type):
            return compare_at_extreme_values(
                eager, compiled, freedoms(self.spec, signature), self.device, draw, step=step
            )

    # -- other weights ------------------------------------------------------------------------------------------------

    def compare_with_other_weights(self, dims: Dims) -> Verdicts | None:
        """Judge what was loaded at first, to whose module other weights are given now, and what is loaded into another
        module that has them. None where no parameter can be changed.

        Raises as `compare` does, and BindError where the second module is refused.
        """
        if not self._others:
            if not change_weights(self.eager, seed=1):
                return None
            copy_state(self.eager, self.reference)
            self.module.load_state_dict(self.eager.state_dict(), strict=False)
            copy_state(self.eager, self.module)  # what no checkpoint holds
            self._kept.clear()
            self._others = [
                JudgedCode(self.compiled, self.module, "after module.load_state_dict: "),
                JudgedCode(*self._load_another(), "of another module: "),
            ]
        return self.compare_subjects(self._others, dims, seed=0)

    def compare_with_swapped_weights(self, dims: Dims) -> Verdicts | None:
        """Judge what `update_weights` gives; None where that is refused."""
        if not self._others and self.compare_with_other_weights(dims) is None:
            return None
        compiled, module, _ = self._others[1]
        change_weights(self.eager, seed=2)
        try:
            compiled.update_weights(self.eager.state_dict())
        except BindError:
            return None
        copy_state(self.eager, self.reference)
        copy_state(self.eager, module)
        return self.compare_subjects([JudgedCode(compiled, module, "after update_weights: ")], dims, seed=0)

    def _load_another(self) -> tuple[CompiledCall, nn.Module]:
        module = self.copy_of(self.eager)
        try:
            return self._load(module), module
        except BindError:  # for what its calls have left in it, perhaps
            module = self._made_again(self.eager)
            return self._load(module), module

    # -- modules ------------------------------------------------------------------------------------------------------

    def _compiled_of(self, module: nn.Module) -> CompiledCall:
        if self.job.standalone is not None:
            from aotc.verify.standalone_calls import StandaloneCalls

            without_torch = StandaloneCalls(self.job.ref, self.job.store, self.job.target, module, self.job.standalone)
            return cast(CompiledCall, without_torch)  # as far as own weights go
        self.loaded = self._load_whole(module)
        """What a user has of `compiled`, and gives to a TrainingStep."""
        return _call_of(self.loaded)

    def _load(self, module: nn.Module, **options: Any) -> CompiledCall:
        return _call_of(self._load_whole(module, **options))

    def _load_whole(self, module: nn.Module, **options: Any) -> Compiled:
        given = {"store": self.job.store, "target": self.job.target, "compat": self.job.compat, **options}
        if self.ranks is not None:
            from aotc.verify.rank_processes import TIMEOUT

            given["ranks"] = Ranks(self.ranks.group, timeout=TIMEOUT)
        return load(self.job.ref, module, allow_imports=True, trust=Trust(allow_untested=True), **given)

    def launched(self, how: Literal["always", "never"]) -> CompiledCall:
        """The compiled code over the same module, launched as CUDA graphs or directly."""
        return self._load(self.module, graphs=Graphs(use=how, capture="lazy"))

    def copy_of(self, module: nn.Module) -> nn.Module:
        try:
            return copy.deepcopy(module)
        except Exception:  # tensors that a constructor has computed, with their gradients; handles and locks
            return self._made_again(module)

    def _made_again(self, module: nn.Module) -> nn.Module:
        made = build_module(self.spec, self.folder).to(self.device)
        copy_state(module, made)
        return made

    def _wide_copy(self) -> nn.Module:
        """A copy of eager's module in float64; the module itself if a copy is not needed or not possible."""
        try:
            return self.copy_of(self.eager).double() if self.widenings else self.eager
        except Exception:  # parameters of classes of their own, or no memory for it
            self.widenings = []
            return self.eager


def _call_of(loaded: Compiled) -> CompiledCall:
    return cast(CompiledCall, loaded.forward)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return value.element_size() == 1 or bool(torch.isfinite(value).all())


def _said(what: str, judgement: Judgement) -> Judgement:
    """An error of the comparison, with the name of the output or input."""
    return msgspec.structs.replace(judgement, detail=what + judgement.detail) if judgement.detail else judgement


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters are equal to the bit; of a class or a layout of their own, that is not asked."""
    return not is_plain(one) or same_bits(one, other)


def _judge(compiled: Any, eager: Any, reference: Any, name: str = "a buffer", floor: float = 0.0) -> Judgement:
    """One part of a result, or one tensor that is written to."""
    if same_values(compiled, eager) or (type(compiled) is type(eager) is int and compiled == reference):
        return Judgement(True, 0.0, 0.0, 0.0)
    if type(compiled) is type(eager) is float:  # of a tensor's element, as float32 has it
        reference = torch.tensor(reference if isinstance(reference, float) else eager, dtype=torch.float64)
        compiled, eager = torch.tensor(compiled, dtype=torch.float32), torch.tensor(eager, dtype=torch.float32)
    if not isinstance(compiled, Tensor) or not isinstance(eager, Tensor):
        return failed(f"eager gives {_shown(eager)} as {name}, compiled gives {_shown(compiled)}")
    try:
        judgement = judge(compiled, eager, reference if isinstance(reference, Tensor) else eager, floor)
    except Exception as error:  # of a class that torch cannot compute with
        raise CouldNotRun(f"{name} cannot be compared: {told(error)}") from error
    return _said("" if name == "output" else f"{name}: ", judgement)


def _shown(value: Any) -> str:
    return f"a {value.__name__}" if isinstance(value, type) else repr(value)[:200]


# -- whether a model rounds values to 8 bits, as dynamic quantisation does its activations -----------------------------


class _Watching:
    rounded = False

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass's own handler calls operators on plain tensors
        result = operator(*args, **(kwargs or {}))
        self.rounded = self.rounded or rounds_to_8_bits((args, kwargs), result)
        return result


class RoundingTo8Bits(_Watching, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, `rounded` becomes True at an operator from floats to 8 bits. The handler is inherited, as torch
    imports its compiler for a class that defines one."""
