"""The records that build, store and runtime share, and their JSON.

Every record is frozen, refuses unknown fields, and describes itself with relative names only. The bytes are specified
in `aotc/store/FORMAT.md`. The schema version is checked once, in `decode_artifact`.

Annotations are evaluated here, and not kept as text: msgspec would compile each text anew when it makes a decoder,
which is most of the time of a first decoding.
"""

import functools
import os
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec

from aotc.digest import canonical_json
from aotc.errors import CorruptError, SchemaVersionError
from aotc.garbage import no_collection

SCHEMA_VERSION = 2

OTHER_VERSION = "build it again with this aotc, or load it with the one that built it: 0.1 for schema 1"

R = TypeVar("R")

Scalar = None | bool | int | float | str
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Extent = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A size, a stride, an offset: what torch can hold."""
Index = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
"""A position among the tensors of one call or library, or their number: what a load counts to."""
Dims = dict[str, Extent]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all records."""


# -- sizes ------------------------------------------------------------------------------------------------------------


class SizeRange(Record, frozen=True):
    """The sizes from `min` to `max`, both included, that `multiple_of` divides; code is tuned at `tune_at`."""

    min: Extent
    max: Extent
    multiple_of: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] = 1
    tune_at: Extent = 0

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max and size % self.multiple_of == 0

    def at_least(self, size: int) -> int | None:
        """The smallest of the sizes that is not below `size`; None past the last."""
        smallest = -(-max(size, self.min) // self.multiple_of) * self.multiple_of
        return smallest if smallest <= self.max else None

    def __str__(self) -> str:
        step = f" step {self.multiple_of}" if self.multiple_of != 1 else ""
        return f"{self.min}..{self.max}{step}"


Size = Extent | SizeRange
Bucket = dict[str, Size]


def takes(size: Size, given: int) -> bool:
    """Whether a bucket's size is that of a call, or holds it."""
    return given in size if isinstance(size, SizeRange) else given == size


def has_range(bucket: Bucket) -> bool:
    return any(isinstance(size, SizeRange) for size in bucket.values())


def bucket_name(bucket: Bucket) -> str:
    """`batch=1,seq=128`, or `-` for a model without dims."""
    return ",".join(f"{dim}={size}" for dim, size in sorted(bucket.items())) or "-"


def part_name(region: str, bucket: Bucket) -> str:
    """`batch=1,seq=128`, or `blocks.0 batch=1,seq=128` for a region's: the name of one part of a model."""
    return f"{region} {bucket_name(bucket)}" if region else bucket_name(bucket)


def tuned_dims(bucket: Bucket) -> Dims:
    """The one size of each dim at which the bucket's code is tuned."""
    return {dim: size if isinstance(size, int) else size.tune_at for dim, size in bucket.items()}


# -- what a call looks like -------------------------------------------------------------------------------------------


class PadRule(Record, frozen=True):
    """How an input grows along one dim: filled with `value`, or by repeating the last slice (`edge`)."""

    value: Scalar = 0
    edge: bool = False


class TensorLeaf(Record, frozen=True, tag="tensor"):
    """A tensor argument: `shape` holds sizes and expressions over dims, in the manifest's names.

    `default` fills the tensor of a call that has None in its place.
    """

    path: str
    dtype: str
    shape: tuple[Extent | str, ...]
    layout: Literal["contiguous", "channels_last", "channels_last_3d"] = "contiguous"
    pad: dict[str, PadRule] = {}
    default: Scalar = None


class ConstantLeaf(Record, frozen=True, tag="constant"):
    """A Python value that is part of the compiled code: a call must pass an equal one of the same type."""

    path: str
    value: Scalar


Leaf = TensorLeaf | ConstantLeaf


TUPLE = "tuple"  # the first item of a list of trees that stands for a tuple


class Parameter(Record, frozen=True):
    """One parameter of the model's `forward`.

    `tree` says where its leaves go: a leaf's index, a list of trees (for a tuple, TUPLE and trees), or a mapping of
    names to trees. An "extra" one is none of `forward`'s own: it goes through its `**kwargs`. `optional`: a call that
    leaves it out gets the constant of the build, and not forward's default.
    """

    name: str
    tree: Any
    kind: Literal["positional", "either", "keyword", "extra"] = "either"
    default: Scalar | msgspec.UnsetType = msgspec.UNSET
    optional: bool = False


class Signature(Record, frozen=True):
    """The calling convention that all variants of an artifact share.

    `make_contiguous`: a tensor of another layout is copied into the compiled one (and counted), and is not a miss.
    """

    parameters: tuple[Parameter, ...]
    leaves: tuple[Leaf, ...]
    make_contiguous: bool = False


# -- what a variant takes and gives -----------------------------------------------------------------------------------


class StateSpec(Record, frozen=True):
    """A parameter or buffer of the module: `shape` and `stride` in elements; `digest` of its bytes if it is frozen in.

    `aliases` are further names of the same tensor (tied weights); they must be the same tensor at load too.
    `persistent`: a checkpoint of the module holds it; the value of one that is not is in `Artifact.constants`.
    `subclass`: of a tensor that a parameter of a subclass of Tensor holds, as a quantised one does, and whose name ends
    in its path there (`a.weight.qdata`), what the code takes for granted of the parameter (`aotc.tensors.subclasses`).
    Of a parameter that is frozen in whole, the same. Plain JSON.
    """

    name: str
    dtype: str
    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    aliases: tuple[str, ...] = ()
    digest: str = ""
    persistent: bool = True
    subclass: Any = None


def names_of(spec: StateSpec) -> tuple[str, ...]:
    """All names of a tensor."""
    return (spec.name, *spec.aliases)


class Argument(Record, frozen=True):
    """What a library takes at one position: the leaf of that index, or the module's tensor of that name."""

    leaf: Index | None = None
    state: str | None = None


class StridedView(Record, frozen=True):
    """A view of a tensor: its `shape` and `stride`, and the `offset` of its first element from the tensor's, in
    elements of `dtype` ("" for the tensor's). Each number may be an expression over dims; they hold for the tensor as
    the code runs with it, padded and in the compiled layout. `conjugate` and `negative` are torch's lazy bits.
    """

    shape: tuple[Extent | str, ...]
    stride: tuple[Extent | str, ...]
    offset: Extent | str = 0
    dtype: str = ""
    conjugate: bool = False
    negative: bool = False

    def texts(self) -> Iterator[str]:
        """The expressions."""
        yield from (entry for entry in (*self.shape, *self.stride, self.offset) if isinstance(entry, str))


class Output(Record, frozen=True):
    """Where one flat output comes from: the library's output of that index, an argument given back, or a constant.

    With an `axis`, it is the size of that axis of the argument `leaf`, a number. `view`: a view of the argument that
    the caller gave; true for one with the argument's elements and form, as `detach` gives.

    `dims` names the dims of the axes of a library's output or a view, for cropping what was padded ("" where an axis
    has none).
    """

    index: Index | None = None
    leaf: Index | None = None
    state: str | None = None
    constant: Scalar = None
    dims: tuple[str, ...] = ()
    axis: Index | None = None
    view: bool | StridedView = False


class ResultContainer(Record, frozen=True):
    """A container in a model's result: its `items` are positions in `Variant.outputs`, and containers.

    `type` is `tuple`, `list`, `dict` with its `keys`, or the name of another class, with what torch's pytree keeps of
    an object of it beside the items: `context`, which is plain JSON.
    """

    type: str
    items: tuple["Index | ResultContainer", ...]
    keys: tuple[Scalar, ...] = ()
    context: Any = None


class File(Record, frozen=True):
    """A file as a library needs it: `digest` and `size` of its bytes, `blob` and `blob_size` of the zstd blob.

    Of one that is mapped where it lies, the blob is the file itself.
    """

    name: str
    digest: str
    size: Extent
    blob: str
    blob_size: Extent

    @property
    def mapped(self) -> bool:
        return self.blob == self.digest


CONSTANTS = "constants.json"
"""The file of a variant that says what its library's constants are: a list of `Constant`."""


class PackCall(Record, frozen=True):
    """The call of torch's `mkldnn` operator that packed a weight: `arguments` follow the weight. What oneDNN chose
    depends on the process: its number of `threads`, and the `capability` that torch sees in the CPU, as AVX2."""

    operator: Literal["_reorder_convolution_weight", "_reorder_linear_weight"]
    arguments: tuple[int | tuple[int, ...] | None, ...]
    threads: int
    capability: str


class Constant(Record, frozen=True):
    """A constant that a library does not hold itself: its storage begins at byte `offset` of the variant's file `file`
    ("" where it has no elements). `shape`, `stride` and `storage_offset` are in elements.

    `packing` is oneDNN's own description of a tensor that it packed, as torch serialises it; there are then no strides.
    `packed_by` is the call that packed it, where a load can repeat the call for its own process.
    """

    name: str
    file: str
    offset: Extent
    dtype: str
    device: Literal["cpu", "cuda"]
    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    storage_offset: Extent = 0
    packing: bytes = b""
    packed_by: PackCall | None = None


class OperatorNeed(Record, frozen=True):
    """An operator that is not torch's own: importing `module` registers it, from the shared library if there is one."""

    name: str
    module: str
    library: str = ""


class LibraryImports(Record, frozen=True):
    """What the libraries of a variant take from torch's.

    `functions`: those of the C shim, of Sleef and of C++, by the linker's names, which end in the version of the
    signature from the second one on (`_v2`). `operators`: what they compute with, by its function of the shim or, where
    it is called by name, as `aten::sort.stable`; each with the dtypes of the tensors that it takes and gives.
    """

    functions: tuple[str, ...]
    operators: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class LaunchPick(Record, frozen=True):
    """How a CUDA variant is launched, and both medians that decided it, in milliseconds per call.

    `sizes` are the dims within a range for which graphs are captured.
    """

    graph: bool
    direct_ms: float | None = None
    graph_ms: float | None = None
    reason: str = ""
    sizes: tuple[Dims, ...] = ()


class Saved(Record, frozen=True):
    """What a backward library takes at one position: the forward library's argument of that position, its output of
    that index, or the gradient of that output."""

    argument: Index | None = None
    output: Index | None = None
    gradient: Index | None = None


class Gradient(Record, frozen=True):
    """The backward library's output `output` is the gradient of the forward library's argument `argument`. `results`
    are those that depend on it, where not all do."""

    output: Index
    argument: Index
    results: tuple[Index, ...] = ()


class Total(Record, frozen=True):
    """The backward library's output `output` is the whole gradient of `result`, on which the results `of` depend."""

    result: Index
    output: Index
    of: tuple[Index, ...]


class Backward(Record, frozen=True):
    """The second library of a variant for training, one of its files.

    The forward library's first `results` outputs are the model's; of these, `differentiable` have gradients, which the
    backward takes. Further ones are saved for it. `held` are results and arguments that share memory with saved values:
    a write to one of them before the backward has run is an error, as in eager. `without` may require a gradient and
    get none, as no result depends on them: a parameter that is read under `torch.no_grad()` only, an unused input.
    """

    library: str
    results: Index
    differentiable: tuple[Index, ...]
    saved: tuple[Saved, ...]
    gradients: tuple[Gradient, ...]
    held: tuple[Saved, ...] = ()
    without: tuple[Argument, ...] = ()
    totals: tuple[Total, ...] = ()


class Reads(Record, frozen=True):
    """What the run of a capture read, and `ModuleGuard.attributes` leaves out, in plain JSON.

    `attributes`: by submodule, then by the path to the attribute from there. `outside`: global variables, attributes of
    classes and the environment, by the names of `aotc.reads.outside`.
    """

    attributes: dict[str, dict[str, Any]] = {}
    outside: dict[str, Any] = {}


class Variant(Record, frozen=True):
    """What compiling one unit gives. `region` names the region that it is code of; "" for the whole model.

    `padded` names the dims along which requests are padded to sizes of a bucket that has a range. `origins` are those
    that its capture read, see `aotc.reads`; `reads` are the attributes that it read, each as `Class.attribute`,
    `read_values` is the file of `Reads` with the values, and `asked` has the modes of the process that forward asked
    for, as they were (`aotc.reads.modes`).

    The unit was built for lists, and for dicts and `**kwargs` in the order of the signature. `any_sequence`: the model
    does the same with tuples in the place of lists. `any_order`: it does the same with keys in another order.
    `empty_is_none` names the parameters of which None and an empty dict are the same to it.

    `storage_leaves` are the inputs whose storage forward reads from its beginning (`as_strided` with an offset): they
    must begin where their storage does.

    `assigned` names the module's attributes that forward sets before it reads them. `left`, of others that it sets, has
    the digest of what a call leaves in them; the next one gives the same.

    `untested`: the machine that built the code lacked such a GPU or CPU, and has never run it.

    `backward`: of a model with `train: true`, the gradients.

    `imports`: what its libraries take from torch; None in records of before.
    """

    bucket: Bucket
    library: str
    files: tuple[File, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    output_tree: Index | ResultContainer
    conditions: tuple[str, ...] = ()
    mutated_leaves: tuple[Index, ...] = ()
    mutated_state: tuple[str, ...] = ()
    operators: tuple[OperatorNeed, ...] = ()
    launch: LaunchPick | None = None
    region: str = ""
    origins: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    any_sequence: bool = False
    any_order: bool = False
    empty_is_none: tuple[str, ...] = ()
    storage_leaves: tuple[Index, ...] = ()
    assigned: tuple[str, ...] = ()
    left: dict[str, str] = msgspec.field(default_factory=dict)
    reads: tuple[str, ...] = ()
    read_values: File | None = None
    asked: dict[str, Scalar] = msgspec.field(default_factory=dict)
    untested: bool = False
    backward: Backward | None = None
    imports: LibraryImports | None = None

    @property
    def with_gradients(self) -> frozenset[int]:
        """The leaves of a call that may require gradients."""
        if self.backward is None:
            return frozenset()
        given = (self.arguments[gradient.argument] for gradient in self.backward.gradients)
        leaves = (argument.leaf for argument in (*given, *self.backward.without))
        return frozenset(leaf for leaf in leaves if leaf is not None)

    def each_file(self) -> Iterator[File]:
        yield from self.files
        if self.read_values is not None:
            yield self.read_values


# -- what an artifact was built for -----------------------------------------------------------------------------------


class Ambient(Record, frozen=True):
    """The modes of a process that compiled code depends on, as they were at build."""

    autocast: str | None
    default_dtype: str
    float32_matmul_precision: str
    deterministic: bool
    num_threads: int | None = None


class ModuleGuard(Record, frozen=True):
    """What the module at load must be: its class, its flags, the source of its classes, its Python attributes.

    `training_differs` has the paths of the submodules whose training flag is not `training`, like a frozen batch norm.

    `imports` are the files that its classes are made of, theirs and those that they import, by their Python modules'
    names. Digests of Python files are those of their syntax trees; `trees` has them by the digests of the bytes from
    which the build parsed them.
    """

    class_name: str
    training: bool
    sources: dict[str, str]
    attributes: str
    attributes_file: File | None = None
    imports: dict[str, str] = msgspec.field(default_factory=dict)
    trees: dict[str, str] = msgspec.field(default_factory=dict)
    training_differs: tuple[str, ...] = ()

    def training_of(self, path: str) -> bool:
        """The training flag that the submodule at this path had at build."""
        return self.training is not (path in self.training_differs)


class Environment(Record, frozen=True):
    """A machine, as far as compiled code cares. In an artifact: what its code needs. See `aotc.machine.environment`.

    `libstdcxx` holds the newest version of each family of symbols: `CXXABI_1.3.9`, `GLIBCXX_3.4.30`.
    """

    os: str
    machine: str
    torch: str
    libc: str = ""
    cpu_features: tuple[str, ...] = ()
    cuda_capability: str = ""
    cuda: str = ""
    gpu: str = ""
    ptx: bool = False
    libstdcxx: tuple[str, ...] = ()


class Region(Record, frozen=True):
    """A submodule that is compiled on its own; the code serves all `instances`, the paths of equal submodules.

    `name` is the first one's path. `state` is named relative to an instance; dims of `signature` are the model's.
    """

    name: str
    instances: tuple[str, ...]
    signature: Signature
    state: tuple[StateSpec, ...] = ()


class NativeCall(Record, frozen=True):
    """An extension for calls, as artifacts held it before `aotc.core` came with the package. No loader opens it."""

    file: File
    torch: str
    abi: str
    interface: Extent


class Parallel(Record, frozen=True):
    """The code is that of one rank of `size`, along a dim of a device mesh; its collectives go through one group.

    `ranks` are those that run it; () for all.
    """

    dim: str
    size: Index
    ranks: tuple[Index, ...] = ()

    @property
    def group_name(self) -> str:
        """The name by which compiled code finds its process group: that of a load stands under it."""
        return f"aotc:{self.dim}"


class Artifact(Record, frozen=True):
    """All variants of one model for one target, as a load reads them: the config blob of its image manifest.

    How they came to be is in the file `provenance` (`aotc.provenance`).

    `method` is the module's method that was compiled; "" for its forward.

    With `parallel`, the code, the state and the module are those of each rank. Where ranks differ in them (uneven
    shards, constants that depend on the rank), they are those of `parallel.ranks`, and `kinds` are the artifacts of the
    other ranks, of the same parts in the same order.

    With `regions`, every variant is code of one of them, `signature` is the calling convention of the model around
    them, which is not compiled, and `module` is about the regions' instances only (`submodules` in `aotc.reads`).
    `calls` are then, if inputs are padded, the buckets of the model's own calls, as variants without a library: their
    `outputs` are the flat leaves of the model's result.

    For loading live weights without the module: `constants` is a safetensors file with the module's non-persistent
    buffers (`aotc.tensors.constants`), `unused` names what else a checkpoint of the module holds, and no variant takes.
    """

    schema: int
    model: str
    target: str
    environment: Environment
    weights: Literal["live", "frozen"]
    signature: Signature
    state: tuple[StateSpec, ...]
    module: ModuleGuard
    ambient: Ambient
    variants: tuple[Variant, ...]
    regions: tuple[Region, ...] = ()
    calls: tuple[Variant, ...] = ()
    constants: File | None = None
    unused: tuple[str, ...] = ()
    provenance: File | None = None
    native: NativeCall | None = None
    method: str = ""
    parallel: Parallel | None = None
    kinds: tuple["Artifact", ...] = ()

    def encode(self) -> bytes:
        return canonical_json(self)

    @property
    def operators(self) -> tuple[OperatorNeed, ...]:
        """What any of the variants needs, each once."""
        return tuple(dict.fromkeys(need for variant in self.variants for need in variant.operators))

    def parts(self) -> Iterator[tuple[Region, "Artifact"]]:
        """Each region, with what this artifact is for it."""
        variants: dict[str, list[Variant]] = {}
        for variant in self.variants:
            variants.setdefault(variant.region, []).append(variant)
        bare = msgspec.structs.replace(self, variants=())
        for region in self.regions:
            part = bare.of_region(region)
            yield region, msgspec.structs.replace(part, variants=tuple(variants.get(region.name, ())))

    @property
    def untested(self) -> bool:
        """Whether code of any of the variants has never run where it was built."""
        return any(variant.untested for kind in (self, *self.kinds) for variant in kind.variants)

    @property
    def trains(self) -> bool:
        """Whether calls give gradients: of a model with `train: true`."""
        return any(variant.backward is not None for variant in self.variants)

    @property
    def reads(self) -> frozenset[str]:
        """The attributes that the capture of any of the variants read."""
        return frozenset(name for variant in self.variants for name in variant.reads)

    def of_rank(self, rank: int) -> Self:
        """What this artifact is for one of the ranks."""
        others = (kind for kind in self.kinds if kind.parallel is not None and rank in kind.parallel.ranks)
        return cast(Self, msgspec.structs.replace(next(others, self), kinds=()))

    def of_region(self, region: Region, path: str = "") -> "Artifact":
        """What this artifact is for one of its regions: an artifact of the instance at `path`, by default of the first.

        Its `module` is the model's, with the instance's training flag.
        """
        training = self.module.training_of(path or region.instances[0])
        return msgspec.structs.replace(
            self,
            model=f"{self.model} {region.name}",
            signature=region.signature,
            state=region.state,
            module=msgspec.structs.replace(self.module, training=training, training_differs=()),
            variants=tuple(variant for variant in self.variants if variant.region == region.name),
            regions=(),
            calls=(),
            method="",
            kinds=(),
        )


def decode_artifact(data: bytes) -> Artifact:
    """Read an artifact's record. Raises SchemaVersionError for an unknown version, CorruptError for anything else."""
    try:
        head = _decoder(_SchemaHead).decode(data)
    except (ValueError, RecursionError) as error:
        hint = "it was not written by `aotc build`, or by another version of it: build it again"
        raise CorruptError(f"the artifact's record cannot be read: {error}", hint=hint) from error
    if head.schema != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"the artifact has record schema {head.schema}; this aotc reads schema {SCHEMA_VERSION}",
            hint=OTHER_VERSION,
            found=head.schema,
            supported=SCHEMA_VERSION,
        )
    try:
        return decode(data, Artifact)
    except CorruptError as error:
        if "unknown field" not in error.message:
            raise
        raise SchemaVersionError(
            f"a newer aotc wrote the artifact's record, of which this one does not know all: {error.__cause__}",
            hint="load it with the aotc that built it or a newer one, or build it again with this one",
            found=f"schema {head.schema} with that field",
            supported=f"schema {SCHEMA_VERSION} without it",
        ) from error


class _SchemaHead(msgspec.Struct):
    schema: int


def decode(data: bytes, record: type[R]) -> R:
    """Strictly typed decoding; CorruptError carries the path of the mistake."""
    try:
        with no_collection():
            return _decoder(record).decode(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"a {record.__name__} record cannot be read: {error}") from error


_making_decoders = threading.RLock()
os.register_at_fork(  # a child would find the lock held for ever, and msgspec's types half made
    before=_making_decoders.acquire,
    after_in_parent=_making_decoders.release,
    after_in_child=_making_decoders.release,
)


def _decoder(record: type[R]) -> msgspec.json.Decoder[R]:
    """Made by one thread at a time: two that need a type for the first time at once crash msgspec 0.22 (SIGSEGV)."""
    with _making_decoders:
        return _decoders(record)  # type: ignore[arg-type]


@functools.cache
def _decoders(record: type[R]) -> msgspec.json.Decoder[R]:
    return msgspec.json.Decoder(record)
