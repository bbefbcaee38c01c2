"""Arithmetic of a claim's file: names, numbers, + - * / // % **, comparison-free, and named calls.

    1 - full_layers / layers
    ceil(checkpoint / memory)
    distinct_ranks(ranks=64) * tokens * row

The text is parsed with `ast` and walked here, never handed to the interpreter: a name is looked up
in what the caller gives, a call in what it offers, and everything else is refused. Units go along.
"""

from __future__ import annotations

import ast
import difflib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from comm.analytic.quantity import Quantity, dimension_words, show

Value = Quantity | str
Lookup = Callable[[str], Value]
Call = Callable[[str, dict[str, Value]], Quantity]
MAX_LENGTH = 1000
MAX_POWER, MAX_BITS, MAX_DEPTH = 64, 4096, 40


class ExpressionError(ValueError):
    """What an expression says is no arithmetic, or not of these names; one line."""


@dataclass(frozen=True)
class Expression:
    """A text that has been read and found to be arithmetic.

    >>> two = Expression.read("2 * (3 + 4)")
    >>> two.evaluate(lookup=None, call=None).value
    14
    """

    text: str
    tree: ast.expr

    @classmethod
    def read(cls, text: object) -> Expression:
        words = " ".join(str(text).split())
        if len(words) > MAX_LENGTH:
            raise ExpressionError(f"an expression of {len(words)} characters; at most {MAX_LENGTH}")
        try:
            tree = ast.parse(words, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{words!r}: is no arithmetic") from error
        _check(tree, words)
        return cls(words, tree)

    @property
    def names(self) -> list[str]:
        """Names that must be known, dotted ones whole, in the order of the text."""
        return list(dict.fromkeys(_names(self.tree)))

    @property
    def formulas(self) -> list[str]:
        """Names of the functions that are not built in."""
        calls = (node for node in ast.walk(self.tree) if _is_foreign_call(node))
        return list(dict.fromkeys(call.func.id for call in calls))  # type: ignore[attr-defined]

    def evaluate(self, lookup: Lookup, call: Call) -> Quantity:
        """lookup: the value of a name; call: the result of a function that is not built in."""
        try:
            result = _evaluate(self.tree, lookup, call)
        except OverflowError as error:
            raise ExpressionError(f"{self.text}: a number too large to be worked out") from error
        if isinstance(result, str):
            raise ExpressionError(f"{self.text}: is a text, not a number")
        if not abs(result.value) <= sys.float_info.max:  # nan, too
            raise ExpressionError(f"{self.text}: comes to no finite number")
        return result

    def with_numbers(self, lookup: Lookup, call: Call) -> str:
        """The same arithmetic with a figure in the place of each name and call."""

        class Fill(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> ast.AST:
                if isinstance(node, ast.Name | ast.Attribute) or _is_foreign_call(node):
                    value = _evaluate(node, lookup, call)
                    text = value if isinstance(value, str) else show(value, _own_unit(value))
                    return ast.Name(text)
                if isinstance(node, ast.Call):
                    args = [self.visit(argument) for argument in node.args]
                    return ast.Call(node.func, args, [])
                return super().generic_visit(node)

            visit_Name = visit_Attribute = visit_Call = generic_visit

        fresh = ast.parse(self.text, mode="eval").body
        return ast.unparse(Fill().visit(fresh))


def _own_unit(value: Quantity) -> str:
    """As written, but for many bytes."""
    many = value.unit == "B" and abs(value.value) >= 1e6
    return "" if many or value.unit == "x" else value.unit


def dotted(node: ast.AST) -> str | None:
    """a.b.c, or None where it is no such name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
ROUNDING = {"ceil": math.ceil, "floor": math.floor, "round": round}
LOGARITHMS = {"log2": math.log2, "sqrt": math.sqrt}
CHOOSING = {"min": min, "max": max}
BUILT_IN = (*ROUNDING, *LOGARITHMS, *CHOOSING, "abs")


def _is_foreign_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") not in BUILT_IN


def _check(node: ast.AST, text: str, depth: int = 0) -> None:
    """Refuse everything that is not arithmetic, before anything is worked out."""
    if depth > MAX_DEPTH:
        raise ExpressionError(f"{text[:40]!r}...: is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Name | ast.Attribute):
        name = dotted(node)
        if name is None or any(part.startswith("_") for part in name.split(".")):
            raise ExpressionError(f"{text!r}: {ast.unparse(node)} cannot be a name")
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool) or not isinstance(node.value, int | float | str):
            raise ExpressionError(f"{text!r}: {node.value!r} is no number")
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        _check(node.left, text, depth + 1)
        _check(node.right, text, depth + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        _check(node.operand, text, depth + 1)
    elif isinstance(node, ast.Call):
        _check_call(node, text, depth)
    else:
        raise ExpressionError(f"{text!r}: {ast.unparse(node)} is no arithmetic")


def _check_call(node: ast.Call, text: str, depth: int) -> None:
    if not isinstance(node.func, ast.Name) or any(word.arg is None for word in node.keywords):
        raise ExpressionError(f"{text!r}: {ast.unparse(node)} is no call of a formula")
    built_in = node.func.id in BUILT_IN
    if built_in and (node.keywords or not node.args):
        raise ExpressionError(f"{text!r}: {node.func.id} takes numbers without names")
    if not built_in and node.args:
        raise ExpressionError(
            f"{text!r}: write {node.func.id}(name=value), a formula's parameters have names"
        )
    for argument in (*node.args, *(word.value for word in node.keywords)):
        _check(argument, text, depth + 1)


def _names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        yield dotted(node) or ""
    elif isinstance(node, ast.Call):
        for argument in (*node.args, *(word.value for word in node.keywords)):
            yield from _names(argument)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _evaluate(node: ast.AST, lookup: Lookup, call: Call) -> Value:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else Quantity(node.value)
    if isinstance(node, ast.Name | ast.Attribute):
        return lookup(dotted(node) or "")
    if isinstance(node, ast.Call):
        name = node.func.id  # type: ignore[attr-defined]
        if name in BUILT_IN:
            return _built_in(name, [_number(a, lookup, call) for a in node.args])
        return call(name, {str(w.arg): _evaluate(w.value, lookup, call) for w in node.keywords})
    if isinstance(node, ast.UnaryOp):
        operand = _number(node.operand, lookup, call)
        negative = isinstance(node.op, ast.USub)
        return replace(operand, value=-operand.value) if negative else operand
    assert isinstance(node, ast.BinOp)
    return combine(
        BINARY[type(node.op)],
        _number(node.left, lookup, call),
        _number(node.right, lookup, call),
    )


def _number(node: ast.AST, lookup: Lookup, call: Call) -> Quantity:
    value = _evaluate(node, lookup, call)
    if isinstance(value, str):
        raise ExpressionError(f"{ast.unparse(node)}={value}: is a text where a number is expected")
    return value


def combine(sign: str, left: Quantity, right: Quantity) -> Quantity:
    """One operation, units included; raises ExpressionError in one line."""
    a, b = left.value, right.value
    if sign in ("/", "//", "%") and b == 0:
        raise ExpressionError("a division by zero")
    if sign in ("+", "-", "%"):
        _alike(sign, [left, right])
        value = {"+": lambda: a + b, "-": lambda: a - b, "%": lambda: a % b}[sign]()
        return Quantity(value, left.bytes, left.seconds, _shared(left, right))
    if sign == "*":
        noun = left.noun if right.is_plain and not right.noun else ""
        noun = noun or (right.noun if left.is_plain and not left.noun else "")
        return Quantity(a * b, left.bytes + right.bytes, left.seconds + right.seconds, noun)
    if sign in ("/", "//"):
        value = a / b if sign == "/" else a // b
        return Quantity(value, left.bytes - right.bytes, left.seconds - right.seconds)
    return _power(left, right)


def _power(left: Quantity, right: Quantity) -> Quantity:
    if not right.is_plain or abs(right.value) > MAX_POWER:
        raise ExpressionError(f"** needs a plain number of at most {MAX_POWER} after it")
    if not left.is_plain and not float(right.value).is_integer():
        raise ExpressionError("** of bytes or seconds needs a whole number after it")
    if isinstance(left.value, int) and left.value.bit_length() * abs(right.value) > MAX_BITS:
        raise ExpressionError("a power too large to be worked out")
    times = int(right.value) if not left.is_plain else 0
    try:
        value = left.value**right.value
    except (OverflowError, ZeroDivisionError) as error:
        raise ExpressionError("a power too large to be worked out") from error
    if isinstance(value, complex):
        raise ExpressionError("a root of a negative number")
    return Quantity(value, left.bytes * times, left.seconds * times)


def _built_in(name: str, numbers: Sequence[Quantity]) -> Quantity:
    if name in CHOOSING:
        _alike(name, numbers)
        return CHOOSING[name](numbers, key=lambda one: one.value)
    (number,) = numbers if len(numbers) == 1 else (None,)
    if number is None:
        raise ExpressionError(f"{name} takes one number")
    if name == "abs":
        return replace(number, value=abs(number.value))
    if not number.is_plain:
        raise ExpressionError(
            f"{name} of {dimension_words(number.dimension)}: it takes a plain number"
        )
    try:
        work = (ROUNDING | LOGARITHMS)[name]
        return Quantity(work(number.value), noun=number.noun if name in ROUNDING else "")
    except (ValueError, OverflowError) as error:
        raise ExpressionError(f"{name} of {number.value}: has no value") from error


def _alike(sign: str, numbers: Sequence[Quantity]) -> None:
    """Bytes are not added to seconds. A bare 0 or 1 is no byte either."""
    for other in numbers[1:]:
        if other.dimension != numbers[0].dimension:
            raise ExpressionError(
                f"{dimension_words(numbers[0].dimension)} {sign}"
                f" {dimension_words(other.dimension)}: they are of different kinds"
            )


def _shared(left: Quantity, right: Quantity) -> str:
    return left.noun if left.noun == right.noun else left.noun or right.noun


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)', or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""
