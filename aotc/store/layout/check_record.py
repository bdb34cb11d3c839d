"""The check of a record before it enters a store: at publish, at fetch, and in `fsck`.

A digest says that a record is the one that was published, and types that it has the right fields, with numbers in their
bounds (`Extent`, `Index`). Neither says that a leaf's index has a leaf, or that a dtype exists: what the loader takes
for granted is checked here. `aotc.load` repeats only the checks of a backward. If a load fails on a record,
`explain_unsound` says what is wrong with that record.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from aotc.errors import CorruptError, Issue
from aotc.expressions import Expression, linear_form
from aotc.records import (
    TUPLE,
    Ambient,
    Argument,
    Artifact,
    Backward,
    ConstantLeaf,
    File,
    Leaf,
    Output,
    ResultContainer,
    Saved,
    Signature,
    SizeRange,
    StateSpec,
    StridedView,
    TensorLeaf,
    Variant,
    bucket_name,
    takes,
)
from aotc.store.layout import oci
from aotc.store.layout.bundle import CONFIG_LIMIT, FILE, MAPPED_FILE, BundleEntry, each_file, read_artifact
from aotc.store.layout.names import check_file_name, hex_of
from aotc.store.layout.oci import ImageManifest
from aotc.store.readable import ReadableStore

DTYPES = frozenset(
    (
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
    )
)
"""The dtypes of torch by name."""

LARGEST = 2**63 - 1
"""The largest size of a tensor's axis."""
DEEPEST = 64
"""Containers within containers in one argument of a call, or in a model's result."""

LONGEST_NAME = 1000
"""Characters of a dotted name: of a tensor, a submodule or a Python module; and `DEEPEST` names in it."""
MOST_IMPORTS = 20_000
"""Python modules whose files are looked for at a load."""
SHOWN = 100
"""Reasons that an error lists."""

_RANKS = {"channels_last": 4, "channels_last_3d": 5}
_KEYED = ("dict", "collections.OrderedDict", "collections.defaultdict")
_KINDS = ("positional", "either", "keyword", "extra")
_MOST_FROM_ONE_BYTE = 1 << 15  # bytes
_FRAME = 1 << 16  # bytes that a frame may take beside its content


def check_artifact(store: ReadableStore, artifact: BundleEntry | str) -> Artifact:
    """The record of an artifact that enters a store, or is in one, after every check of it that needs no other blob.

    Raises as `read_artifact` does; CorruptError also for what `check_record` finds, and for a file of the record that
    is not a layer of the manifest.
    """
    record = read_artifact(store, artifact)
    check_record(record)
    digest = artifact if isinstance(artifact, str) else artifact.digest
    _check_layers(record, oci.read_document(store.blobs, digest, ImageManifest))
    return record


def check_entry(store: ReadableStore, entry: BundleEntry) -> None:
    """Check what a bundle holds, an artifact or a compiler cache. Raises as `check_artifact` does."""
    if entry.is_cache:
        from aotc.store.layout.compiler_cache import read_cache

        read_cache(store, entry)
    else:
        check_artifact(store, entry)


def check_record(artifact: Artifact) -> None:
    """Raises CorruptError for a name, digest or size of a file that is unsafe, else with everything in the record that
    makes no sense."""
    for file in each_file(artifact):
        _check_file(file)
    for kind in (artifact, *artifact.kinds):
        _check_kind(kind, list(_kind_issues(artifact)))


