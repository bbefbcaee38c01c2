"""Which choices go together: every rule refuses what it should, in one line, and nothing more."""

from dataclasses import fields, replace

import pytest

from moe import combinations
from moe.combinations import BELONGS_TO, useless_key, why_not
from moe.conf_files import options
from moe.config import compose
from moe.routing.options import RouterOptions
from moe.settings import MODES, Config, FaultConfig, keys


@pytest.fixture(scope="module")
def default() -> Config:
    return compose([])


def changed(config: Config, **changes) -> Config:
    """`config` with keys set as on the command line, "__" for the dot, and nothing checked."""
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if not field and hasattr(getattr(config, part), "name"):
            field = "name"
        if field:
            value = replace(getattr(config, part), **{field: value})
        config = replace(config, **{part: value})
    return config


def test_the_default_run_and_the_usual_ones_are_allowed(default):
    for changes in (
        {},
        {"ranks": 12, "ep_size": 6, "expert_tp": 3},
        {"ep_size": 1},
        {"expert_tp": 8},
        {"expert_tp": 2, "expert_tp_mode": "gather", "dispatcher": "two_hop"},
        {"expert_tp": 2, "expert_tp_mode": "gather", "dispatcher": "padded"},
        {"mode": "training", "chunks": 3, "dispatcher": "one_sided"},
        {"placement": "balance", "expert_tp": 2},
        {"placement": "balance", "placement__num_redundant_experts": 7 * 896},
        {"placement": "file", "placement__path": "x.npz"},
        {"router": "replay", "router__path": "x.npz"},
        {"device": "cuda"},
        {"warmup": 0},
    ):
        assert why_not(changed(default, **changes)) is None, changes


@pytest.mark.parametrize("dispatcher", options("dispatcher"))
def test_shards_reached_by_all_need_a_strategy_of_one_exchange(default, dispatcher):
    config = changed(default, dispatcher=dispatcher, expert_tp=2, expert_tp_mode="all")
    allowed = dispatcher in ("all_to_all", "rank_dedup", "allgather")
    assert (why_not(config) is None) == allowed
    assert why_not(replace(config, expert_tp=1)) is None  # nobody to reach
    assert why_not(replace(config, expert_tp_mode="gather")) is None


REFUSALS = [  # changes, what is said, the change that its advice leads to
    (
        {"fault": FaultConfig("kill", rank=8)},
        "fault.rank=8: there are 8 ranks; nearest: 7",
        {"fault": FaultConfig("kill", rank=7)},
    ),
    (
        {"fault": FaultConfig("raise", phase="grad_sync")},
        "fault.phase=grad_sync: this run has dispatch, combine; nearest: dispatch",
        {"fault": FaultConfig("raise")},
    ),
    (
        {"ep_size": 3},
        "ep_size=3: must divide the 8 ranks; nearest: 2",
        {"ep_size": 2},
    ),
    (
        {"ep_size": 100},
        "ep_size=100: must divide the 8 ranks; nearest: 8",
        {"ep_size": 8},
    ),
    (
        {"ep_size": 4, "expert_tp": 8},
        "expert_tp=8: must divide the 4 ranks of an expert-parallel group; nearest: 4",
        {"expert_tp": 4},
    ),
    (
        {"expert_tp": 3},
        "expert_tp=3: must divide the 8 ranks of an expert-parallel group; nearest: 2",
        {"expert_tp": 2},
    ),
    (
        {"expert_tp": 8, "scale__intermediate_size": 4},
        "expert_tp=8: an expert's inner width is 4; nearest: 4",
        {"expert_tp": 4},
    ),
    (
        {"expert_tp": 8, "scale__intermediate_size": None, "model__intermediate_size": 2},
        "expert_tp=8: an expert's inner width is 2; nearest: 2",
        {"expert_tp": 2},
    ),
    (
        {"expert_tp": 2, "expert_tp_mode": "all", "dispatcher": "two_hop"},
        "expert_tp_mode=all: dispatcher=two_hop is not one exchange; use expert_tp_mode=gather or"
        " dispatcher=all_to_all or dispatcher=rank_dedup or dispatcher=allgather",
        {"dispatcher": "allgather"},
    ),
    (
        {"placement": "balance", "expert_tp": 4, "scale__intermediate_size": 6},
        "placement=balance: experts move in equal shards; expert_tp=4 must divide their inner"
        " width 6; nearest: 3",
        {"expert_tp": 2},  # a divisor of both
    ),
    (
        {"placement": "file"},
        "placement=file: needs placement.path=FILE",
        {"placement__path": "map.json"},
    ),
    (
        {"placement": "balance", "warmup": 0},
        "placement=balance: the load is measured in the warm-up; set warmup=1 or more",
        {"warmup": 1},
    ),
    (
        {"placement": "balance", "placement__num_redundant_experts": 7 * 896 + 1},
        "placement.num_redundant_experts=6273: 8 ranks hold each of 896 experts once at most;"
        " nearest: 6272",
        {"placement__num_redundant_experts": 6272},
    ),
    (
        {"placement": "balance", "ranks": 1, "placement__num_redundant_experts": 1},
        "placement.num_redundant_experts=1: 1 ranks hold each of 896 experts once at most;"
        " nearest: 0",
        {"placement__num_redundant_experts": 0},
    ),
    (
        {"router": "replay"},
        "router=replay: needs router.path=FILE",
        {"router__path": "trace.npz"},
    ),
    (
        {"router": "counts"},
        "router=counts: needs router.path=FILE",
        {"router__path": "counts.json"},
    ),
    *(
        (
            {"dispatcher": "padded", "dispatcher__capacity_factor": factor},
            f"dispatcher.capacity_factor={factor}: must be a positive number; nearest: 1.0",
            {"dispatcher__capacity_factor": 1.0},
        )
        for factor in (0.0, -1.0, float("inf"), float("nan"))
    ),
    (
        {"dispatcher": "padded", "dispatcher__capacity_factor": 897.0},
        "dispatcher.capacity_factor=897.0: must be <= 896 experts; nearest: 896",
        {"dispatcher__capacity_factor": 896.0},
    ),
    (
        {"model__num_experts": (1 << 20) + 1},
        "model.num_experts=1048577: a run has at most 1048576; nearest: 1048576",
        {"model__num_experts": 1 << 20},
    ),
    (
        {"dispatcher": "one_sided", "device": "cuda"},
        "dispatcher=one_sided: works in the memory that ranks share; use device=cpu",
        {"device": "cpu"},
    ),
]


