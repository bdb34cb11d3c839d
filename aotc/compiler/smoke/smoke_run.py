"""The process that runs a freshly compiled unit once, before anything is published: `python -m
aotc.compiler.smoke.smoke_run JOB`. A library that crashes ends only this process.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from aotc.compiler.messages import Job, Message, Span, UnitFailed, UnitRan, wait_here
from aotc.compiler.smoke.call_times import TimedCall, call_times
from aotc.compiler.smoke.gradient_check import compare_at_extremes, compare_gradients, inputs_of_any_value
from aotc.compiler.smoke.launch_choice import pick_launch
from aotc.compiler.smoke.region_cost import region_cost
from aotc.errors import AotcError, Issue, LibraryError
from aotc.machine.locks import listening
from aotc.machine.processes import Parent
from aotc.machine.targets import parse_target
from aotc.models.calls import (
    Called,
    arguments_of,
    modes_of,
    names_of,
    signature_leaves,
    state_put_back,
    written_integers_reset,
)
from aotc.models.extreme_calls import compare_at_extreme_values, one_thread
from aotc.models.extreme_inputs import Freedom, freedoms, freedoms_of_region, off_vector
from aotc.models.factory import build_module
from aotc.models.fake_ranks import make_meshes_on
from aotc.models.regions import example_of
from aotc.models.tolerance import TF32, may_use_tf32
from aotc.picks import pinned_launch
from aotc.provenance import FORMS, BuiltArtifact, CallTimes, Smoked
from aotc.reads.tensors import dtype_name, plain_state
from aotc.records import Artifact, Dims, LaunchPick, SizeRange, Variant, decode, tuned_dims
from aotc.runtime.call import BoundModule, CompiledCall
from aotc.runtime.compiled_regions import CompiledRegions
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.runtime.load import bind_artifact, open_variant
from aotc.runtime.options import Graphs, LoadOptions
from aotc.runtime.select import Chosen
from aotc.runtime.state.binding import bind_state
from aotc.tensors.rounding import Result, first_difference, said_of
from aotc.tensors.sharing import Sharing, differences, module_tensors

OTHER_STRIDES = (
    "the operator's result has strides that Inductor does not expect, as that of "
    "`torch.linalg.solve_triangular` may: leave the part that calls it to eager, by `regions:`"
)
OTHER_SIZES = (
    "the operator returns other sizes or strides than its fake kernel tells torch's compiler: mend that kernel, if the "
    "operator is yours, or leave the part that calls it to eager, by `regions:`"
)


def smoke(job: Job) -> Smoked:
    """Load the staged artifact, run it on example inputs, and compare the results with eager. Raises AotcError."""
    output = Path(job.output)
    driver_cache = DriverCache(output.with_name("driver-cache"))
    artifact = decode((output / "record.json").read_bytes(), BuiltArtifact)
    device = torch.device(parse_target(artifact.target).device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        # The library then checks the dtypes, sizes and strides of its inputs itself, so a published record agrees with
        # its library. Not on a GPU, where this run also times launches.
        os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    make_meshes_on(device.type)
    spec, folder = job.unit.spec, Path(job.folder)
    module = build_module(spec, folder, dummy_weights=job.settings.dummy_weights, rank=job.rank).to(device)
    (variant,) = artifact.variants
    dims = job.unit.sizes or tuned_dims(variant.bucket)
    leaves = signature_leaves(spec, artifact.signature, dims, device, 0, folder)
    before = driver_cache.size()

    def bound(graphs: Graphs | None = None) -> CompiledCall:
        chosen = Chosen(
            artifact,
            device,
            files_of=lambda variant: FilesInFolder(output, variant.library),
            read_file=lambda file: (output / file.name).read_bytes(),
            graphs=graphs,
        )
        return bind_artifact(chosen, module, LoadOptions(allow_imports=True))  # forward may import them

    compiled = bound()
    if isinstance(compiled, CompiledRegions):
        return _run_region(job, artifact, compiled, driver_cache)
    called, timed = Called(module, artifact.signature, variant.mutated_state, leaves), TimedCall(compiled)
    shared: Sharing = {}
    with modes_of(spec, device.type):
        given = called.call(timed, shared=shared)
        driver_compiled = driver_cache.size() - before
        _check_forms(given[: len(given) - len(leaves) - len(variant.mutated_state)], variant, output / FORMS)
    smoked = Smoked()
    if device.type == "cuda" and variant.backward is None:
        with state_put_back(module, variant.mutated_state):
            launch = _pick_launch(job, variant, device, bound, called)
        smoked = Smoked(launch, driver_compiled=driver_compiled)
    with modes_of(spec, device.type):
        times = _compare_and_time(called, given, timed, device, _sizes_in_ranges(variant, dims))
        _compare_sharing(called, shared, frozen=artifact.weights == "frozen", trains=artifact.trains)
        if variant.backward is not None:
            compare_gradients(called, variant, compiled, device)
            wide = inputs_of_any_value(spec, artifact.signature)
            compare_at_extremes(called, variant, compiled, device, {*wide, *variant.with_gradients})
        free, odd = freedoms(spec, artifact.signature), off_vector(variant.bucket, dims)
        examples = [
            (sizes, partial(signature_leaves, spec, artifact.signature, sizes, device, 0, folder))
            for sizes in ([odd, dims] if odd != dims else [dims])
        ]
        notes = compare_at_the_extremes(called, compiled, free, device, examples)
    return msgspec.structs.replace(smoked, times=times, notes=notes)


def _run_region(
    job: Job,
    artifact: Artifact,
    compiled: CompiledRegions,
    driver_cache: DriverCache,
) -> Smoked:
    """Run the model with the compiled region, then that region alone, and compare the region's results."""
    (variant,) = artifact.variants
    module, device, output, folder = compiled.module, compiled.device, Path(job.output), Path(job.folder)
    dims = job.unit.sizes or tuned_dims(variant.bucket)
    region = next(region for region in artifact.regions if region.name == variant.region)
    before = driver_cache.size()
    with state_put_back(module, [f"{path}.{name}" for path in region.instances for name in variant.mutated_state]):
        compiled.detach()
        example = example_of(job.unit.spec, module, artifact.signature, region, dims, folder)
        inputs = signature_leaves(example.spec, artifact.signature, dims, device, 0, folder)
        args, kwargs = arguments_of(artifact.signature, inputs)
        compiled.attach([variant.region])
        with modes_of(job.unit.spec, device.type):
            _touch(compiled(*args, **kwargs))
            driver_compiled = driver_cache.size() - before
            library = open_variant(FilesInFolder(output, variant.library), variant, device, 1)
            cost = region_cost(compiled, variant.region, library, args, kwargs)
        compiled.detach()
    instance = module.get_submodule(region.instances[0])
    called = Called(instance, region.signature, variant.mutated_state, example.leaves)
    code = TimedCall(compiled.regions[region.name])
    with modes_of(job.unit.spec, device.type):
        sizes = _sizes_in_ranges(variant, dims)
        shared: Sharing = {}
        times = _compare_and_time(called, called.call(code, shared=shared), code, device, sizes)
        _compare_sharing(called, shared, frozen=False, trains=artifact.trains)
        if variant.backward is not None:
            compare_gradients(called, variant, compiled.regions[region.name], device)
            compare_at_extremes(called, variant, compiled.regions[region.name], device, variant.with_gradients)
    part = artifact.of_region(region)

    def bound(graphs: Graphs) -> CompiledCall:
        alone = BoundModule(instance, bind_state(part, instance, device))
        return CompiledCall(part, [library], alone, device, "error", graphs)

    launch = None
    if device.type == "cuda" and variant.backward is None:
        with state_put_back(instance, variant.mutated_state):
            launch = _pick_launch(job, variant, device, bound, called)
    with modes_of(job.unit.spec, device.type):
        free, examples = freedoms_of_region(example.leaves), [(dims, lambda: example.leaves)]
        notes = compare_at_the_extremes(called, compiled.regions[region.name], free, device, examples)
    return Smoked(launch, cost, driver_compiled, times, notes)