def _check_kind(artifact: Artifact, issues: list[Issue]) -> None:
    attributes = artifact.module.attributes_file
    if attributes is not None and attributes.size > CONFIG_LIMIT:
        raise CorruptError(
            f"the module's attributes have {attributes.size} bytes; at most {CONFIG_LIMIT} are read",
            expected=f"at most {CONFIG_LIMIT} bytes",
            actual=f"{attributes.size} bytes",
        )
    for variant in artifact.variants:
        _check_variant_names(variant)
    issues += _name_issues(artifact)  # what follows walks along them
    if artifact.method and not artifact.method.isidentifier():
        issues.append(Issue(f"the method {artifact.method[:100]!r} cannot be one"))
    if artifact.parallel and not (artifact.parallel.dim.isidentifier() and artifact.parallel.size > 1):
        issues.append(Issue(f"{artifact.parallel.size} ranks of {artifact.parallel.dim[:100]!r} cannot be"))
    if not issues:
        issues = list(_region_issues(artifact)) if artifact.regions else _artifact_issues(artifact)
    if issues:
        raise CorruptError(
            f"the record of `{artifact.model[:100]}` for {artifact.target[:100]} makes no sense",
            issues=tuple(issues[:SHOWN]),
            hint="it was not written by `aotc build`, or by a broken one: build it again",
        )


def explain_unsound(artifact: Artifact) -> CorruptError | None:
    """The faults of a record, as the cause of a load's error; None if the record is sound."""
    try:
        check_record(artifact)
    except CorruptError as error:
        return error
    return None


# -- files ------------------------------------------------------------------------------------------------------------


def _check_layers(artifact: Artifact, manifest: ImageManifest) -> None:
    layers = {(layer.digest, layer.size) for layer in manifest.layers if layer.media_type in (FILE, MAPPED_FILE)}
    for file in each_file(artifact):
        if (file.blob, file.blob_size) not in layers:
            raise CorruptError(
                f"the file {file.name} has the blob {file.blob} of {file.blob_size} bytes, "
                f"which is not a layer of the manifest of `{artifact.model}` for {artifact.target}",
                hint="a copy of this bundle would lose that file; build it again",
                expected=f"{file.blob} of {file.blob_size} bytes",
                actual=f"{len(layers)} other layers",
            )


