"""Every row of the list of claims is there, with its verdict and the figures that were found.

The figures are typed here from that list, each with the precision in which it is printed there.
Nothing of the program takes part in them.
"""

import re
from math import isclose

import pytest
from claim_samples import all_claims, given, outcome

from comm.claims.judge import evaluate

# claim -> (setting, figure in the base unit, half a unit of its last digit)
FOUND = {
    "cache_saved_75": [
        ("state left out", 0.742, 0.0005),
        ("1M tokens", 0.738, 0.0005),
        ("128K", 0.71, 0.005),
        ("32K", 0.61, 0.005),
        ("8K", 0.23, 0.005),
        ("4K", -0.28, 0.005),
    ],
    "kda_bandwidth_tenfold": [
        ("against MLA in all layers", 3.875, 0.0005),
        ("with FP8 as well", 7.75, 0.005),
        ("against plain multi-head", 207, 0.5),
    ],
    "kv_10_MB_before": [
        ("plain multi-head", 5.71e6, 0.005e6),
        ("MLA in all layers", 107e3, 0.5e3),
    ],
    "kv_1_MB_after": [("", 27.6e3, 0.05e3)],
    "kda_mla_3_to_1": [("", 2.875, 0)],
    "weights_1400_GB": [("", 1.39e12, 0.005e12)],
    "weights_1500_GB": [("", 1.561e12, 0.0005e12)],
    "weights_bf16": [("", 5.56e12, 0.005e12)],
    "pass_reads_all_weights": [
        ("batch 1", 138e9, 0.5e9),
        ("batch 8", 306e9, 0.5e9),
        ("batch 32", 746e9, 0.5e9),
        ("batch 128", 1.41e12, 0.005e12),
        ("batch 512", 1.56e12, 0.005e12),
    ],
    "h100_18": [("GB as sold", 20, 0), ("as the driver reports", 19, 0)],
    "h200_11": [
        ("1.5 TB, GB as sold", 11, 0),
        ("the checkpoint, GB as sold", 12, 0),
        ("the checkpoint, as reported", 11, 0),
    ],
    "h200_8_memory": [("", 1.13e12, 0.005e12)],
    "b200_9": [("1.5 TB", 9, 0), ("the checkpoint", 9, 0)],
    "b200_8_memory": [("", 1.44e12, 0)],
    "b300_6": [("1.5 TB", 6, 0), ("the checkpoint", 6, 0)],
    "b300_8_memory": [("", 2.304e12, 0)],
    "h200_64": [("", 9.02e12, 0.005e12)],
    "b200_64": [("", 11.52e12, 0)],
    "b300_64": [("", 18.43e12, 0.005e12)],
    "nvl72_memory": [("", 13.39e12, 0.005e12)],
    "nvl72_not_filled": [("", 0.117, 0.0005)],
    "one_moe_layer": [("", 92, 0)],
    "rounds_240": [("expert parallelism", 184, 0), ("tensor parallelism only", 0, 0)],
    "two_rounds_a_layer": [("", 2, 0)],
    "operations_120": [("dispatch and combine", 184, 0), ("dispatch alone", 92, 0)],
    "broadcast_8_to_16_GB": [
        ("one copy, hidden", 7.5e9, 0.05e9),
        ("one copy, latent", 3.8e9, 0.05e9),
        ("sent in BF16", 60.1e9, 0.05e9),
        ("sent in MXFP8", 31.0e9, 0.05e9),
    ],
    "moved_2_to_4_TB": [
        ("prefill, BF16", 11.1e12, 0.05e12),
        ("prefill, MXFP8 and BF16", 8.4e12, 0.05e12),
        ("prefill, EP64 deduplicated", 7.4e12, 0.05e12),
        ("decode step of 128, BF16", 2.7e9, 0.05e9),
        ("decode step of 128, MXFP8", 2.0e9, 0.05e9),
    ],
    "dispatch_broadcasts": [("EP 16", 10.35 / 16, 0.005 / 16)],
    "kv_share_1": [
        ("8K in, 1K out, prefill apart", 0.005, 0.0005),
        ("400K prefix fetched, 4K new", 0.17, 0.005),
        ("nothing transferred", 0, 0),
    ],
    "need_rises_by_shares": [("", -0.09, 0)],
    "need_rises_a_layer": [("no deduplication", 1, 0), ("EP 8, deduplicated", 0.67, 0.005)],
    "sixteen_of_896": [
        ("a layer, no deduplication", 1, 0),
        ("a layer, EP 8 deduplicated", 1 - 0.33, 0.005),
        ("a layer, EP 64 deduplicated", 1 - 0.06, 0.005),
        ("a pass, no deduplication", 1.53, 0.005),
        ("a pass, EP 8 deduplicated", 1.03, 0.005),
    ],
    "accelerators_200": [("EP 64, the largest published", 64, 0), ("EP 8", 8, 0)],
    "nvl72_tray": [("", 72, 0)],
    "ports_512": [
        ("400G cards, ports to cards", 512, 0),
        ("400G cards, two tiers", 1536, 0),
        ("800G cards, two tiers", 3072, 0),
    ],
    "no_weights_on_the_network": [("rank_dedup", 0, 0), ("all_to_all", 0, 0)],
    "headline_is_an_estimate": [
        ("EP 8", 5.17, 0.005),
        ("EP 16", 3.30, 0.005),
        ("EP 64", 2.26, 0.005),
    ],
    "hidden_width_is_sent": [("", 3584, 0)],
    "whole_bank_resident": [("", 1, 0.001)],
    "offload_follows": [("64 H200", 1.56 / 9.0, 0.001)],
    "insights_pair_us": [("7K = 7000", 120.96e-6, 1e-12), ("7K = 7168", 123.86e-6, 0.005e-6)],
    "insights_token_ms": [("7K = 7000", 14.76e-3, 0.005e-3)],
    "insights_67_tokens": [("7K = 7000", 67, 0)],
    "insights_nvl72_us": [("7K = 7000", 6.72e-6, 1e-12)],
    "insights_nvl72_ms": [("7K = 7000", 0.82e-3, 0.005e-3)],
    "experts_a_node_3_2": [("", 3.2, 0)],
    "experts_13": [("", 12.8, 0)],
    "node_limit_halves": [
        ("groups by their two best", 1.34, 0.005),
        ("groups by their best", 1.33, 0.005),
    ],
    "mori_rdma_tokens": [("", 8163.4, 0.05)],
    "mori_received": [("", 26719, 0.5)],
    "tensorrt_llm_ep8": [("", 753.31e9, 0.005e9)],
    "tensorrt_llm_ep16": [("", 684.19e9, 0.005e9)],
    "tensorrt_llm_ep32": [("", 628.53e9, 0.005e9)],
    "tensorrt_llm_ep64": [("", 588.38e9, 0.005e9)],
    "mxfp8_1_94": [("", 1.939, 0.0005)],
    "nvfp4_3_56": [("", 3.556, 0.0005)],
    "eplb_9_experts": [("", 9, 0)],
    "eplb_2_experts": [("", 2, 0)],
    "fp8_halves_dispatch": [("", 0.5156, 0.00005)],
    "fp8_halves_volume": [("", 0.7578, 0.00005)],
    "fp4_expert_24_MiB": [("", 23.6 * 2**20, 0.05 * 2**20)],
    "fp4_experts_348_GiB": [("", 348 * 2**30, 0)],
}
# (claim, setting, step) -> its figure: what the list says beside the verdict
STEPS = {
    ("cache_saved_75", "1M tokens", "break_even"): (5653, 0.5),
    ("vendor_gb_decimal", "", "gb200"): (185.0 * 2**30 / 186e9, 0.0005),
    ("vendor_gb_decimal", "", "b300"): (275_040 * 2**20 / 288e9, 1e-9),
    ("kv_share_1", "8K in, 1K out, prefill apart", "cache"): (0.68e9, 0.005e9),
    ("kv_share_1", "8K in, 1K out, prefill apart", "all_to_all"): (130e9, 0.5e9),
    ("bandwidth_binds", "NVLink, nominal", "dispatch"): (7.4e-6, 0.05e-6),
    ("bandwidth_binds", "NVLink, nominal", "combine"): (14.4e-6, 0.05e-6),
    ("bandwidth_binds", "NVLink, as measured at EP64", "dispatch"): (11.4e-6, 0.05e-6),
    ("bandwidth_binds", "NVLink, as measured at EP64", "combine"): (20.6e-6, 0.051e-6),
    ("node_limit_halves", "groups by their two best", "free"): (5.295, 0.0005),
    ("node_limit_halves", "groups by their two best", "best_two"): (3.95, 0.01),
    ("node_limit_halves", "groups by their best", "best"): (3.983, 0.0005),
    ("uccl_dispatch", "", "sent"): (160.2e6, 0.05e6),
    ("uccl_combine", "", "sent"): (310.6e6, 0.05e6),
    ("mori_rdma_tokens", "", "deviation"): (5.3, 0.05),
    ("mori_received", "", "deviation"): (126, 0.5),
    ("deepep_58_GBps", "bytes on the wire", "on_the_wire"): (43.5e9, 0),
}
# row -> its verdict in the list, where the row is one claim there
VERDICTS = {
    "holds": "4 5 6 7 8 12 13 14 15 30 36 41 43 44 45 46 47 50",
    "fails": "2 3 10 16 17 20 21 26 27 37 42",
    "depends": "1 9 19 23 28 29 31 32 40 49",
    "not checkable": "25 38 39",
}
# rows whose halves have different verdicts
HALVES = {
    "11": ("depends", "holds", "holds"),  # 11 hold them; 8 do not; 8 have 1.13 TB
    "18": ("fails", "holds"),  # 240; two a layer
    "22": ("fails", "holds"),  # broadcast; at most min(16, R)
    "24": ("fails", "fails", "holds"),  # by shares; a layer sends more; the identity with K2
    "33": ("holds", "fails"),  # a bound; an estimate
    "34": ("holds", "fails"),  # ids and weights; the width
    "35": ("holds", "depends"),  # weights; activations
    "48": ("holds", "fails"),  # dispatch; the round trip
}


