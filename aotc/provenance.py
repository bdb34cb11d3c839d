"""How an artifact came to be, which no load reads: a blob of its own beside the artifact's record.

A build has both in one, a `BuiltArtifact`; publishing takes it apart, and `aotc.store.read_built` joins it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aotc.digest import canonical_json
from aotc.errors import CorruptError
from aotc.records import Artifact, File, LaunchPick, Record, Variant

PROVENANCE = "provenance.json"
PROVENANCE_LIMIT = 16 << 20  # bytes
REPORT_LIMIT = 64 << 20  # bytes


class Kernel(Record, frozen=True):
    """A generated kernel (`triton`, `cpp`), or an operator of torch that the library calls (`extern`).

    `calls` per run of the library; `operators` are those that were fused into it.
    """

    name: str
    kind: str
    calls: int
    operators: tuple[str, ...] = ()
    source: str = ""


class Report(Record, frozen=True):
    """The blob `BuiltVariant.report`: the variant's kernels, how many operators the captured graph had before fusion,
    and the names of the patches of torch that were applied.

    `operators` are those of the captured graph and of what Inductor lowered (`aten.add.Tensor`, `higher_order.cond`),
    by name, each with the dtypes of the tensors that it takes and gives; None in reports of before.
    """

    kernels: tuple[Kernel, ...]
    captured_operators: int
    patches: tuple[str, ...] = ()
    operators: dict[str, tuple[str, ...]] | None = None


Operators = dict[str, tuple[str, ...]]
"""`Report.operators`."""


def both_operators(one: Operators | None, other: Operators | None) -> Operators | None:
    """Of two graphs of one unit; None unless both are known."""
    if one is None or other is None:
        return None
    names = sorted({*one, *other})
    return {name: tuple(sorted({*one.get(name, ()), *other.get(name, ())})) for name in names}


# -- what a build has measured ----------------------------------------------------------------------------------------


WIDE = 1.25
"""A median above this many times the least: other processes disturbed half of the calls. Where none do, it is at most
1.17 on a CPU, for kernels of 0.03 to 0.3 ms."""


WAITED = 0.1
"""A greater share of the time in which a process waited for a CPU: the machine was busy throughout, so that a median
near the least says nothing. 0.01 to 0.02 on a quiet machine of 2 cores, above 1 beside three busy processes."""
ENOUGH_CALLS = 20
"""Of fewer calls, all may have been disturbed alike."""


class Spread(Record, frozen=True):
    """Times of one call in milliseconds: the least of `calls` calls, to which other processes add nothing, and their
    median."""

    least_ms: float
    median_ms: float
    calls: int

    @property
    def is_wide(self) -> bool:
        return self.median_ms > WIDE * self.least_ms


class CallTimes(Record, frozen=True):
    """What one call takes, measured in the smoke run: of the compiled code, launched directly, and of the module, which
    is None where it could not be run. Of a region's unit, both are calls of one of its instances.

    sizes: of the bucket's ranges, those of the inputs that were timed.
    waited: the seconds that threads of the process waited for a CPU, per second of the measurement; 0 where the
        kernel does not count them.
    """

    compiled: Spread
    eager: Spread | None = None
    sizes: dict[str, int] = msgspec.field(default_factory=dict)
    waited: float = 0.0

    @property
    def on_busy_machine(self) -> bool:
        """Whether other processes disturbed the calls."""
        return self.waited > WAITED or self.compiled.is_wide or (self.eager is not None and self.eager.is_wide)

    @property
    def few_calls(self) -> int:
        """How many calls were timed, where they are too few for a comparison; else 0."""
        fewest = min(self.compiled.calls, self.eager.calls) if self.eager else self.compiled.calls
        return fewest if fewest < ENOUGH_CALLS else 0

    @property
    def speedup(self) -> float | None:
        """How many times as long as the compiled code eager takes. None where the times do not show that: on a busy
        machine, of few calls, and where one's median is within the spread of the other."""
        if self.eager is None or self.on_busy_machine or self.few_calls:
            return None
        fast, slow = sorted((self.compiled, self.eager), key=lambda spread: spread.median_ms)
        return self.eager.least_ms / self.compiled.least_ms if fast.median_ms < slow.least_ms else None


