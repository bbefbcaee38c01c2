"""Composing a configuration: what comes out, and the one line that refuses what cannot be run."""

import json
import os
from dataclasses import FrozenInstanceError, asdict

import pytest

from comm.wire import WIRE_FORMATS
from moe.config import compose
from moe.settings import JOBS, JOBS_OF, UNUSED, USED, WIRES, ConfigError, keys


def refusal(*overrides: str, **arguments: int) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, **arguments)
    return str(caught.value)


def test_the_default_run():
    config = compose([])
    assert (config.job, config.model.name, config.scale.name) == ("emulate", "kimi_k3", "laptop")
    assert (config.router.name, config.dispatcher.name) == ("uniform", "rank_dedup")
    assert (config.placement.name, config.wire.dispatch) == ("contiguous", "bf16")
    assert config.world_size == 8 and config.tokens_per_rank == (64,) * 8
    assert (config.mode, config.chunks, config.expert_tp) == ("inference", 1, 1)
    assert config.ep_size is None and config.group_size == config.num_positions == 8


def test_groups_and_the_positions_of_a_lane():
    config = compose(["ranks=12", "ep_size=6", "expert_tp=3"])
    assert (config.group_size, config.num_positions) == (6, 2)


def test_predict_imagines_a_group_of_ranks():
    """Nobody is started, so the size of the group is the number of ranks."""
    assert compose(["job=predict", "ep_size=16"]).world_size == 16
    assert compose(["job=predict", "ranks=4"]).world_size == 4
    assert compose(["job=predict"]).world_size == 8
    assert refusal("ep_size=16").startswith("ep_size=16: must divide the 8 ranks; nearest: 8")


def test_a_configuration_is_frozen_and_made_of_plain_values():
    config = compose(["topology.node_of_rank=[0,1]", "ranks=2", "tokens=[3,0]"])
    assert config.topology.node_of_rank == (0, 1) and config.tokens == (3, 0)
    assert json.loads(json.dumps(asdict(config)))["bench"]["widths"] == [256, 1024]
    with pytest.raises(FrozenInstanceError):
        config.model.top_k = 1


def test_the_last_value_of_a_key_wins():
    config = compose(["dispatcher=allgather", "steps=2", "dispatcher=all_to_all", "steps=3"])
    assert config.dispatcher.name == "all_to_all" and config.steps == 3


def test_layers_replaces_the_depth_of_the_scale():
    assert compose(["layers=2"]).scale.layers == 2
    assert compose(["scale=full_depth", "layers=92"]).scale.layers == 92


def test_ranks_already_started_are_the_world():
    assert compose([], world_size=3).ranks == 3
    assert compose(["ranks=3"], world_size=3).ranks == 3
    assert refusal("ranks=4", world_size=3) == "ranks=4: 3 ranks were started; leave it out"


def test_more_ranks_than_experts_are_allowed():
    compose(["model=mixtral_8x7b", "ranks=9"])