def of_row(number: str) -> list:
    claims = all_claims().values()
    return [claim for claim in claims if re.fullmatch(rf"{number}[a-z]?", claim.row)]


@pytest.mark.parametrize("number", [str(number) for number in range(1, 51)])
def test_every_row_is_there_with_its_verdict(number):
    claims = of_row(number)
    assert claims, f"row {number} is missing"
    computed = tuple(outcome(claim.id).verdict for claim in claims)
    assert computed == tuple(claim.verdict for claim in claims)
    if number in HALVES:
        assert computed == HALVES[number]
    else:
        (listed,) = [words for words, rows in VERDICTS.items() if number in rows.split()]
        assert set(computed) == {listed}


def test_every_claim_has_a_row_and_a_figure_was_typed_for_most():
    assert all(re.fullmatch(r"\d+[a-z]?", claim.row) for claim in all_claims().values())
    checkable = {name for name in all_claims() if outcome(name).verdict != "not checkable"}
    stepwise = {name for name, _, _ in STEPS}
    # Yes or no, and no figure in the list: state, linear growth, at most, a half of another row.
    without = checkable - set(FOUND) - stepwise
    assert without == {
        *("state_constant", "kv_linear", "at_most_16_ranks", "k3_equals_k2_a_layer"),
        *("headline_is_a_bound", "ids_and_scales_are_sent", "weights_mxfp4", "h200_8_short"),
        *("activations_mxfp8", "all_to_all_share_90", "accelerators_64"),
    }


