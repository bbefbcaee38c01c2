"""The registry of formulas: documented, with steps that end in the result, each checked by hand."""

from math import comb, isclose, sqrt

import pytest
from claim_samples import all_tables

from comm.analytic.formulas import FORMULAS
from comm.analytic.formulas.base import TEXT
from comm.analytic.quantity import parse, read_unit

K3 = {"num_experts": 896, "top_k": 16}
V3 = {"num_experts": 256, "top_k": 8}
CACHE = {"values": 576, "full_layers": 24, "value_size": 2}
STATE = {
    "linear_layers": 69,
    "linear_heads": 96,
    "linear_head_dim": 128,
    "conv_size": 4,
    "state_size": 4,
}


def stored(**other):
    """Arguments of the weights' formulas, from the model's own file."""
    k3 = all_tables()["kimi_k3"]
    found = {}
    for name, parameter in FORMULAS["checkpoint_bytes"].parameters.items():
        value = k3
        for part in parameter.field.split("."):
            value = value[part]
        found[name] = value
    return found | other


# formula, arguments, result worked out apart (traffic_model.md, facts.md), half a unit
BY_HAND = [
    ("distinct_ranks", {"ranks": 16, **K3}, 10.3541, 5e-5),
    ("distinct_ranks", {"ranks": 72, **K3}, 14.5442, 5e-5),
    ("distinct_ranks", {"ranks": 8, **V3}, 5.2947, 5e-5),
    ("distinct_remote_ranks", {"ranks": 64, **K3}, 14.1375, 5e-5),
    ("distinct_ranks_deviation", {"ranks": 16, **K3}, 1.250, 5e-4),
    ("received_rows", {"ranks": 16, "tokens": 4096, **V3}, 26719, 0.5),
    ("received_rows_deviation", {"ranks": 16, "tokens": 4096, **V3}, 126, 0.5),
    ("experts_touched", {"tokens": 64, **K3}, 613, 0.5),
    ("experts_touched", {"tokens": 1, **K3}, 16, 1e-9),
    ("nodes_with_limit", {"nodes": 8, "limit": 4, **V3}, 3.983, 5e-4),
    ("nodes_with_limit_by_two", {"nodes": 8, "limit": 4, **V3}, 3.953, 0.01),
    ("row_payload", {"wire": "mxfp8", "width": 3584}, 3696, 0),
    ("row_payload", {"wire": "nvfp4", "width": 7168}, 4032, 0),
    ("row_metadata", {"dispatcher": "rank_dedup", "top_k": 16}, 128, 0),
    ("row_metadata", {"dispatcher": "all_to_all", "top_k": 16}, 0, 0),
    ("rounds_a_layer", {"training": 0, "sharded": 1}, 2, 0),
    ("rounds_a_layer", {"training": 1, "sharded": 1}, 4, 0),
    ("rounds_a_layer", {"training": 0, "sharded": 2}, 4, 0),
    ("cache_of_a_token", CACHE, 27648, 0),
    ("state_of_a_sequence", STATE, 449.4e6, 0.05e6),
    ("state_of_a_sequence", STATE | {"state_size": 2}, 232.3e6, 0.05e6),
    ("sequence_bytes", {"tokens": 1000, "slots": 0, **CACHE, **STATE}, 27648e3, 0),
    ("break_even", CACHE | STATE, 5653, 0.6),
    ("clos_ports", {"accelerators": 1024, "nic": 50e9, "port": 100e9, "tiers": 2, "radix": 64},
     1536, 0),
    ("clos_ports", {"accelerators": 1024, "nic": 100e9, "port": 100e9, "tiers": 2, "radix": 64},
     3072, 0),
]  # fmt: skip
IN_A_RUN = {
    "dispatcher": "rank_dedup",
    "ranks": 8,
    "ranks_per_node": 4,
    "tokens": 10,
    "layers": 2,
    "width": 3584,
    "wire_dispatch": "bf16",
    "wire_combine": "mxfp8",
    **K3,
}


def result(name, arguments):
    return FORMULAS[name].steps(arguments)[-1].value