def test_wire_names_are_those_of_the_wire():
    assert set(WIRES) == set(WIRE_FORMATS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "dispatcher=rankdedup",
            "dispatcher=rankdedup: no such dispatcher; choose all_to_all, allgather,"
            " hierarchical_allgather, one_sided, padded, rank_dedup, two_hop"
            " (did you mean rank_dedup?)",
        ),
        (
            "dispacher=x",
            "dispacher=x: no such key (did you mean dispatcher?); wideep --help lists them",
        ),
        (
            "ranks_per_node=4",
            "ranks_per_node=4: no such key (did you mean topology.ranks_per_node?);"
            " wideep --help lists them",
        ),
        (
            "job=emulat",
            f"job=emulat: no such job; choose {', '.join(sorted(JOBS))} (did you mean emulate?)",
        ),
        (
            "job=predict steps=1000000",
            "steps=1000000: at most 13586 on 8 ranks with 92 layers; nearest: 13586",
        ),
        ("hydra.verbose=true", "hydra.verbose=true: no such key; wideep --help lists them"),
        ("model.top_k.a=3", "model.top_k.a=3: no such key (did you mean model.top_k?)"),
        (
            "wire=mxfp8",
            "wire=mxfp8: wire has parts; set wire.dispatch or wire.combine or wire.backward",
        ),
        ("router.exponant=2", "router.exponant=2: no such key (did you mean router.exponent?)"),
        ("router=zpif", "router=zpif: no such router; choose balanced, counts, group_limited"),
        ("router=markov router.reuse=2", "router.reuse=2.0: must be in 0 .. 1; nearest: 1"),
        ("router=markov router.reuse=x", "router.reuse=x: must be a number"),
        ("router=markov router.reuse=nan", "router.reuse=nan: must be in 0 .. 1; nearest: 0"),
        ("router=zipf router.order=ids", "router.order='ids': must be one of seeded, id"),
        ("router=hot_rank router.hot_rank=8", "router.hot_rank=8: must be in 0 .. 7; nearest: 7"),
        ("placement=balanced", "placement=balanced: no such placement; choose balance, contiguous"),
        (
            "placement=balance placement.num_redundant_experts=-1",
            "placement.num_redundant_experts=-1: must be >= 0",
        ),
        (
            "placement=balance placement.replica_choice=near",
            "placement.replica_choice=near: no such replica_choice; choose nearest, random, round",
        ),
        (
            "dispatcher=padded dispatcher.capacity_factor=x",
            "dispatcher.capacity_factor=x: must be a number",
        ),
        (
            "dispatcher=one_sided dispatcher.deduplicate=2",
            "dispatcher.deduplicate=2: must be true or false",
        ),
        ("mode=train", "mode=train: no such mode; choose inference, training (did you mean train"),
        ("mode=training wire.backward=fp8", "wire.backward=fp8: no such wire format; choose bf16"),
        ("chunks=0", "chunks=0: must be >= 1"),
        ("ep_size=0", "ep_size=0: must be >= 1"),
        ("ep_size=x", "ep_size=x: must be an integer or null"),
        ("expert_tp=0", "expert_tp=0: must be >= 1"),
        ("expert_tp_mode=some", "expert_tp_mode=some: no such expert_tp_mode; choose all, gather"),
        ("wire.combine=fp8", "wire.combine=fp8: no such wire format; choose bf16, fp16, fp32, fp8"),
        ("dispatcher=null", "dispatcher=null: no such dispatcher; choose all_to_all"),
        ("dispatcher.name=x", "dispatcher.name=x: no such dispatcher; choose all_to_all"),
        ("dtype=fp64", "dtype=fp64: no such dtype; choose bf16, fp16, fp32"),
        ("steps=abc", "steps=abc: must be an integer"),
        ("steps=1.5", "steps=1.5: must be an integer"),
        ("steps=true", "steps=true: must be an integer"),
        ("steps=", "steps=: must be an integer"),
        ("steps=null", "steps=null: must be an integer"),
        ("steps=${nope}", "steps=${nope}: Interpolation key 'nope' not found"),
        ("steps=0", "steps=0: must be >= 1; nearest: 1"),
        ("warmup=1000000000000", "warmup=1000000000000: must be <= 1000000; nearest: 1000000"),
        ("warmup=-1", "warmup=-1: must be >= 0"),
        ("layers=x", "layers=x: must be an integer or null"),
        ("layers=93", "layers=93: kimi_k3 has 92 MoE layers; nearest: 92"),
        ("reference=2", "reference=2: must be true or false"),
        ("reference=maybe", "reference=maybe: must be true or false"),
        ("timeout_s=soon", "timeout_s=soon: must be a number"),
        ("timeout_s=nan", "timeout_s=nan: must lie in 1 .. 86400 seconds"),
        ("timeout_s=0", "timeout_s=0.0: must lie in 1 .. 86400 seconds"),
        ("seed=9223372036854775808", "seed=9223372036854775808: must be <= 9223372036854775807"),
        ("ranks=0", "ranks=0: must be >= 1"),
        ("ranks=5000", "ranks=5000: must be <= 4096"),
        ("tokens=-3", "tokens=-3: must be >= 0"),
        ("tokens=abc", "tokens=abc: must be an integer or a list of integers"),
        ("tokens=true", "tokens=true: must be an integer or a list of integers"),
        ("tokens=[1,a]", "tokens=[1,a]: must be an integer or a list of integers"),
        ("tokens=[]", "tokens=[]: must not be empty"),
        ("tokens=[1,2]", "tokens=[1,2]: lists 2 ranks, ranks=8"),
        ("ranks=2 tokens=[1,-2]", "tokens=[1,-2]: must be >= 0; nearest: [1,0]"),
        (
            "ranks=7 topology.ranks_per_node=4",
            "topology.ranks_per_node=4 must be a positive divisor of the number of ranks (7);"
            " nearest: 1 or 7",
        ),
        ("topology.ranks_per_node=0", "topology.ranks_per_node=0: must be >= 1"),
        ("topology.node_of_rank=3", "topology.node_of_rank=3: must be a list of integers or null"),
        ("topology.node_of_rank=[0,1]", "topology.node_of_rank=[0,1]: lists 2 ranks, ranks=8"),
        (
            "ranks=1 topology.node_of_rank=[0] topology.ranks_per_node=1",
            "topology.ranks_per_node and topology.node_of_rank: set only one of them",
        ),
        ("backend=nccl", "backend=nccl: device=cpu needs backend=auto or gloo"),
        ("job=bench device=cuda backend=gloo", "backend=gloo: job=bench times the bare collective"),
        (
            "model.top_k=17 model.num_experts=16",
            "model=kimi_k3: top_k=17 exceeds num_experts=16",
        ),
        ("model.num_expert_groups=3", "model=kimi_k3: num_expert_groups=3 does not divide"),
        ("model.top_k=null", "model.top_k=null: must be an integer"),
        ("scale.layers=0", "scale.layers=0 must be at least 1"),
        ("bench.tokens=[]", "bench.tokens=[]: must not be empty"),
        ("bench.widths=[256,0]", "bench.widths=[256,0]: must be >= 1"),
        ("timeout_s=1e300", "timeout_s=1e+300: must lie in 1 .. 86400 seconds"),
        ("bench.tokens=[[1]]", "bench.tokens=[[1]]: must be a list of integers"),
        ("ranks='2'", "ranks='2': write it plainly, as ranks=2"),
        ("ranks=1_0", "ranks=1_0: write it plainly, as ranks=10"),
        ("model.route_scale=nan", "model=kimi_k3: route_scale=nan must be a positive number"),
        ("bench.widths=256", "bench.widths=256: must be a list of integers"),
        ("bench.dtypes=[fp8]", "bench.dtypes=[fp8]: no such dtype; choose bf16, fp16, fp32"),
        ("bench.dispatchers=[hop]", "bench.dispatchers=[hop]: no such dispatcher; choose all_to"),
        ("model=hf", "model=hf: needs model.path=FILE, the config.json of a released model"),
        ("model.path=/x", "model.path=/x: only model=hf reads a file"),
        ("steps", "steps: expected key=value"),
        ("ep=8", "ep=8: no such key (did you mean ep_size?); wideep --help lists them"),
        ("stepz", "stepz: expected key=value (did you mean steps?)"),
        ("steps==3", "steps==3: cannot read the value; a text with such signs is written 'steps"),
        ("steps=1,2", "steps=1,2: one value expected; a list is written steps=[a,b]"),
        ("+foo=1", "+foo=1: write foo=value, without + ~ or @"),
        ("~steps", "~steps: write steps=value, without + ~ or @"),
        ("model@scale=kimi_k2", "model@scale=kimi_k2: write model=value, without + ~ or @"),
    ],
)
def test_a_refusal_is_one_line_with_name_value_and_rule(overrides, message):
    said = refusal(*overrides.split())
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("job=bench tokens=64", "tokens=64: job=bench does not use it; set bench.tokens"),
        ("job=bench dtype=bf16", "dtype=bf16: job=bench does not use it; set bench.dtypes"),
        ("job=bench wire.combine=fp32", "wire.combine=fp32: job=bench does not use it"),
        ("bench.warmup=1", "bench.warmup=1: job=emulate does not use it"),
        ("job=predict warmup=2", "warmup=2: job=predict does not use it"),
        ("job=predict kernel=false", "kernel=false: job=predict does not use it"),
        ("job=bench mode=training", "mode=training: job=bench does not use it"),
        ("job=bench ep_size=4", "ep_size=4: job=bench does not use it"),
    ],
)
def test_a_key_that_the_job_would_ignore_is_refused(overrides, message):
    assert refusal(*overrides.split()) == message


