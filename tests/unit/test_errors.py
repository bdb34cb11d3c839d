"""Every error that aotc raises on purpose: one base, a builtin that callers know, facts that survive a process."""

from __future__ import annotations

import pickle

import pytest

import aotc.errors
from aotc.errors import AotcError, BindError, Issue, ManifestError

BUILTINS = {
    "ManifestError": ValueError,
    "ReferenceFormatError": ValueError,
    "BuildError": RuntimeError,
    "StoreError": RuntimeError,
    "NotFoundError": LookupError,
    "RemoteError": RuntimeError,
    "CorruptError": ValueError,
    "SchemaVersionError": ValueError,
    "SignatureError": RuntimeError,
    "UnverifiedError": RuntimeError,
    "AdvisoryError": RuntimeError,
    "EnvironmentMismatchError": RuntimeError,
    "BindError": TypeError,
    "LibraryError": RuntimeError,
    "MemoryLimitError": MemoryError,
    "MissError": LookupError,
    "OperatorError": LookupError,
    "TorchMissingError": ModuleNotFoundError,
    "GroupError": RuntimeError,
    "ForkError": RuntimeError,
    "VerifyError": RuntimeError,
    "TraceError": ValueError,
    "GradientError": RuntimeError,
}
CLASSES = [getattr(aotc.errors, name) for name in BUILTINS]


def test_this_list_holds_every_error() -> None:
    public = {name for name in aotc.__all__ if name.endswith("Error")} - {"AotcError"}
    assert public == set(BUILTINS)


@pytest.mark.parametrize("cls", CLASSES)
def test_each_is_an_aotc_error_and_the_builtin_that_a_caller_would_catch(cls: type[AotcError]) -> None:
    assert issubclass(cls, AotcError)
    assert issubclass(cls, BUILTINS[cls.__name__])


@pytest.mark.parametrize("name", ["NotFoundError", "CorruptError", "SchemaVersionError"])
def test_what_is_wrong_in_a_store_is_a_store_error(name: str) -> None:
    assert issubclass(getattr(aotc.errors, name), aotc.errors.StoreError)


@pytest.mark.parametrize("cls", [AotcError, *CLASSES])
def test_each_pickles_with_all_its_facts(cls: type[AotcError]) -> None:
    error = cls("it broke", hint="mend it", issues=(Issue("a", "w", "1", "2", "h"),), found=2, supported=[1])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert (copy.message, copy.hint, copy.issues) == ("it broke", "mend it", error.issues)
    assert (copy.found, copy.supported) == (2, [1])


def test_the_message_comes_first_then_every_issue_then_the_hint_each_hint_on_a_line_of_its_own() -> None:
    error = AotcError("it broke", hint="mend it", issues=(Issue("wrong", "x", hint="turn x"), Issue("odd")))
    assert str(error).splitlines() == [
        "it broke",
        "  - x: wrong",
        "    hint: turn x",
        "  - odd",
        "  hint: mend it",
    ]


def test_a_hint_that_issues_in_a_row_share_stands_once_below_them() -> None:
    one, two, other = Issue("one", hint="h"), Issue("two", hint="h"), Issue("three", hint="k")
    assert str(AotcError("m", hint="k", issues=(one, two, other))).splitlines() == [
        "m",
        "  - one",
        "  - two",
        "    hint: h",
        "  - three",
        "  hint: k",
    ]


def test_a_message_without_hints_is_one_line() -> None:
    assert str(AotcError("it broke")) == "it broke"


def test_fields_are_attributes_and_others_are_attribute_errors() -> None:
    error = AotcError("it broke", unit="a").with_fields(log="b")
    assert (error.unit, error.log) == ("a", "b")
    with pytest.raises(AttributeError, match="nothing"):
        _ = error.nothing


def test_more_than_five_issues_that_differ_only_in_their_place_are_shown_as_one() -> None:
    issues = tuple(Issue("is float16", where=name) for name in "abcdef")
    error = BindError("m", issues=(*issues, Issue("other", where="g")))
    assert str(error).splitlines() == ["m", "  - a, b, c and 3 more: is float16", "  - g: other"]
    assert error.issues[:6] == issues
    assert str(BindError("m", issues=issues[1:])).count("is float16") == 5
    assert str(ManifestError("m", issues=issues)).count("is float16") == 6, "each in its line of the file"
