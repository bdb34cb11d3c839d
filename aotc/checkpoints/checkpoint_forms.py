"""The forms of a checkpoint's tensors, compared with those of a record before a tensor is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from aotc.errors import BindError, Issue
from aotc.records import StateSpec, names_of


class TensorHeader(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: str
    shape: tuple[int, ...]


class HasForms(Protocol):
    """A checkpoint: `where` names it, for messages."""

    where: str

    @property
    def forms(self) -> Mapping[str, TensorHeader]: ...


def check_forms(
    checkpoint: HasForms, specs: Sequence[StateSpec], ignored: Collection[str], *, partial: bool = False
) -> None:
    """Compare the forms of a checkpoint's tensors with `specs`. With `partial`, tensors may be missing, though not all.

    `ignored` are names that may be there and are not used. Raises BindError with everything that is missing,
    unexpected, mis-shaped or mis-typed.
    """
    forms = checkpoint.forms
    names = {name for spec in specs for name in names_of(spec)}
    if partial and forms.keys() <= {*ignored} - names:
        raise BindError(
            f"{checkpoint.where} has none of the model's tensors: nothing would be replaced",
            hint="were they chosen by a prefix that none of the names has?",
        )
    missing = [spec.name for spec in specs if not partial and forms.keys().isdisjoint(names_of(spec))]
    unexpected = sorted(forms.keys() - names - set(ignored))
    issues = [
        *(Issue("is missing", where=name) for name in missing),
        *(
            Issue("is not a tensor of the model", where=name, hint=hint)
            for name, hint in _with_meant(unexpected, names - forms.keys())
        ),
        *(issue for spec in specs for name in names_of(spec) if name in forms for issue in _issues(spec, name, forms)),
    ]
    if issues:
        known = missing if not partial else [name for spec in specs for name in names_of(spec)]
        raise BindError(
            f"the tensors of {checkpoint.where} are not those that the artifact was built for",
            issues=tuple(issues),
            hint=_hint(known, unexpected),
        )


def _with_meant(unexpected: Sequence[str], known: Collection[str]) -> Iterable[tuple[str, str]]:
    """Each name, and a hint at the one that was meant."""
    if not unexpected:
        return ()
    return zip(unexpected, mistyped(unexpected, known), strict=True)


COMPARED = 10
"""Unknown names for each of which the nearest known one is looked for."""


def mistyped(names: Sequence[str], known: Collection[str]) -> list[str]:
    """A hint for each unknown name: the known one that it most likely stands for, or ""."""
    if len(names) > COMPARED:  # the names of another model
        return [""] * len(names)
    prefixed = any(f".{name}".endswith(f".{one}") or f".{one}".endswith(f".{name}") for name in names for one in known)
    if prefixed:  # those of a model around this one or inside it
        return [""] * len(names)
    import difflib

    found = (difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in names)
    return [f"did you mean `{matches[0]}`?" if matches else "" for matches in found]


def _issues(spec: StateSpec, name: str, forms: Mapping[str, TensorHeader]) -> Iterator[Issue]:
    there = forms[name]
    for label, expected, actual in (
        ("dtype", spec.dtype, there.dtype),
        ("shape", list(spec.shape), list(there.shape)),
    ):
        if expected != actual:
            hint = f"convert it, or build with `dtype: {actual}`" if label == "dtype" else ""
            yield Issue(
                f"built for {label} {expected}, the checkpoint's is {actual}",
                where=name,
                expected=str(expected),
                actual=str(actual),
                hint=hint,
            )


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    longer, shorter = _prefix(missing, unexpected), _prefix(unexpected, missing)
    if longer:
        return (
            f"the checkpoint's names begin with `{longer}`, as those of a model around this one do: pass a mapping "
            f"of the tensors that do, with `name.removeprefix({longer!r})` for names"
        )
    if shorter:
        return (
            f"the artifact's names begin with `{shorter}` and the checkpoint's do not, as those of a model inside this "
            f"one: pass a mapping with `{shorter!r} + name` for names"
        )
    return (
        "load a checkpoint of the model and dtype of the artifact's manifest, or pass a mapping of what belongs to it"
    )


def _prefix(short: Sequence[str], long: Sequence[str]) -> str:
    """What at least half of the names in `short` lack at their beginning to be names in `long`; "" if nothing is."""
    there = set(long)
    ends = {name: [other.removesuffix(name) for other in long if other.endswith(f".{name}")] for name in short[:3]}
    for prefix, _ in Counter(prefix for found in ends.values() for prefix in found).most_common(3):
        if 2 * sum(prefix + name in there for name in short) >= len(short):
            return prefix
    return ""