@pytest.mark.parametrize(("changes", "said", "advice"), REFUSALS)
def test_a_refusal_is_one_line_with_name_value_and_rule_and_its_advice_works(
    default, changes, said, advice
):
    config = changed(default, **changes)
    assert why_not(config) == said
    assert why_not(changed(config, **advice)) is None


def test_every_rule_has_refused_something(default):
    """One of REFUSALS is due to each rule alone."""
    for rule in combinations.RULES:
        assert any(rule(changed(default, **changes)) for changes, *_ in REFUSALS), rule


def test_the_first_rule_that_is_broken_speaks(default):
    config = changed(default, ep_size=3, dispatcher="one_sided", device="cuda")
    assert why_not(config) == "ep_size=3: must divide the 8 ranks; nearest: 2"


def test_keys_that_belong_to_a_choice_exist_and_so_do_the_choices():
    known = keys()
    for name, (decider, values) in BELONGS_TO.items():
        assert name in known and decider in known
        there = options(decider) if known[decider].group else MODES
        assert values and set(values) <= set(there), name


def test_every_option_of_a_router_belongs_to_the_routers_that_use_it():
    of_routers = {name.partition(".")[2] for name in BELONGS_TO if name.startswith("router.")}
    assert of_routers == {one.name for one in fields(RouterOptions)}


@pytest.mark.parametrize("name", BELONGS_TO)
def test_a_key_is_useless_with_every_choice_but_its_own(default, name):
    decider, values = BELONGS_TO[name]
    for choice in options(decider) if keys()[decider].group else MODES:
        said = useless_key(name, changed(default, **{decider: choice}))
        if choice in values:
            assert said is None
        else:
            whose = " or ".join(f"{decider}={value}" for value in values)
            assert said == f"{decider}={choice} does not use it; it belongs to {whose}"


def test_other_keys_are_never_useless(default):
    of_faults = {name for name in keys() if name.startswith("fault.")}  # tests/test_faults.py
    for name in set(keys()) - set(BELONGS_TO) - {"expert_tp_mode"} - of_faults:
        assert useless_key(name, default) is None


def test_the_way_to_shards_means_nothing_without_them(default):
    assert "expert_tp=2 or more" in useless_key("expert_tp_mode", default)
    assert useless_key("expert_tp_mode", replace(default, expert_tp=2)) is None
