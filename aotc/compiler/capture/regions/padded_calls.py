"""Calls of a model by regions whose inputs are padded: what they are padded to, and how their results are cut back.

The model around its regions stays eager, so a call is padded as a whole: its inputs grow to a bucket's sizes, and the
tensors of its result are cropped. Which of their axes, the model shows: it runs eagerly at smaller sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.analysis.output_dims import Shapes, mark_axes, named_axes_of, padded_dims
from aotc.compiler.capture.regions.equal_regions import left_as_it_was
from aotc.errors import BuildError
from aotc.manifest import ModelSpec
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.models.input_forms import input_forms
from aotc.models.signature import make_signature
from aotc.records import Bucket, Output, ResultContainer, TensorLeaf, Variant, has_range, tuned_dims

_PLAIN = (Tensor, bool, int, float, str)


def padded_calls(spec: ModelSpec, module: nn.Module, folder: Path) -> tuple[Variant, ...]:
    """Of a model whose inputs are padded, each bucket as a variant without a library: `outputs` are the flat leaves of
    the model's result. `module` runs eagerly, on its current device, and is as before afterwards.

    Raises BuildError for a result that cannot be cropped, or a model that writes to an input that is padded.
    """
    signature = make_signature(spec, module)
    if not any(isinstance(leaf, TensorLeaf) and leaf.pad for leaf in signature.leaves):
        return ()
    probe = _Probe(input_forms(spec)[0], module, folder)
    return tuple(_call_of(spec, bucket, probe) for bucket in spec.buckets)


def _call_of(spec: ModelSpec, bucket: Bucket, probe: _Probe) -> Variant:
    ranged = has_range(bucket)
    padded = padded_dims(probe.signature, bucket) if ranged else tuple(bucket)
    sizes = tuned_dims(bucket)
    base = probe.shapes(sizes)
    texts = [[""] * len(shape) for shape in base]
    if isinstance(spec.crop, Mapping):
        for index, names in named_axes_of(spec.crop, probe.paths).items():
            texts[index] = list(names)
    else:
        for dim in spec.crop:
            if dim in padded:
                mark_axes(dim, sizes, base, probe.shapes, texts, _promised)
    outputs = tuple(Output(index=index, dims=tuple(text) if any(text) else ()) for index, text in enumerate(texts))
    tree = ResultContainer("tuple", tuple(range(len(outputs))))
    own = padded if ranged else ()
    return Variant(bucket, library="", files=(), arguments=(), outputs=outputs, output_tree=tree, padded=own)


def _promised(size: int) -> Iterator[int]:
    """Other sizes to run at: those below a bucket's are padded to it, so the manifest promises them."""
    yield from (other for other in (size - 1, size // 2, size - 8) if other > 0)
    if size == 1:
        yield 2


class _Probe:
    """Runs the model on example inputs."""

    def __init__(self, spec: ModelSpec, module: nn.Module, folder: Path) -> None:
        self.spec, self.module, self.folder = spec, module, folder
        self.signature = make_signature(spec, module)
        self.paths: list[str] = []
        """Of the flat leaves of the last result."""

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        """The shape of each flat leaf of the result at these sizes; () for a leaf that is not a tensor."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        device = tensors[0].device if tensors else "cpu"
        leaves = signature_leaves(self.spec, self.signature, sizes, device, 0, self.folder)
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        args, kwargs = arguments_of(self.signature, leaves)
        with left_as_it_was(self.module), modes_of(self.spec, str(device).partition(":")[0]):
            result = self.module(*args, **kwargs)
        for leaf, value, version in zip(self.signature.leaves, leaves, versions, strict=True):
            if isinstance(leaf, TensorLeaf) and leaf.pad and value._version != version:
                raise BuildError(
                    f"the model writes to its input `{leaf.path}`, which is padded: the caller's would stay as it is",
                    hint="leave out its `pad`, or build the model whole",
                    stage="regions",
                )
        found = pytree.tree_flatten_with_path(result)[0]
        self.paths = [pytree.keystr(path) for path, _ in found]
        for path, leaf in found:
            _check_leaf(pytree.keystr(path), leaf)
        return [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for _, leaf in found]


def _check_leaf(path: str, leaf: Any) -> None:
    """Raises BuildError for an object in which there may be tensors that would not be cropped."""
    if leaf is not None and not isinstance(leaf, _PLAIN):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise BuildError(
            f"the model returns a {kind} at `{path or 'its result'}`, which cannot be cropped",
            hint="leave out `pad`; where this is a cache, pass `use_cache: false` as an input of the manifest",
            stage="regions",
        )