def test_a_key_of_another_choice_is_refused():
    """moe.combinations has the table; a word that changes nothing is refused as well."""
    for words, message in (
        ("router.reuse=0.295", "router=uniform does not use it; it belongs to router=markov"),
        (
            "dispatcher.capacity_factor=1.25",
            "dispatcher=rank_dedup does not use it; it belongs to dispatcher=padded",
        ),
    ):
        assert refusal(words) == f"{words}: {message}"
    assert compose(["router=markov", "router.reuse=0.5"]).router.reuse == 0.5
    assert compose(["mode=training", "wire.backward=fp32"]).wire.backward == "fp32"


def test_what_cannot_be_planned_is_refused_before_any_rank_starts(tmp_path):
    missing = tmp_path / "nowhere.npz"
    for words in (
        ("router=replay", f"router.path={missing}"),
        ("placement=file", f"placement.path={missing}"),
    ):
        said = refusal(*words)
        assert str(missing) in said and "no such file" in said and "\n" not in said
    said = refusal("router=skew", "router.max_over_mean=100")
    assert said.startswith("router.max_over_mean=100.0: from 1.0000 to ")


@pytest.mark.parametrize("job", JOBS)
def test_every_key_is_used_by_some_job(job):
    """UNUSED and USED name real keys, and leave each job its own."""
    first_parts = {name.partition(".")[0] for name in keys()}
    assert (job in USED) != (job in UNUSED)
    assert set(USED.get(job, UNUSED.get(job, ()))) < first_parts | set(keys())
    unused = [
        set(UNUSED[other]) if other in UNUSED else first_parts - {*USED[other]} for other in JOBS
    ]
    assert not set.intersection(*unused) - {"job"}
    for name, owners in JOBS_OF.items():
        assert name in first_parts | set(keys()) and set(owners) <= set(JOBS)


