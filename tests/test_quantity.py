"""Numbers with units: read, refused, shown."""

import pytest

from comm.analytic.quantity import Quantity, QuantityError, in_unit, parse, plain, show


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("141 GB", 141 * 10**9, (1, 0)),
        ("141GiB", 141 * 2**30, (1, 0)),
        ("50 GB/s", 50 * 10**9, (1, -1)),
        ("400 Gbit/s", 50 * 10**9, (1, -1)),
        ("4 bits", 0.5, (1, 0)),
        ("27.6 kB/token", 27600, (1, 0)),
        ("500 us", 500e-6, (0, 1)),
        ("67 tokens/s", 67, (0, -1)),
        ("5 %", 0.05, (0, 0)),
        ("1,048,576 tokens", 2**20, (0, 0)),
        ("2.8e12 parameters", 2.8e12, (0, 0)),
        ("-3", -3, (0, 0)),
        (16, 16, (0, 0)),
    ],
)
def test_numbers_with_units(text, value, dimension):
    read = parse(text)
    assert read.value == pytest.approx(value, rel=1e-15) and read.dimension == dimension


def test_a_noun_is_remembered_in_the_plural():
    assert parse("1 token").noun == parse("2 tokens").noun == "tokens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("141 GBB", r"^GBB: no such unit \(did you mean GB\?\)"),
        ("141 gib", r"did you mean GiB\?"),
        ("5 tokns", r"did you mean tokens\?"),
        ("GB", "is no number with a unit"),
        ("", "is no number with a unit"),
        ("1 GB/s/s", "no such unit"),
        (True, "is no number"),
        ([1], "is no number"),
        (None, "is no number"),
    ],
)
def test_what_is_no_quantity_is_refused_in_one_line(text, message):
    with pytest.raises(QuantityError, match=message) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("quantity", "unit", "shown"),
    [
        (Quantity(1.561e12, 1), "TB", "1.561 TB"),
        (Quantity(1.561e12, 1), "", "1.561 TB"),
        (Quantity(27648, 1), "", "27.65 kB"),
        (Quantity(184, noun="rounds"), "", "184 rounds"),
        (Quantity(0.742), "%", "74.20 %"),
        (Quantity(7.4e-6, 0, 1), "", "7.400 us"),
        (Quantity(50e9, 1, -1), "", "50 GB/s"),
        (Quantity(0, 1), "", "0 B"),
        (Quantity(-0.282), "", "-0.2820"),
    ],
)
def test_figures_are_shown(quantity, unit, shown):
    assert show(quantity, unit) == shown


def test_another_kind_of_unit_is_refused():
    with pytest.raises(QuantityError, match="^bytes where s is expected"):
        in_unit(parse("3 GB"), "s")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (12345678, "12,345,678"), (0.00001234, "1.234e-05"), (3.14159, "3.142")],
)
def test_plain_numbers(value, shown):
    assert plain(value) == shown
