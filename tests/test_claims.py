"""Claims are read strictly, worked out with units, and judged by their cases alone."""

import pytest
from claim_samples import all_claims, all_tables, entry, given, judged, outcome

from comm.claims.changes import changes
from comm.claims.form import VERDICTS, ClaimError, read_claim
from comm.claims.judge import evaluate, with_run
from comm.claims.scope import World

WORLD = World(all_tables())


def test_a_verdict_follows_from_the_figures_and_not_from_the_record():
    for recorded in ("holds", "fails", "not checkable"):
        assert judged(verdict=recorded).verdict == "holds"
        assert judged(verdict=recorded).differs == (recorded != "holds")
    assert judged(says="505 accelerators").verdict == "fails"


def test_settings_that_decide_differently_make_depends():
    settings = {"seven": {"racks": 7}, "eight": {"racks": 8}}
    both = judged(settings=settings)
    assert both.verdict == "depends" and both.differs
    assert [(case.setting, case.holds) for case in both.cases] == [
        ("seven", True),
        ("eight", False),
    ]
    assert judged(settings={"seven": {"racks": 7}, "again": {}}).verdict == "holds"
    assert judged(settings={"six": {"racks": 6}, "eight": {"racks": 8}}).verdict == "fails"


def test_an_unknown_number_is_not_checkable_until_somebody_gives_it():
    unknown = read_claim(entry(inputs={"racks": "unknown", "in_a_rack": 72}))
    nobody = evaluate(unknown, WORLD)
    assert nobody.verdict == "not checkable" and nobody.cases[0].unknown == "racks"
    assert evaluate(unknown, given(racks=7)).verdict == "holds"
    assert evaluate(unknown, given(racks=8)).verdict == "fails"
    known = entry(expression="racks * in_a_rack + 0 * mi355x.scale_up_GBps / mi355x.scale_up_GBps")
    assert evaluate(read_claim(known), WORLD).verdict == "not checkable"  # null in its file


@pytest.mark.parametrize(
    ("relation", "says", "tolerance", "holds"),
    [
        ("equals", 504, 0, True),
        ("equals", 503, 0, False),
        ("equals", 500, 4, True),
        ("equals", 500, 3.9, False),
        ("equals", 480, "5 %", True),
        ("equals", 479, "5 %", False),
        ("equals", 500, "racks - 3", True),
        ("equals", 500, "racks - 4", False),
        ("at least", 504, 0, True),
        ("at least", 505, 0, False),
        ("at most", 504, 0, True),
        ("at most", 503, 0, False),
        ("more than", 503, 0, True),
        ("more than", 504, 0, False),
        ("less than", 505, 0, True),
        ("less than", 504, 0, False),
    ],
)
def test_relations_and_tolerances(relation, says, tolerance, holds):
    found = judged(relation=relation, says=says, tolerance=tolerance)
    assert (found.verdict == "holds") is holds


def test_rounding_of_floating_point_is_no_difference():
    tenths = {"inputs": {"a": 0.1, "b": 0.2}, "expression": "a + b"}
    assert judged(**tenths, says=0.3).verdict == "holds"
    assert judged(**tenths, says=0.3, relation="at most").verdict == "holds"


def test_a_named_formula_takes_inputs_the_model_and_defaults():
    claim = {"formula": "row_payload", "expression": None, "model": "kimi_k3", "says": "7168 B"}
    assert judged(**claim, inputs={}).verdict == "holds"  # width of the model, bf16 by default
    assert judged(**claim, inputs={"wire": "mxfp8"}).verdict == "fails"
    assert judged(**claim, inputs={"width": "100 values"}).cases[0].found.value == 200
    text = "row_payload(wire='fp32', width=racks)"
    assert judged(expression=text, inputs={"racks": 7}, says="28 B").verdict == "holds"


def test_an_input_may_name_a_field():
    inputs = {"racks": 7, "in_a_rack": "gb200_nvl72.scale_up_domain"}
    assert judged(inputs=inputs).verdict == "holds"
    assert judged(inputs={**inputs, "in_a_rack": "h100_sxm.scale_up_domain"}).verdict == "fails"


def test_a_setting_may_change_the_model_and_the_machine():
    settings = {"k3": {}, "k2": {"model": "kimi_k2"}, "less": {"model.num_moe_layers": 60}}
    layers = {"model": "kimi_k3", "inputs": {}, "expression": "model.num_moe_layers", "says": 92}
    found = judged(**layers, settings=settings)
    assert [case.found.value for case in found.cases] == [92, 60, 60]
    other = {"a": {"hardware": "h100_sxm"}, "b": {"hardware": "gb200_nvl72"}}
    domain = {"inputs": {}, "expression": "hardware.scale_up_domain", "says": 72}
    assert [case.holds for case in judged(**domain, settings=other).cases] == [False, True]