def _check_file(file: File) -> None:
    """Whether its name and digests may become paths, and whether a zstd frame of `blob_size` can give `size` bytes: 4
    bytes give 128 KiB at most, and what cannot be compressed takes hardly more than it is."""
    check_file_name(file.name)
    hex_of(file.digest)
    hex_of(file.blob)
    least, most = -(-file.size // _MOST_FROM_ONE_BYTE), file.size + file.size // 128 + _FRAME
    if not least <= file.blob_size <= most:
        raise CorruptError(
            f"the file {file.name} of {file.size} bytes cannot be what a blob of {file.blob_size} bytes holds",
            hint="the record was not written by aotc, or was changed: do not trust where it came from",
            expected=f"{least} to {most} bytes",
            actual=f"{file.blob_size} bytes",
        )


def _folded(name: str) -> str:
    """Equal for names that a file system without upper and lower case, or one that normalises, takes for one."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _check_variant_names(variant: Variant) -> None:
    names = [file.name for file in variant.files]
    if len(set(map(_folded, names))) < len(names):
        raise CorruptError(
            f"the variant {bucket_name(variant.bucket)} has two files of one name, or of names that some file systems "
            "take for one",
            expected="distinct names",
            actual=", ".join(sorted(names))[:500],
        )
    if variant.library not in names:
        raise CorruptError(
            f"the library {variant.library[:100]!r} of {bucket_name(variant.bucket)} is not one of its files",
            expected=", ".join(sorted(names))[:500],
            actual=variant.library[:100],
        )


# -- ranks ------------------------------------------------------------------------------------------------------------


def _kind_issues(artifact: Artifact) -> Iterator[Issue]:
    """Whether each rank has code of one kind, and all kinds are of the same parts."""
    kinds = (artifact, *artifact.kinds)
    served = sorted(rank for kind in kinds if kind.parallel for rank in kind.parallel.ranks)
    if not served and not artifact.kinds:
        return
    meshes = {
        (kind.parallel.dim, kind.parallel.size) if kind.parallel and kind.parallel.ranks else None for kind in kinds
    }
    size = artifact.parallel.size if artifact.parallel else 0
    every = len(served) == size and served == list(range(size))
    if not every or len(meshes) > 1 or any(kind.kinds for kind in artifact.kinds):
        yield Issue(f"its {len(kinds)} kinds of code are not each for some of its {size} ranks")
    if len({(kind.model, kind.target) for kind in kinds}) > 1:
        yield Issue("the code of its ranks is of several models or targets")
    parts = [[(variant.region, variant.bucket) for variant in kind.variants] for kind in kinds]
    if any(other != parts[0] for other in parts):
        yield Issue("the code of its ranks is of other regions or buckets")


# -- names ------------------------------------------------------------------------------------------------------------


def _name_issues(artifact: Artifact) -> Iterator[Issue]:
    if len(artifact.module.imports) > MOST_IMPORTS:
        yield Issue(f"its module imports {len(artifact.module.imports)} files; at most {MOST_IMPORTS} are looked for")
    for name in _dotted_names(artifact):
        if len(name) > LONGEST_NAME or name.count(".") >= DEEPEST:
            yield Issue(f"{name[:50]!r}… has {len(name)} characters and {name.count('.') + 1} parts")


def _dotted_names(artifact: Artifact) -> Iterator[str]:
    for state in (artifact.state, *(region.state for region in artifact.regions)):
        for spec in state:
            yield spec.name
            yield from spec.aliases
    for region in artifact.regions:
        yield region.name
        yield from region.instances
    yield from artifact.module.imports
    yield from (need.module for variant in artifact.variants for need in variant.operators)


def _region_issues(artifact: Artifact) -> Iterator[Issue]:
    """Issues of each region, by the rules of a whole model, and of equal names."""
    yield from _artifact_issues(msgspec.structs.replace(artifact, variants=artifact.calls, regions=()))
    names = [region.name for region in artifact.regions]
    if len(set(names)) < len(names):
        yield Issue(f"two regions have one name: {_listed(names)}")
        return
    if unknown := {variant.region for variant in artifact.variants} - set(names):
        yield Issue(f"variants are code of regions that there are not: {_listed(unknown)}")
    if odd := [region.name for region in artifact.regions if not region.name.startswith(region.instances[:1] or ".")]:
        yield Issue(f"regions are not called by the path of their first instance: {_listed(odd)}")
    kinds = {region.instances for region in artifact.regions}  # the forms of a kind have the same ones
    paths = sorted(path.split(".") for instances in kinds for path in instances)
    # In this order, the one after a path lies within it, or is the same, if any does.
    within = any(one == other[: len(one)] for one, other in itertools.pairwise(paths))
    if within or paths[:1] == [[""]] or artifact.weights != "live":
        yield Issue("regions lie within one another, are named twice, or hold frozen weights")
    for region, part in artifact.parts():
        for issue in _artifact_issues(part):
            where = f"region {region.name[:100]}" + (f", {issue.where}" if issue.where else "")
            yield Issue(issue.message, where=where)


def _artifact_issues(artifact: Artifact) -> list[Issue]:
    issues = [
        *_leaf_issues(artifact.signature),
        *_parameter_issues(artifact.signature),
        *_state_issues(artifact.state),
        *_ambient_issues(artifact.ambient),
    ]
    if not issues:  # the variants are said in terms of these
        dims = _read_dims(artifact.signature.leaves)
        live = artifact.state if artifact.weights == "live" else ()
        state = frozenset(spec.name for spec in live)
        leaves = artifact.signature.leaves
        tensors = frozenset(index for index, leaf in enumerate(leaves) if isinstance(leaf, TensorLeaf))
        for variant in artifact.variants:
            where = f"bucket {bucket_name(variant.bucket)[:200]}"
            found = _variant_issues(variant, len(leaves), tensors, state, dims)
            issues += [Issue(message, where=where) for message in found]
    return issues


# -- the calling convention -------------------------------------------------------------------------------------------


def _leaf_issues(signature: Signature) -> Iterator[Issue]:
    texts = [entry for leaf in signature.leaves if isinstance(leaf, TensorLeaf) for entry in _texts(leaf)]
    if unread := list(_unread(texts)):
        yield from map(Issue, unread)
        return
    dims = _read_dims(signature.leaves)
    tensors = [leaf for leaf in signature.leaves if isinstance(leaf, TensorLeaf)]
    given = {entry for leaf in tensors if leaf.default is None for entry in leaf.shape}
    for leaf in tensors:
        yield from (Issue(message, where=leaf.path[:100]) for message in _tensor_issues(leaf, dims))
        if leaf.default is not None and not set(_texts(leaf)) <= given:
            yield Issue("it has a default, and sizes that no other input has", where=leaf.path[:100])


def _tensor_issues(leaf: TensorLeaf, dims: frozenset[str]) -> Iterator[str]:
    if leaf.dtype not in DTYPES:
        yield f"{leaf.dtype[:100]!r} is not a dtype"
        return
    if len(leaf.shape) != _RANKS.get(leaf.layout, len(leaf.shape)):
        yield f"a tensor of {len(leaf.shape)} axes has no layout {leaf.layout}"
    yield from _unread(_texts(leaf), dims)
    if leaf.default is not None and not _holds(leaf.dtype, leaf.default):
        yield f"its default is {leaf.default!r:.100}, which {leaf.dtype} cannot hold"
    for name, rule in leaf.pad.items():
        if not rule.edge and not _holds(leaf.dtype, rule.value):
            yield f"`{name[:100]}` is padded with {rule.value!r:.100}, which {leaf.dtype} cannot hold"


def _texts(leaf: TensorLeaf) -> Iterator[str]:
    return (entry for entry in leaf.shape if isinstance(entry, str))


def _read_dims(leaves: Sequence[Leaf]) -> frozenset[str]:
    """The dims that a call's shapes say: those that are a size themselves, or by one that is linear in them."""
    names = set()
    for text in {text for leaf in leaves if isinstance(leaf, TensorLeaf) for text in _texts(leaf)}:
        expression = Expression(text)
        if text in expression.names:
            names.add(text)
        elif linear := linear_form(expression):
            names.add(linear[0])
    return frozenset(names)


def _unread(texts: Iterable[str], dims: frozenset[str] | None = None) -> Iterator[str]:
    """Issues of expressions: a syntax error or, where `dims` are given, an unknown dim."""
    for text in texts:
        try:
            names = Expression(text).names
        except ValueError as error:
            yield f"the record holds an expression that cannot be read: {error}"
        else:
            if dims is not None and (unknown := names - dims):
                yield f"`{text[:100]}` needs {_listed(unknown)}, which no input says"


def _holds(dtype: str, value: Any) -> bool:
    """Whether a tensor of this dtype can be filled with the value, without a change of it but rounding."""
    if isinstance(value, str) or value is None:
        return False
    integer = re.fullmatch(r"(u?)int(\d+)", dtype)
    if integer is None:
        return value in (0, 1) if dtype == "bool" else isinstance(value, float) or abs(value) <= LARGEST
    bits = int(integer[2])
    low, high = (0, 2**bits - 1) if integer[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return not isinstance(value, float) and low <= value <= high


def _parameter_issues(signature: Signature) -> Iterator[Issue]:
    parameters = signature.parameters
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        yield Issue(f"two parameters have one name: {_listed(names)}")
    order = [_KINDS.index(parameter.kind) for parameter in parameters]
    if order != sorted(order):
        yield Issue(f"parameters that are passed by position follow others that are not: {_listed(names)}")
    used: list[int] = []
    try:
        for parameter in parameters:
            used += _indices(parameter.tree, DEEPEST)
    except _NoTree as flaw:
        yield Issue(f"a parameter's structure has {flaw}")
        return
    if sorted(used) != list(range(len(signature.leaves))):
        yield Issue(f"{len(signature.leaves)} leaves are not each in one place of the parameters")
        return
    for parameter in parameters:
        constant = isinstance(parameter.tree, int) and isinstance(signature.leaves[parameter.tree], ConstantLeaf)
        if parameter.optional and not constant:
            yield Issue(f"the parameter {parameter.name[:100]} may be left out, and is not a constant")


class _NoTree(Exception):
    pass


def _indices(tree: Any, depth: int) -> Iterator[int]:
    """The leaves or outputs that a tree names, in order. Raises _NoTree."""
    if type(tree) is int:
        yield tree
    elif depth == 0:
        raise _NoTree(f"more than {DEEPEST} levels")
    elif isinstance(tree, ResultContainer):
        if tree.type in _KEYED and len(set(tree.keys)) != len(tree.items):
            raise _NoTree(f"a {tree.type} of {len(tree.items)} items with {len(set(tree.keys))} keys")
        for item in tree.items:
            yield from _indices(item, depth - 1)
    elif isinstance(tree, list | dict):
        items = tree.values() if isinstance(tree, dict) else tree[1:] if tree[:1] == [TUPLE] else tree
        for subtree in items:
            yield from _indices(subtree, depth - 1)
    else:
        raise _NoTree(f"a {type(tree).__name__} where a leaf's index should be")


# -- the module and the process ---------------------------------------------------------------------------------------


def _state_issues(state: Sequence[StateSpec]) -> Iterator[Issue]:
    names = [spec.name for spec in state]
    if len(set(names)) < len(names):
        yield Issue(f"two tensors of the module have one name: {_listed(names)}")
    for spec in state:
        if spec.dtype not in DTYPES:
            yield Issue(f"{spec.dtype[:100]!r} is not a dtype", where=spec.name[:100])
        if len(spec.shape) != len(spec.stride):
            yield Issue(f"{len(spec.shape)} sizes and {len(spec.stride)} strides", where=spec.name[:100])
        elif _span(spec) > LARGEST:
            yield Issue("sizes and strides that no tensor has", where=spec.name[:100])


def _span(spec: StateSpec) -> int:
    """At least the elements from a tensor's first to its last, and each of its sizes and strides."""
    return 1 + sum(max(size, 1) * max(stride, 1) for size, stride in zip(spec.shape, spec.stride, strict=True))


def _ambient_issues(ambient: Ambient) -> Iterator[Issue]:
    for name in (ambient.default_dtype, ambient.autocast):
        if name is not None and name not in DTYPES:
            yield Issue(f"{name[:100]!r} is not a dtype", where="ambient")


# -- the variants -----------------------------------------------------------------------------------------------------


_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_MODULE = re.compile(r"(?!(torch|functorch|torchgen|aotc|triton|sympy|isympy)(\.|$))[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""A module of the user's own: what loading may import on its behalf is not a compiler."""


def _operator_issues(variant: Variant) -> Iterator[str]:
    for need in variant.operators:
        if not _OPERATOR.fullmatch(need.name):
            yield f"{need.name[:100]!r} names no operator"
        if not _MODULE.fullmatch(need.module):
            yield f"the operator {need.name[:100]} is registered by {need.module[:100]!r}, not a module of a user"


def _variant_issues(
    variant: Variant, leaves: int, tensors: frozenset[int], state: frozenset[str], dims: frozenset[str]
) -> Iterator[str]:
    for name, size in variant.bucket.items():
        if isinstance(size, SizeRange) and size.min > size.max:
            yield f"`{name[:100]}` has the sizes {size.min} to {size.max}"
            return
    if wrong := sum(not _is_argument(argument, tensors, state) for argument in variant.arguments):
        yield f"{wrong} of {len(variant.arguments)} arguments are neither a tensor of the call nor one of the module"
    for output in variant.outputs:
        yield from _output_issues(output, leaves, state, dims)
        if output.axis is not None and output.leaf not in tensors:
            yield "an output is a size of an input that is not a tensor"
        if output.view and output.leaf not in tensors and output.state is None:
            yield "an output is a view of an input that is not a tensor"
    try:
        if sorted(_indices(variant.output_tree, DEEPEST)) != list(range(len(variant.outputs))):
            yield f"{len(variant.outputs)} outputs are not each in one place of its result's structure"
    except _NoTree as flaw:
        yield f"its result's structure has {flaw}"
    yield from _operator_issues(variant)
    yield from _unread(variant.conditions, dims)
    if not tensors.issuperset(variant.mutated_leaves):
        yield "it writes to an input that is not a tensor"
    if not tensors.issuperset(variant.storage_leaves):
        yield "it reads the storage of an input that is not a tensor"
    if unknown := set(variant.mutated_state) - state:
        yield f"it writes to {_listed(unknown)}, which the module does not pass"
    yield from backward_issues(variant)
    without = variant.backward.without if variant.backward else ()
    if wrong := sum(not _is_argument(argument, tensors, state) for argument in without):
        yield f"{wrong} of the tensors without a gradient are neither one of the call nor one of the module"
    for sizes in variant.launch.sizes if variant.launch else ():
        if sizes.keys() != variant.bucket.keys() or not all(takes(variant.bucket[name], sizes[name]) for name in sizes):
            yield "a graph is to be captured at sizes that are not the bucket's"


def backward_issues(variant: Variant) -> Iterator[str]:
    """What in the record of a variant's backward makes no sense; a load checks this, too, as what is wrong would show
    only in a step of training."""
    if (backward := variant.backward) is None:
        return
    if backward.library not in {file.name for file in variant.files} or backward.library == variant.library:
        yield f"its backward library {backward.library[:100]!r} is not one of its files, or is the forward's"
    results = range(backward.results)
    if not results or any(output.index is not None and output.index not in results for output in variant.outputs):
        yield f"its forward has {backward.results} results, and its outputs are others"
        return
    wrong = sum(not _is_saved(each, variant, backward) for each in (*backward.saved, *backward.held))
    given = {each.output for each in backward.gradients} | {each.output for each in backward.totals}
    gradients = range(len(given))  # each output of the backward is one
    arguments = range(len(variant.arguments))
    wrong += sum(each.argument not in arguments or each.output not in gradients for each in backward.gradients)
    of_gradients = (index for each in backward.gradients for index in each.results)
    wrong += sum(index not in results for index in (*backward.differentiable, *of_gradients))
    wrong += sum(each.output not in gradients for each in backward.totals)
    differentiable = {*backward.differentiable}
    wrong += sum(not {each.result, *each.of} <= differentiable or each.result in each.of for each in backward.totals)
    if wrong or any(each.gradient is not None for each in backward.held):
        yield f"{wrong} of the tensors that pass between its libraries come from no place"


def _is_saved(saved: Saved, variant: Variant, backward: Backward) -> bool:
    if sum(source is not None for source in (saved.argument, saved.output, saved.gradient)) != 1:
        return False
    if saved.argument is not None:
        return saved.argument < len(variant.arguments)
    return saved.output is not None or saved.gradient in backward.differentiable


def _is_argument(argument: Argument, tensors: frozenset[int], state: frozenset[str]) -> bool:
    if argument.leaf is None:
        return argument.state in state
    return argument.state is None and argument.leaf in tensors


def _output_issues(output: Output, leaves: int, state: frozenset[str], dims: frozenset[str]) -> Iterator[str]:
    if sum(source is not None for source in (output.index, output.leaf, output.state)) > 1:
        yield "an output comes from two places"
    if output.leaf is not None and output.leaf >= leaves:
        yield f"an output is the input {output.leaf}; there are {leaves}"
    if output.state is not None and output.state not in state:
        yield f"an output is `{output.state[:100]}`, which the module does not pass"
    yield from _unread(filter(None, output.dims), dims)
    if isinstance(view := output.view, StridedView):
        yield from _unread(view.texts(), dims)
        if len(view.shape) != len(view.stride) or view.dtype not in (*DTYPES, ""):
            yield f"an output is a view of {len(view.shape)} axes, {len(view.stride)} strides, {view.dtype[:50]!r}"
        if output.dims and len(output.dims) != len(view.shape):
            yield f"an output is a view of {len(view.shape)} axes, of which {len(output.dims)} are cropped"


def _listed(names: Collection[str]) -> str:
    return ", ".join(name[:50] for name in sorted(names)[:5])