def _pick_launch(
    job: Job, variant: Variant, device: torch.device, bound: Callable[[Graphs], CompiledCall], called: Called
) -> LaunchPick:
    """Time the unit's code on these leaves, bound with each kind of launch."""
    args, kwargs = arguments_of(called.signature, called.leaves)
    state = plain_state(called.module)
    written = [called.leaves[index] for index in variant.mutated_leaves]
    reset = written_integers_reset([*written, *(state[name] for name in called.written)])

    def call_with(options: Graphs) -> Callable[[], Any]:
        compiled = bound(options)

        def call() -> None:
            reset()
            compiled(*args, **kwargs)

        return call

    return pick_launch(job.unit.spec, variant.bucket, device, call_with, pinned_launch(job.pins))


def _sizes_in_ranges(variant: Variant, dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes that the bucket's name does not give."""
    return {dim: dims[dim] for dim, size in variant.bucket.items() if isinstance(size, SizeRange)}


def _compare_and_time(
    called: Called, given: Result, compiled: TimedCall, device: torch.device, sizes: dict[str, int]
) -> CallTimes:
    """Compare both results, then measure the times of a call. Raises LibraryError."""
    eager = TimedCall(called.module)
    _compare_with_eager(called, given, compiled, eager)
    return call_times(compiled, eager, called.call, device, sizes)


def _compare_with_eager(called: Called, given: Result, compiled: TimedCall, eager: TimedCall) -> None:
    """Raises LibraryError where the library's results or writes differ from the module's by more than rounding.

    A module that fails here succeeded at capture (a lack of memory, say): nothing is compared. Differences that vanish
    on one thread are ignored: the order of several writes to one element is undefined (`index_put`, an index twice).
    """

    def run(seed: int) -> Result:
        return called.call(called.module, seed)

    try:
        result = called.call(eager)
    except Exception:
        traceback.print_exc()
        return
    names = names_of(result, called.signature, called.written)
    if len(result) != len(given):
        written = len(called.signature.leaves) + len(called.written)
        raise LibraryError(
            f"the compiled code returns {len(given) - written} values, the model {len(result) - written}"
        )
    position = first_difference(result, given, run)
    if position is not None:
        with one_thread():
            given = called.call(compiled)
            position = first_difference(run(0), given, run)
    if position is None:
        return
    raise LibraryError(
        f"the compiled code does not compute what the model does: {names[position]} "
        f"{said_of(result[position], given[position])}",
        hint="torch's compiler miscompiles this model: find the operator by removing parts, and replace it by other "
        "operators, or leave that part to eager: `aotc build MANIFEST --suggest-regions`",
        miscompiled=True,
    )


def _compare_sharing(called: Called, given: Sharing, *, frozen: bool, trains: bool) -> None:
    """Raises LibraryError if results of the compiled code do not share memory as the module's do: a later write by the
    caller would change other tensors. A module that fails here is not compared. Frozen weights are constants, and code
    that `trains` gives results of their own."""
    expected: Sharing = {}
    try:
        called.call(called.module, shared=expected)
    except Exception:
        traceback.print_exc()
        return
    apart = set(module_tensors(plain_state(called.module))) if frozen else set()
    apart |= {other for _, other in expected} if trains else set()
    if found := differences(expected, given, apart):
        raise LibraryError(
            "results of the compiled code share memory differently from the model's",
            hint="return a copy, `….clone()`, where the caller writes to a result or to what it is a view of; or let "
            "the caller take the view",
            issues=tuple(map(Issue, found)),
        )


class DriverCache:
    """An empty cache folder for code that the GPU's driver and NVRTC compile in this process.

    torch's own cache of NVRTC kernels is disabled: an earlier process of the build may have filled it. Create this
    object before CUDA is initialised, which is when the variables are read (CUDA's Programming Guide, "CUDA Environment
    Variables"; torch's notes on CUDA, "Just-in-Time Compilation").
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.environ |= {"CUDA_CACHE_PATH": str(folder), "CUDA_CACHE_DISABLE": "0", "USE_PYTORCH_KERNEL_CACHE": "0"}

    def size(self) -> int:
        """The size of the cached code in bytes."""
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())


def _touch(result: Any) -> None:
    """Read every output, so that an output without valid memory fails here."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            leaf.detach().cpu().clone()


def _check_forms(leaves: Sequence[Any], variant: Variant, forms: Path) -> None:
    """Raises LibraryError where an output of the library has another dtype or shape than in the exported graph.

    Outputs inside a structure that only its own class can flatten are not checked.
    """
    expected = msgspec.json.decode(forms.read_bytes(), type=list[tuple[str, list[int | None]]])
    pairs = zip(variant.outputs, leaves, strict=True) if len(leaves) == len(variant.outputs) else ()
    issues = []
    for place, (output, leaf) in enumerate(pairs):
        if output.index is None:
            continue
        dtype, shape = expected[output.index]
        same_shape = len(shape) == leaf.dim() and all(
            known in (None, size) for known, size in zip(shape, leaf.shape, strict=True)
        )
        if dtype_name(leaf.dtype) != dtype or not same_shape:
            here, there = f"{dtype_name(leaf.dtype)} {list(leaf.shape)}", f"{dtype} {shape}"
            message = f"{there} in the model, {here} in the compiled code"
            issues.append(Issue(message, f"output {place}", there, here))
    if issues:
        hint = "torch's compiler infers a wrong dtype or shape for an operator: write it with other operators"
        raise LibraryError("the compiled code's outputs differ from the model's", hint=hint, issues=tuple(issues))


def failed_by(error: Exception) -> UnitFailed:
    failure = error if isinstance(error, AotcError) else AotcError(f"{type(error).__name__}: {error}")
    message, hint = failure.message.strip(), failure.hint
    if not hint and "unmatched stride" in message:
        hint = OTHER_STRIDES
    elif not hint and "Error in op: " in message:  # of what Inductor asserts of an operator's results
        hint = OTHER_SIZES
    wrong, extremes = failure.fields.get("miscompiled", False), failure.fields.get("extremes")
    issues = tuple(failure.issues)
    return UnitFailed(f"smoke run: {message}", hint, "smoke run", issues=issues, miscompiled=wrong, extremes=extremes)


# -- at extreme values -------------------------------------------------------------------------------------------------


AT_EXTREMES = "at extreme values (NaN, infinities, limits of dtypes)"


def compare_at_the_extremes(
    called: Called,
    compiled: Callable[..., Any],
    free: Sequence[Freedom],
    device: torch.device,
    examples: Iterable[tuple[Dims, Callable[[], Sequence[Any]]]],
) -> tuple[str, ...]:
    """Compare at the first sizes of `examples`, each with a function that makes its ordinary leaves, at which the model
    and the compiled code can be called. Returns a note where nothing could be compared.

    Raises LibraryError where the compiled code is wrong.
    """
    step = TF32 if may_use_tf32(called.module) else 0.0
    skipped = ""
    for dims, make_leaves in examples:
        at = called._replace(leaves=make_leaves())

        def call(leaves: Sequence[Any], at: Called = at) -> Result:
            return at._replace(leaves=leaves).call(compiled)

        found = compare_at_extreme_values(at, call, free, device, step=step)
        if found.wrong:
            raise LibraryError(
                f"{AT_EXTREMES}, the compiled code does not compute what the model does: {found.wrong}",
                hint="torch's compiler miscompiles this model: replace the operator by others, or leave that part to "
                "eager: `aotc build MANIFEST --suggest-regions`",
                miscompiled=True,
                extremes=dims,
            )
        if not found.skipped:
            return ()
        skipped = skipped or found.skipped
    return (f"not compared {AT_EXTREMES}: {skipped}",)


def main() -> int:
    parent = Parent()
    said: UnitRan | UnitFailed

    def say(said: Span | UnitRan | UnitFailed) -> None:
        parent.send(Message(said))

    try:
        with listening(lambda *wait: say(wait_here(*wait))):
            said = UnitRan(smoke(decode(Path(sys.argv[1]).read_bytes(), Job)))
    except Exception as error:
        traceback.print_exc()
        said = failed_by(error)
    say(said)
    return int(isinstance(said, UnitFailed))


if __name__ == "__main__":
    sys.exit(main())