def test_the_command_line_wins_over_files_and_settings():
    name = "rounds_240"
    for word in ("model__num_moe_layers", "kimi_k3__num_moe_layers"):
        changed = evaluate(all_claims()[name], given(**{word: 120}))
        assert [case.found.value for case in changed.cases] == [240, 0]
    fixed = evaluate(all_claims()["cache_saved_75"], given(context="8192 tokens"))
    assert [case.label for case in fixed.cases][1] == "1M tokens, with context 8,192 tokens"
    assert len({case.found.value for case in fixed.cases[1:]}) == 1


WRONG = [
    ({"formula": "arithmetics"}, r"formula=arithmetics: no such formula \(did you mean arithmetic"),
    ({"formula": "distinct_rank", "expression": None}, r"did you mean distinct_ranks\?"),
    ({"formula": "row_payload"}, "an expression belongs to formula=arithmetic"),
    ({"formula": None}, "formula: is missing"),
    ({"expression": None}, "needs either an expression or steps"),
    ({"steps": {"a": "1"}}, "needs either an expression or steps"),
    ({"verdict": "true"}, "verdict=true: choose holds, fails, depends, not checkable"),
    ({"verdict": "hold"}, r"did you mean holds\?"),
    ({"verdict": True}, "verdict=True: choose holds"),
    ({"verdict": None}, "verdict: is missing"),
    ({"why": ""}, "why: is missing"),
    ({"why": "", "verdict": ""}, r"verdict, why: are missing \(verdict is one of holds, fails, "),
    ({"says": None}, "says: is missing"),
    ({"source": None}, "source: is missing"),
    ({"verdict": "depends"}, "needs turns_on, and two settings"),
    ({"relation": "about"}, "relation=about: choose equals, at least"),
    ({"tolerance": "-1"}, "tolerance=-1: must not be negative"),
    ({"tolerance": "slack"}, "slack: no such input"),
    ({"tolerance": "2 GB"}, "tolerance: bytes, and says is not"),
    ({"says": "504 acelerators"}, r"says=504 acelerators: acelerators: no such unit.*accelerators"),
    ({"says": "504 GB"}, "says=504 GB: the formula gives a plain number"),
    ({"inputs": {"racks": 7}}, "in_a_rack: no such input"),
    ({"inputs": {"rack": 7, "in_a_rack": 72}}, r"racks: no such input \(did you mean rack\?\)"),
    ({"inputs": {"racks": "7 GBB", "in_a_rack": 72}}, r"inputs.racks=7 GBB: GBB: no such unit"),
    ({"inputs": {"racks": 7, "in_a_rack": 72, "spare": 1}}, "inputs.spare: nothing uses it"),
    ({"inputs": [7]}, "inputs: must be names with values"),
    ({"inputs": {"in a rack": 7}}, "inputs.in a rack: cannot be a name"),
    ({"inputs": {"racks": "many", "in_a_rack": 72}}, "racks=many: is a text where a number"),
    ({"settings": {"x": {"rakcs": 1}}}, r"settings.x.rakcs: no such input \(did you mean racks"),
    ({"settings": [1]}, "settings: must be names"),
    ({"colour": "red"}, "colour: no such field"),
    ({"formul": "x"}, r"formul: no such field \(did you mean formula\?\)"),
    ({"expression": "racks * (in_a_rack"}, "is no arithmetic"),
    ({"expression": "open(file=racks)"}, "open: no such formula"),
    ({"expression": "distinct_ranks(rank=racks)"}, r"has no parameter rank \(did you mean ranks"),
    ({"expression": "distinct_ranks(ranks=racks)"}, "needs the input num_experts"),
    ({"expression": "model.top_k"}, "the claim names no model"),
    ({"expression": "kimi_k4.top_k"}, r"kimi_k4: no such model or hardware \(did you mean kimi_k"),
    ({"expression": "kimi_k3.topk"}, r"kimi_k3 has no such field \(did you mean top_k\?\)"),
    ({"expression": "kimi_k3.attention"}, "kimi_k3.attention: is no single number"),
    ({"model": "Kimi K3"}, "must be the name of a file of conf/model/"),
    ({"run": {"commands": {"a": "ranks=2"}}}, "run: needs commands"),
    ({"run": {"commands": ["ranks=2"], "counted": "1"}}, "run.commands: must be names"),
    ({"steps": {"a b": "1"}, "expression": None}, "steps.a b: cannot be a name"),
    ({"says": float("nan")}, "says=nan: is no finite number"),
    ({"says": "1e400 accelerators"}, "is no finite number"),
    ({"says": "9" * 5000}, "a number of 5000 digits; at most 300"),
    ({"tolerance": float("inf")}, "tolerance=inf: is no finite number"),
    ({"formula": ["arithmetic"]}, r"formula=\['arithmetic'\]: must be a text or a number"),
    ({"inputs": {"racks": [7], "in_a_rack": 72}}, r"inputs.racks=\[7\]: must be a number"),
    ({"expression": "racks * in_a_rack + 1e400"}, "comes to no finite number"),
    ({"expression": "racks * in_a_rack / ((10**60)**20 / 7)"}, "a number too large"),
    ({"expression": "9**9**9"}, "needs a plain number of at most 64"),
    ({"model": "kimi_k4"}, r"model=kimi_k4: no such file in conf/model/ \(did you mean kimi_k"),
    ({"hardware": "h300"}, "hardware=h300: no such file in conf/hardware/"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_claim_is_refused_in_one_line(fields, message):
    with pytest.raises(ClaimError, match=f"^sample: .*{message}") as refused:
        judged(**fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [None, 5, "", "two words", "_x", "a-b"])
def test_an_id_is_a_word(name):
    with pytest.raises(ClaimError, match=f"^id={name}: must be a word"):
        read_claim(entry() | {"id": name})


def test_what_is_no_mapping_is_no_claim():
    with pytest.raises(ClaimError, match="a claim is a list of fields"):
        read_claim(["id", "x"])


def test_fields_of_the_file_are_shared_and_the_claims_own_win():
    claim = read_claim(entry(source=None), {"source": "the file", "why": "the file"})
    assert (claim.source, claim.why) == ("the file", "Seven times 72.")


def test_every_step_is_told_with_its_numbers():
    (first, _) = outcome("rounds_240").cases
    (line,) = first.lines
    assert line.how == "expert_parallel * rounds_a_layer() * model.num_moe_layers"
    assert (line.numbers, line.found.value) == ("1 * 2 rounds * 92", 184)
    assert line.inner == ("rounds_a_layer = dispatch, combine; forward = 2 rounds",)


@pytest.mark.parametrize(
    ("name", "setting", "number", "turns_at", "holds"),
    [
        ("rounds_240", "expert parallelism", "model.num_moe_layers", 120, True),
        ("operations_120", "dispatch and combine", "model.num_moe_layers", 60, False),
        ("operations_120", "dispatch alone", "model.num_moe_layers", 121, True),
        ("h200_8_short", "", "number", 12, False),  # 11 hold 1.551 of 1.561 TB
        ("cache_saved_75", "128K", "context", 604_776, True),  # 449.4e6 / 107136 / (0.742 - 0.735)
        ("bandwidth_binds", "NVLink, nominal", "tokens", 358, True),  # 128 / 0.3581 = 357.4
        ("whole_bank_resident", "", "tokens", 255, False),  # ln 0.01 / ln (55 / 56) = 255.6
    ],
)
def test_what_would_change_a_verdict(name, setting, number, turns_at, holds):
    claim = all_claims()[name]
    (change,) = [one for one in changes(claim, WORLD, setting) if one.name == number]
    assert (change.turns_at.value, change.holds) == (turns_at, holds)


def test_the_values_at_which_a_verdict_turns_do_turn_it():
    """Each change that is promised, set on its own, must make the other answer."""
    promised = 0
    for name in ("weights_1500_GB", "h100_18", "deepep_58_GBps", "bandwidth_binds"):
        claim = all_claims()[name]
        for number, case in enumerate(outcome(name).cases):
            for change in changes(claim, WORLD, case.setting):
                world = World(all_tables(), {change.name: change.turns_at})
                then = evaluate(claim, world).cases[number]
                assert then.holds == change.holds != case.holds, (name, change)
                promised += 1
    assert promised > 20


def test_a_run_is_one_more_case():
    claim = read_claim(entry(run={"commands": {"one": "ranks=2"}, "counted": "one.rounds * 126"}))
    worked_out = evaluate(claim, WORLD)
    assert with_run(worked_out, {"one": {"rounds": 4}}).verdict == "holds"
    against = with_run(worked_out, {"one": {"rounds": 5}})
    assert against.verdict == "depends" and against.differs
    with pytest.raises(ClaimError, match=r"run.counted: one.rounds: one has no such field"):
        with_run(worked_out, {"one": {"bytes": 4}})


def test_all_four_verdicts_occur_and_no_other():
    assert {outcome(name).verdict for name in all_claims()} == set(VERDICTS)