@pytest.mark.parametrize("name", FOUND)
def test_the_figure_is_the_one_of_the_list(name):
    cases = {case.setting: case for case in outcome(name).cases}
    for setting, figure, half in FOUND[name]:
        found = cases[setting].found.value
        assert abs(found - figure) <= half + 1e-9 * abs(figure), (setting, found, figure)


@pytest.mark.parametrize(("name", "setting", "step"), STEPS)
def test_the_step_is_the_one_of_the_list(name, setting, step):
    (case,) = [case for case in outcome(name).cases if case.setting == setting]
    (line,) = [line for line in case.lines if line.name == step]
    figure, half = STEPS[name, setting, step]
    assert abs(line.found.value - figure) <= half + 1e-9 * abs(figure), line.found


def test_z_of_the_measured_rows():
    for name, z in (("mori_rdma_tokens", 0.49), ("mori_received", 0.30)):
        (case,) = outcome(name).cases
        assert isclose(abs(case.margin) / (case.slack / 3), z, abs_tol=0.005)


# An input on the command line -> the verdict that it makes. Each must differ from the recorded one.
CHANGED = [
    ("rounds_240", {"model__num_moe_layers": 120}, "depends"),
    ("one_moe_layer", {"model__num_moe_layers": 1}, "holds"),
    ("operations_120", {"model__num_moe_layers": 121}, "holds"),
    ("operations_120", {"model__num_moe_layers": 60}, "fails"),
    ("cache_saved_75", {"context": "1048576 tokens", "slots": 1}, "holds"),
    ("cache_saved_75", {"context": "8192 tokens", "slots": 1}, "fails"),
    ("pass_reads_all_weights", {"tokens": 512}, "holds"),
    ("pass_reads_all_weights", {"tokens": 8}, "fails"),
    ("h100_18", {"memory": "88 GB"}, "holds"),
    ("h200_11", {"memory": "141 GiB", "real": 1}, "holds"),
    ("h200_11", {"memory": "141 GB", "real": 1}, "fails"),
    ("b200_9", {"memory": "192 GB"}, "depends"),
    ("weights_1500_GB", {"model__num_moe_layers": 61}, "fails"),
    ("weights_bf16", {"bits": "8 bits"}, "fails"),
    ("kda_mla_3_to_1", {"model__attention__full_layers": 23}, "holds"),
    ("kda_mla_3_to_1", {"model__attention__full_layers": 30}, "fails"),
    ("hidden_width_is_sent", {"model__payload_width": 7168}, "holds"),
    ("headline_is_an_estimate", {"model__payload_width": 7168}, "depends"),
    ("k3_equals_k2_a_layer", {"model__payload_width": 7168}, "fails"),
    ("k3_equals_k2_a_layer", {"model__top_k": 8}, "fails"),
    ("need_rises_a_layer", {"model__payload_width": 7168}, "holds"),
    ("bandwidth_binds", {"tokens": 512}, "holds"),
    ("bandwidth_binds", {"tokens": 8}, "fails"),
    ("ports_512", {"nic": "400 Gbit/s", "tiers": 1, "radix": 1024}, "holds"),
    ("ports_30_more", {"ports_of_k3": 130, "ports_of_k2": 100}, "holds"),
    ("ports_30_more", {"ports_of_k3": 100, "ports_of_k2": 100}, "fails"),
    ("decode_6x", {"with_kda": 6, "without_kda": 1}, "holds"),
    ("insights_pair_us", {"width": 7000}, "holds"),
    ("insights_pair_us", {"width": 7168}, "fails"),
    ("insights_pair_us", {"rate": "900 GB/s"}, "fails"),
    ("fp4_experts_348_GiB", {"expert": "23.625 MiB"}, "fails"),
    ("fp4_experts_348_GiB", {"expert": "24 MB"}, "fails"),
    ("deepep_58_GBps", {"hardware__scale_out_GBps": "100 GB/s"}, "holds"),
    ("deepep_58_GBps", {"nodes": 8}, "fails"),
    ("whole_bank_resident", {"tokens": 64}, "fails"),
    ("dispatch_broadcasts", {"ranks": 2}, "holds"),
    ("kv_share_1", {"moved": 0, "slots": 0}, "fails"),
    ("weights_mxfp4", {"packed": "1361.4 GiB"}, "fails"),
    ("nvl72_not_filled", {"hardware__scale_up_domain": 8}, "fails"),
    ("offload_follows", {"number": 4}, "holds"),
    ("tensorrt_llm_ep8", {"wire": "fp8_block128"}, "fails"),
    ("uccl_dispatch", {"experts": 64}, "fails"),
    ("node_limit_halves", {"limit": 2, "by_best": 1}, "fails"),
]


@pytest.mark.parametrize(("name", "values", "verdict"), CHANGED)
def test_an_input_changes_the_verdict_where_it_should(name, values, verdict):
    changed = evaluate(all_claims()[name], given(**values))
    assert changed.verdict == verdict, [
        (case.label, case.found and case.found.value, case.holds) for case in changed.cases
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rounds_240", {"model__top_k": 8}),
        ("rounds_240", {"model__num_moe_layers": 93}),
        ("weights_1400_GB", {"model__top_k": 8}),
        ("headline_is_a_bound", {"model__payload_width": 7168}),
        ("nvl72_tray", {"hardware__scale_up_domain": 576}),
        ("at_most_16_ranks", {"ranks": 4096 // 8}),
        ("k3_equals_k2_a_layer", {"wire": "mxfp8"}),
    ],
)
def test_an_input_that_does_not_matter_changes_nothing(name, values):
    assert evaluate(all_claims()[name], given(**values)).verdict == all_claims()[name].verdict