class RegionCost(Record, frozen=True):
    """What a call of the model takes with this region's code attached, and without any: medians in milliseconds.

    `passing_ms` of it go by between eager code and the library, over all `calls` of the region in one call of the
    model: nn.Module's own call, guards, checks of the state, dispatch. One library for the whole model would save that.
    """

    regions_ms: float
    eager_ms: float
    passing_ms: float
    calls: int


FORMS = "forms.json"
"""The dtypes and shapes of a library's outputs by export's word, from a build to its smoke run: in no store."""


class Smoked(Record, frozen=True):
    """What a unit's smoke run has shown: how to launch it, on a GPU; what it costs a call, of a region.

    `driver_compiled`: the bytes of machine code that the GPU's driver has compiled for the first call.
    `times`: what one call takes. `notes`: what could not be compared, and why.
    """

    launch: LaunchPick | None = None
    cost: RegionCost | None = None
    driver_compiled: int = 0
    times: CallTimes | None = None
    notes: tuple[str, ...] = ()


# -- how an artifact came to be ---------------------------------------------------------------------------------------


class BuiltVariant(Variant, frozen=True, kw_only=True):
    """A variant with the key of its unit, and the files that say how it was made: its report, and its picks. `untuned`
    names the decisions that are Inductor's defaults, since nothing was measured; `graph` is the second key of its code
    (`aotc.compiler.codegen.graph_key`)."""

    key: str
    report: File | None = None
    picks: File | None = None
    untuned: tuple[str, ...] = ()
    graph: str = ""

    def each_file(self) -> Iterator[File]:
        yield from super().each_file()
        yield from (file for file in (self.report, self.picks) if file is not None)


class BuiltArtifact(Artifact, frozen=True, kw_only=True):
    """An artifact with the version of aotc that built it, its model's entry in the manifest, and Inductor's options."""

    aotc: str
    variants: tuple[BuiltVariant, ...]
    options: dict[str, Any]
    manifest: dict[str, Any]
    kinds: tuple[BuiltArtifact, ...] = ()

    def provenance_of(self) -> Provenance:
        """What no load reads of it."""
        variants = tuple(
            VariantProvenance(one.key, one.report, one.picks, one.launch, one.untuned) for one in self.variants
        )
        return Provenance(self.aotc, self.options, self.manifest, variants)

    def record(self, provenance: File) -> Artifact:
        """What a load reads of it, without its further kinds of ranks; the rest is in that file."""
        shared = {name: getattr(self, name) for name in Artifact.__struct_fields__}
        variants = tuple(map(_record, self.variants))
        return Artifact(**{**shared, "variants": variants, "provenance": provenance, "kinds": ()})


def _record(built: BuiltVariant) -> Variant:
    shared = {name: getattr(built, name) for name in Variant.__struct_fields__}
    launch = LaunchPick(built.launch.graph, sizes=built.launch.sizes) if built.launch else None
    return Variant(**{**shared, "launch": launch})


class VariantProvenance(Record, frozen=True):
    """How one variant came to be. `launch` has the times that decided how it is launched."""

    key: str
    report: File | None = None
    picks: File | None = None
    launch: LaunchPick | None = None
    untuned: tuple[str, ...] = ()


class Provenance(Record, frozen=True):
    """How an artifact came to be: `variants` in the order of its record's."""

    aotc: str
    options: dict[str, Any]
    manifest: dict[str, Any]
    variants: tuple[VariantProvenance, ...]

    def encode(self) -> bytes:
        return canonical_json(self)

    def join(self, artifact: Artifact) -> BuiltArtifact:
        """The artifact as it was built, without its further kinds of ranks.

        Raises CorruptError where this is the provenance of another one.
        """
        if len(self.variants) != len(artifact.variants):
            raise CorruptError(
                f"the provenance of `{artifact.model}` for {artifact.target} is that of another artifact",
                hint="build it again",
                expected=f"{len(artifact.variants)} variants",
                actual=f"{len(self.variants)} variants",
            )
        variants = tuple(
            BuiltVariant(**{**_fields(variant), **_fields(made)})
            for variant, made in zip(artifact.variants, self.variants, strict=True)
        )
        return BuiltArtifact(
            **{**_fields(artifact), **_fields(self), "variants": variants, "provenance": None, "kinds": ()}
        )


def _fields(record: Record) -> dict[str, Any]:
    return msgspec.structs.asdict(record)