def test_the_last_word_of_a_key_wins_whatever_came_before():
    assert compose(["ranks=7", "tokens=abc", "tokens=[1,2]", "ranks=2"]).tokens == (1, 2)


def test_a_refusal_stays_one_line_whatever_was_typed():
    assert refusal("steps=a\nb").startswith("steps=a b: cannot read the value")
    assert refusal("a\nb") == "a b: expected key=value"


HF_CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_a_released_model_is_read_and_typed_values_win(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HF_CONFIG))
    config = compose(["model=hf", f"model.path={tmp_path}", "model.top_k=4"])
    assert (config.model.num_experts, config.model.hidden_size) == (8, 64)
    assert config.model.top_k == 4 and config.model.path == str(tmp_path)
    assert refusal("model=hf", f"model.path={file}", "model.top_k=9").endswith(
        "top_k=9 exceeds num_experts=8"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "llama"}', "is not a mixture-of-experts model"),
        ('{"num_experts": 8, "moe_layer_freq": "x", "num_hidden_layers": 2}', "model.path="),
    ],
)
def test_a_missing_or_foreign_file_is_refused(tmp_path, content, said):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    message = refusal("model=hf", f"model.path={file}")
    assert message.startswith(f"model.path={file}") and said in message and "\n" not in message


def test_an_output_dir_that_exists_is_refused(tmp_path):
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "nowhere")
    for taken in (tmp_path, dangling):
        message = refusal(f"output_dir={taken}")
        assert message == f"output_dir={taken}: exists; choose a new folder"


@pytest.mark.parametrize("folder", ["/dev/null/results", "/proc/results"])
def test_an_output_dir_that_cannot_be_written_is_refused(folder):
    """As root too, to whom permission bits say nothing."""
    if not os.path.exists(os.path.dirname(folder)):
        pytest.skip("no /proc here")
    assert refusal(f"output_dir={folder}").startswith(f"output_dir={folder}: cannot write in /")


def test_checking_an_output_dir_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose([f"output_dir={tmp_path}/a/b/c"])
    compose([])
    assert os.listdir(tmp_path) == []
