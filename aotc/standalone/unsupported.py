"""What an artifact has that the standalone runtime does not do: it is said at the load, all at once."""

from __future__ import annotations

from collections.abc import Iterator

from aotc.errors import Issue, LibraryError
from aotc.records import Artifact, ResultContainer, StridedView, Variant, bucket_name

_MODES = {"grad": False, "inference": False, "device": "cpu", "requires_grad": False}
"""The modes of `Variant.asked`, as they always are without torch."""
_OF_STATE = "requires_grad of "
"""Of a tensor of the module, which a load with weights does not have."""


def refuse_unsupported(artifact: Artifact) -> None:
    """Raises LibraryError with everything that does not run without torch."""
    if issues := unsupported(artifact):
        raise LibraryError(
            f"`{artifact.model}` for {artifact.target} has what the standalone runtime does not do",
            issues=issues,
            hint="load it with aotc.load, where torch is installed",
        )


def unsupported(artifact: Artifact) -> tuple[Issue, ...]:
    """Everything that does not run without torch, apart from functions that its libraries call."""
    of_variants = (issue for variant in artifact.variants for issue in _of_variant(variant))
    return tuple(dict.fromkeys([*_of_artifact(artifact), *of_variants]))


def _of_artifact(artifact: Artifact) -> Iterator[Issue]:
    if artifact.regions:
        yield Issue("it was built by regions, whose model runs in torch", hint="build it whole, without `regions:`")
    if artifact.parallel is not None:
        yield Issue("it is the code of one of several ranks", hint="build it without `parallel:`")
    if artifact.trains:
        yield Issue("it was built with gradients", hint="build it without `train: true`")
    for spec in artifact.state:
        if spec.subclass is not None:
            yield Issue("it is quantised, by a subclass of torch.Tensor", where=spec.name)


def _of_variant(variant: Variant) -> Iterator[Issue]:
    where = f"bucket {bucket_name(variant.bucket)}"
    if variant.storage_leaves:
        yield Issue("the model reads the storage of an input from its beginning (`as_strided`)", where=where)
    if variant.operators:
        names = ", ".join(sorted({need.name for need in variant.operators}))
        yield Issue(f"it calls operators that are not torch's own: {names}", where=where)
    views = [output.view for output in variant.outputs if isinstance(output.view, StridedView)]
    if any(view.conjugate or view.negative for view in views):
        hint = "let forward return a clone"
        yield Issue("a result is a lazily conjugated or negated view, which torch alone has", where=where, hint=hint)
    for name, value in variant.asked.items():
        if not name.startswith(_OF_STATE) and value != _MODES.get(name):
            yield Issue(f"forward asks for a mode of torch: {name}, which was {value} at the build", where=where)
    if odd := sorted(set(_odd_containers(variant.output_tree))):
        yield Issue(f"a result is a {', '.join(odd)}", where=where, hint="return a tensor, tuple, list or dict")
    others = [file.name for file in variant.files if not file.mapped and file.name != "constants.json"]
    if others != [variant.library]:
        yield Issue("its library calls operators by name, or reads other files", where=where)


def _odd_containers(tree: int | ResultContainer) -> Iterator[str]:
    if isinstance(tree, int):
        return
    if tree.type not in ("tuple", "list", "dict", "collections.OrderedDict") and member_names(tree) is None:
        yield tree.type
    for item in tree.items:
        yield from _odd_containers(item)


def member_names(tree: ResultContainer) -> list[str] | None:
    """The names of a dataclass's or a ModelOutput's members, as the record keeps them; the result is then a dict."""
    context, count = tree.context, len(tree.items)
    if isinstance(context, list) and len(context) == 2 and all(isinstance(part, list) for part in context):
        context = context[0]
    if not isinstance(context, list) or not all(isinstance(name, str) for name in context):
        return None
    return context if len(context) == len(set(context)) == count else None
