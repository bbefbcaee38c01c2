"""Arithmetic of a claim's file: units go along, and nothing but arithmetic is read."""

import pytest

from comm.analytic.expressions import Expression, ExpressionError
from comm.analytic.quantity import QuantityError, parse, show

NAMES = {"memory": "141 GB", "weights": "1.5 TB", "time": "500 us", "n": 7, "model.top_k": 16}


def lookup(name):
    return parse(NAMES[name]) if name != "wire" else "bf16"


def call(name, arguments):
    assert (name, set(arguments)) == ("twice", {"of"})
    return parse(2 * arguments["of"].value)


def worked_out(text):
    return Expression.read(text).evaluate(lookup, call)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1 + 2 * 3", "7"),
        ("-(2 - 5) ** 3", "27"),
        ("7 // 2 + 7 % 2", "4"),
        ("ceil(weights / memory)", "11"),
        ("n * memory", "987 GB"),
        ("memory / time", "282 TB/s"),
        ("weights - memory", "1.359 TB"),
        ("min(weights, memory)", "141 GB"),
        ("max(n, 3) + abs(-1)", "8"),
        ("twice(of=n) + model.top_k", "30"),
        ("sqrt(16) + log2(8) + floor(2.9) + round(2.6)", "12"),
    ],
)
def test_results(text, shown):
    assert show(worked_out(text)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory + time", r"bytes \+ seconds: they are of different kinds"),
        ("memory + 1", r"bytes \+ a plain number"),
        ("max(memory, n)", "different kinds"),
        ("ceil(memory)", "ceil of bytes"),
        ("n ** memory", "needs a plain number"),
        ("2 ** 65", "at most 64"),
        ("9.9e99 ** 64", "too large"),
        ("((9 ** 64) ** 64) ** 64", "too large"),
        ("n / (3 - 3)", "division by zero"),
        ("sqrt(-1)", "has no value"),
        ("wire + 1", "is a text"),
        ("wire", "is a text"),
        ("(0 - 8) ** 0.5", "negative"),
    ],
)
def test_sums_that_make_no_sense(text, message):
    with pytest.raises((ExpressionError, QuantityError), match=message):
        worked_out(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "model.__class__",
        "_hidden",
        "(lambda: 1)()",
        "[1, 2][0]",
        "n if n else 0",
        "n and 1",
        "n == 7",
        "f'{n}'",
        "n := 3",
        "twice(3)",
        "twice(**n)",
        "ceil(x=3)",
        "ceil()",
        "model.f(3)",
        "True + 1",
        "1 @ 2",
        "1 << 2",
        "1; 2",
        "",
        "(" * 500 + ")" * 500,
        "1 + " * 400 + "1",
        "1 + " * 100 + "1",
        "-" * 900 + "1",
    ],
)
def test_what_is_no_arithmetic_is_never_worked_out(text):
    with pytest.raises(ExpressionError) as refused:
        Expression.read(text)
    assert "\n" not in str(refused.value)


def test_the_same_arithmetic_with_numbers():
    text = "ceil(weights / memory) + twice(of=n)"
    assert Expression.read(text).with_numbers(lookup, call) == "ceil(1.500 TB / 141 GB) + 14"


def test_names_and_formulas():
    expression = Expression.read("twice(of=n) * model.top_k + ceil(n)")
    assert expression.names == ["n", "model.top_k"] or set(expression.names) == {"n", "model.top_k"}
    assert expression.formulas == ["twice"]
