"""Expressions over dims: what is in the grammar gives Python's own value, and nothing else is accepted."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotc.expressions import MAX_LENGTH, Expression

DIMS = ("batch", "seq", "k")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("seq", 7),
        ("2*seq", 14),
        ("seq+1", 8),
        ("-seq + 10", 3),
        ("(seq - 1) // 2", 3),
        ("seq % 4", 3),
        ("-seq // 2", -4),
        ("-seq % 4", 1),
        ("min(seq, batch, 5)", 2),
        ("max(seq, batch)", 7),
        ("abs(batch - seq)", 5),
        ("seq == 7", 1),
        ("seq != 7", 0),
        ("1 < batch <= seq", 1),
        ("1 < batch > seq", 0),
        ("not seq % 7", 1),
        ("seq % 8 == 0 or batch == 2", 1),
        ("seq % 8 == 0 and batch == 2", 0),
        ("  seq  ", 7),
        ("3", 3),
    ],
)
def test_a_text_in_the_grammar_has_the_value_that_python_gives_it(text: str, value: int) -> None:
    result = Expression(text).evaluate({"batch": 2, "seq": 7})
    assert (result, type(result)) == (value, int)


def test_chained_comparisons_evaluate_each_term_once() -> None:
    """As Python does. A chain within a chain was evaluated twice: forty, one in another, took for ever."""

    class Sizes(dict[str, int]):
        read = 0

        def __getitem__(self, name: str) -> int:
            self.read += 1
            return super().__getitem__(name)

    text = "seq"
    for _ in range(20):
        text = f"batch < ({text}) < seq"
    sizes = Sizes(batch=-1, seq=7)
    assert Expression(text).evaluate(sizes) == eval(text, {}, dict(sizes)) == 1
    assert sizes.read == text.count("batch") + text.count("seq")
    assert Expression("1 < batch < seq // 0").evaluate(sizes) == 0, (
        "what comes after a term that fails is not evaluated"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "seq.real",
        "seq.__class__",
        "open('x')",
        "seq()",
        "__import__('os')",
        "(lambda: 1)()",
        "[1, 2]",
        "{1: 2}",
        "(1, 2)",
        "seq[0]",
        "seq if seq else 1",
        "[x for x in y]",
        "(x := 1)",
        "f'{seq}'",
        "'seq'",
        "1.5",
        "1j",
        "True",
        "None",
        "...",
        "seq / 2",
        "seq ** 2",
        "seq << 2",
        "seq & 1",
        "~seq",
        "+seq",
        "seq in seq",
        "seq is seq",
        "min",
        "min(seq)",
        "abs(seq, 1)",
        "min(*seq)",
        "min(seq, 1, key=abs)",
        "sum(seq, 1)",
        "min.real",
        "await seq",
        "(yield)",
        "seq; seq",
        "seq = 1",
        "seq +",
        "seq\nseq",
        "a\0b",
        "import os",
    ],
)
def test_everything_else_is_refused_with_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="expression over dims"):
        Expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "1" * (MAX_LENGTH + 1),
        "+".join(["seq"] * 400),
        "(" * 500 + "1" + ")" * 490,
        "-" * 900 + "1",
        "not " * 240 + "1",
        "abs(" * 150 + "1" + ")" * 150,
        "1" + " + (1" * 60 + ")" * 60,
    ],
)
def test_long_and_deep_texts_are_refused_and_exhaust_nothing(text: str) -> None:
    with pytest.raises(ValueError):
        Expression(text)


def test_names_are_the_dims_that_are_read_and_no_function() -> None:
    assert Expression("min(seq, 2*batch) + 1").names == {"seq", "batch"}


def test_a_missing_dim_is_a_key_error_and_a_division_by_zero_stays_one() -> None:
    with pytest.raises(KeyError):
        Expression("seq + 1").evaluate({})
    with pytest.raises(ZeroDivisionError):
        Expression("1 // seq").evaluate({"seq": 0})


def test_and_or_stop_as_soon_as_they_are_decided() -> None:
    assert Expression("seq == 0 or 8 % seq == 0").evaluate({"seq": 0}) == 1
    assert Expression("seq != 0 and 8 % seq == 0").evaluate({"seq": 0}) == 0


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_a_value_error(text: str) -> None:
    try:
        expression = Expression(text)
    except ValueError:
        return
    with contextlib.suppress(ZeroDivisionError):
        assert isinstance(expression.evaluate(dict.fromkeys(expression.names, 3)), int)


atoms = st.sampled_from(DIMS) | st.integers(0, 20).map(str)
arithmetic = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        inner.map(lambda text: f"abs({text})"),
        inner.map(lambda text: f"(-{text})"),
    ),
    max_leaves=8,
)
comparison = st.tuples(arithmetic, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), arithmetic).map(" ".join)
condition = st.recursive(
    comparison,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})"),
        inner.map(lambda text: f"not ({text})"),
    ),
    max_leaves=4,
)


@given(arithmetic | condition, st.fixed_dictionaries({name: st.integers(0, 9) for name in DIMS}))
def test_random_expressions_agree_with_python(text: str, sizes: dict[str, int]) -> None:
    try:
        expected: int | type = int(eval(text, {}, dict(sizes)))
    except ZeroDivisionError:
        expected = ZeroDivisionError
    expression = Expression(text)
    if isinstance(expected, int):
        assert expression.evaluate(sizes) == expected
    else:
        with pytest.raises(ZeroDivisionError):
            expression.evaluate(sizes)