@pytest.mark.parametrize(("name", "arguments", "figure", "half"), BY_HAND)
def test_results_by_hand(name, arguments, figure, half):
    assert abs(result(name, arguments) - figure) <= half + 1e-12 * figure


def test_weights_by_hand():
    assert result("checkpoint_bytes", stored()) == pytest.approx(1.561e12, rel=4e-4)
    for tokens, read in ((1, 138e9), (8, 306e9), (32, 746e9), (128, 1.41e12)):
        found = result("weights_read", stored(tokens=tokens, top_k=16))
        assert found == pytest.approx(read, rel=4e-3)


def test_bytes_of_a_run_by_hand():
    """Rows that leave their rank: 6.1894 a token, 10 tokens on each of 8 ranks, 2 layers."""
    rows = 6.1894 * 10 * 8 * 2
    hidden = result("bytes_of_kind", {"kind": "hidden", "scope": "remote", **IN_A_RUN})
    assert hidden == pytest.approx(rows * (7168 + 3584), rel=1e-4)
    scales = result("bytes_of_kind", {"kind": "scales", "scope": "remote", **IN_A_RUN})
    assert scales == pytest.approx(rows * 112, rel=1e-4)
    inside = result("bytes_of_kind", {"kind": "ids", "scope": "scale_up", **IN_A_RUN})
    outside = result("bytes_of_kind", {"kind": "ids", "scope": "scale_out", **IN_A_RUN})
    assert inside + outside == pytest.approx(rows * 64, rel=1e-4)
    assert result("bytes_of_kind", {"kind": "expert_weights", "scope": "remote", **IN_A_RUN}) == 0
    with pytest.raises(ValueError, match="kind=bytes: choose one of hidden"):
        FORMULAS["bytes_of_kind"].steps({"kind": "bytes", "scope": "remote", **IN_A_RUN})


def test_the_law_of_two_ranks_by_counting():
    """E = 4, K = 2, two ranks: both experts on one rank in 2 of 6 cases."""
    of_two = {"ranks": 2, "num_experts": 4, "top_k": 2}
    mean = 2 - 2 / comb(4, 2)
    assert isclose(result("distinct_ranks", of_two), mean)
    assert isclose(result("distinct_ranks_deviation", of_two), sqrt((1 / 3) * (2 / 3)))


@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_is_documented(name):
    formula = FORMULAS[name]
    assert len(formula.text) > 40 and formula.text.endswith(".")
    read_unit(formula.gives)
    for parameter in formula.parameters.values():
        assert len(parameter.text) > 5
        assert parameter.unit == TEXT or read_unit(parameter.unit)
        value = all_tables()["kimi_k3"]
        for part in parameter.field.split(".") if parameter.field else ():
            value = value[part]  # a field that does not exist is a KeyError


@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_is_tested_here(name):
    tested = {name for name, *_ in BY_HAND} | {"checkpoint_bytes", "weights_read", "bytes_of_kind"}
    assert name in tested


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("8 tokens", "ranks=8 tokens: tokens where ranks must be given"),
        ("8 GB", "ranks=8 GB: bytes where ranks must be given"),
        (8.5, "ranks=8.5: must be a whole number of ranks"),
        (-1, "ranks=-1: must be a whole number of ranks"),
    ],
)
def test_a_parameter_refuses_another_kind(value, message):
    parameter = FORMULAS["distinct_ranks"].parameters["ranks"]
    with pytest.raises(ValueError, match=f"^{message}"):
        parameter.accept("ranks", parse(value))


def test_a_parameter_refuses_a_word_where_a_number_belongs():
    formula = FORMULAS["row_payload"]
    with pytest.raises(ValueError, match="width=wide: must be a number of values"):
        formula.parameters["width"].accept("width", "wide")
    with pytest.raises(ValueError, match="wire=3: must be a word"):
        formula.parameters["wire"].accept("wire", parse(3))


def test_numbers_without_a_result_are_refused():
    with pytest.raises(ValueError, match="formula=checkpoint_bytes: has no value"):
        FORMULAS["checkpoint_bytes"].steps(stored(expert_block=0))
    with pytest.raises(ValueError, match="ranks=0: must be >= 1"):
        FORMULAS["distinct_ranks"].steps({"ranks": 0, **K3})
