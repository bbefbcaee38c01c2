"""The pages of pools, request and fabric: their figures, their refusals, and what they import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_hf_config import KIMI_K3

from comm.analytic.caches import Cache
from moe.config import compose
from moe.jobs import fabric, pools, request
from moe.pools import cache_of, plan_memory, rank_of, served_sequences, weights_of
from moe.settings import ConfigError

ROOT = Path(__file__).parent.parent
JOBS = {"pools": pools, "request": request, "fabric": fabric}
CHECKPOINT = 1_560_860_324_864


def page(capsys, job: str, *words: str) -> str:
    """What a job prints, every line checked for width and signs; blanks in a row become one."""
    assert JOBS[job].launch(compose([f"job={job}", *words])) == 0
    text = capsys.readouterr().out
    assert text.isascii() and max(map(len, text.splitlines())) <= 100
    return " ".join(text.split())


def refusal(job: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        JOBS[job].launch(compose([f"job={job}", *words]))
    return str(caught.value)


H200 = ("hardware=h200_sxm", "ep_size=64", "tokens=128")


def test_the_page_of_64_h200(capsys):
    text = page(capsys, "pools", *H200)
    for said in (
        "2,779,931,837,184 parameters",
        "routed experts, packed 2,722.74 4 1,361.4",
        "their block scales - 0.25 85.1",
        "one copy 2,779.93 4.492 1,560.9",
        "in 4 bits 1.390 TB, in 16 bits 5.560 TB",
        "14 of 896 experts a layer, 1/2 of a copy of everything else",
        "memory 140.4 GiB = 150.8 GB (reported)",
        "routed experts 21.0 22.6 15.0 %",
        "nominal, GB 131.3 141.0 12 13",
        "nominal, as GiB 141.0 151.4 11 12",
        "27,648 B a token, 449.4 MB whatever its length; 4.073 GB at 131,072 tokens",
        "71.0 % less than if every layer cached; break-even at 5,653 tokens",
        "offload not needed",
        "128 806.7 1.414 TB",
        "3.11 GiB at 128 tokens a rank; within 4 GiB at most 164 tokens fit",
    ):
        assert said in text, said


def test_the_weights_of_the_configuration_are_the_checkpoint():
    weights = weights_of(compose(["job=pools"]).model)
    assert weights.stored_bytes == CHECKPOINT
    assert round(weights.read_bytes(1, 16) / 1e9) == 138
    half = compose(["job=pools", "model.weights.linear_bits=8", "model.weights.expert_bits=8"])
    assert weights_of(half.model).packed_bytes == 2 * weights.packed_bytes
    assert CHECKPOINT / 2 < weights_of(half.model).stored_bytes - weights.packed_bytes < CHECKPOINT


def test_the_pools_of_a_rank_add_up_and_the_machine_is_full():
    config = compose(["job=pools", *H200])
    plan, facts = plan_memory(config), pools.facts_of(config)
    used = sum(facts["rank"].values())
    assert used + facts["offload"]["free"] == pytest.approx(plan.rank.memory)
    assert plan.capacity == 32 * plan.rank_sequences > 0
    one_more = (plan.rank_sequences + 1) * plan.rank_cache.sequence_bytes(131_072)
    assert plan.cached_bytes <= plan.rank.left < one_more
    held = 64 * (plan.rank.routed + plan.rank.rest)
    assert plan.held_bytes == pytest.approx(held)


def test_experts_that_do_not_divide_and_redundant_ones():
    """72 ranks: 13 experts on 32 of them, 12 on 40; with 40 copies 13 on each."""
    uneven = plan_memory(compose(["job=pools", "ep_size=72"]))
    even = plan_memory(compose(["job=pools", "ep_size=72", "pools.redundant_experts=40"]))
    assert uneven.rank.routed == even.rank.routed == 92 * 13 * 17_547_264
    each = 92 * 17_547_264
    assert even.held_bytes - uneven.held_bytes == pytest.approx(40 * each)


def test_who_shares_attention():
    """States and heads are divided, latents are not; sharing leaves the most sequences room."""
    config = compose(["job=pools", *H200])
    served = {tp: served_sequences(config, 64, tp) for tp in (1, 2, 4, 8, 16, 32, 64)}
    assert served[1] == 0 and max(served, key=served.get) == 2
    assert plan_memory(config).tensor_parallel == 2
    assert plan_memory(compose(["job=pools"])).tensor_parallel == 8  # none of them has room
    assert rank_of(config, 64, 1).left < 0 <= rank_of(config, 64, 2).left
    whole, part = cache_of(config), cache_of(config, shards=4)
    assert part.token_bytes == whole.token_bytes
    assert part.state_bytes == whole.state_bytes / 4
    grouped = compose(["job=pools", "model=qwen3_235b_a22b"])
    assert cache_of(grouped, shards=2).token_bytes == cache_of(grouped).token_bytes / 2
    assert cache_of(grouped, shards=8).token_bytes == cache_of(grouped).token_bytes / 4


def test_what_keeps_an_accelerator_from_holding_its_share():
    """Each knob costs exactly what it says."""

    def left(*words: str) -> float:
        shared = "pools.tensor_parallel=2"
        return plan_memory(compose(["job=pools", *H200, shared, *words])).rank.left

    memory, usual = 143_771 * 2**20, left()
    assert left("pools.reserve=0") - usual == pytest.approx(0.1 * memory)
    assert left("pools.buffer=none") - usual == 3_339_721_728
    slots = "pools.redundant_experts=64"  # one more on each rank, and 64 slots in each buffer
    assert left("pools.buffer=none", slots) - left(slots) == 2 * (2 * 960 * 128 * 7280 + 3840)
    rank_major = 2 * 64 * 128 * 7168
    assert left("pools.buffer=none") - left("pools.buffer=rank_major") == rank_major
    share = 92 * 14 * 17_547_264 + 114_404_258_816 / 2
    assert usual - left("pools.overhead=0.05") == pytest.approx(0.05 * share)
    assert usual - left("pools.memory=nominal") == pytest.approx(0.9 * (memory - 141e9))


def test_a_known_state_and_other_formats_of_the_cache():
    config = compose(["job=pools", "cache.bits=8", "cache.state_bits=16", "cache.state_slots=5"])
    cache = cache_of(config)
    assert cache.token_bytes == 13_824
    assert cache.constant_bytes == 5 * 232_316_928


def test_windows_come_from_the_model():
    oss = cache_of(compose(["job=pools", "model=gpt_oss_120b"]))
    assert oss == Cache(1024, 16, 18, 18, 128)


def test_eight_gb200_need_help_and_nine_do_not(capsys):
    text = page(capsys, "pools")
    assert "missing 16.8 18.0 9.1 %" in text
    assert "needed: 16.8 GiB = 18.0 GB a rank do not fit; the host's memory takes them" in text
    assert "9 accelerators hold all but sequences without it" in text
    assert plan_memory(compose(["job=pools", "ep_size=9"])).rank.left > 0


def test_sequences_that_were_asked_for_and_do_not_fit(capsys):
    text = page(capsys, "pools", *H200, "pools.sequences=1000")
    assert "this page has 1,000 of them" in text and "offload needed" in text
    assert "accelerators hold all but sequences" not in text  # it is not the weights
    text = page(capsys, "pools", "hardware=b300_hgx", "ep_size=32", "pools.sequences=100000")
    assert "no lower tier that is known takes them" in text


def test_lengths_that_no_sequence_needs_or_reaches(capsys):
    """States alone outgrow the weights; a cache of windows never does."""
    many = page(capsys, "pools", "ep_size=4096")
    assert "or 61,440 sequences of any length" in many
    windows = ("model.attention.full_layers=0", "model.attention.window_layers=36")
    assert "of no length" in page(capsys, "pools", "model=gpt_oss_120b", *windows)


def test_the_page_of_a_request(capsys):
    words = ("ep_size=64", "wire.dispatch=mxfp8")
    text = page(capsys, "request", *words)
    assert "14.1375 rows leave its rank in a layer, 3,696 B there and 7,168 B back" in text
    assert "prefill and decode apart 8,192 675.9 MB 130.2 GB 0.52 %" in text
    copies = page(capsys, "request", *words, "dispatcher=all_to_all")
    assert "145.1 GB" in copies  # 15.75 of 16 copies leave their rank
    far = page(
        capsys,
        "request",
        *words,
        "request.prompt=404000",
        "request.cached=400000",
        "request.output=0",
    )
    assert "one instance, prefix from another 400,000 11.51 GB 56.52 GB 16.92 %" in far


def test_the_page_of_a_fabric(capsys):
    text = page(capsys, "fabric")
    assert "400 2 512 1,536 1,536 3.00 x 16 + 8" in text
    assert "800 2 1,024 3,072 3,072 3.00 x 32 + 16" in text
    assert "400 1 - - - - too few tiers" in text
    shared = page(capsys, "fabric", "hardware.nics_per_rank=0.5", "fabric.nic_Gbps=400")
    assert "400 2 256 768" in shared and "800 2" not in shared


@pytest.mark.parametrize(
    "job, words, said",
    [
        ("pools", "hardware=custom", "hardware=custom: memory_nominal_GB is not known; set"),
        ("pools", "pools.tensor_parallel=3", "pools.tensor_parallel=3: must divide the 8 ranks"),
        ("pools", "pools.redundant_experts=9999", "pools.redundant_experts=9999: 8 ranks hold"),
        ("pools", "pools.overhead=nan", "pools.overhead=nan: must be >= 0; nearest: 0"),
        ("pools", "pools.reserve=1.5", "pools.reserve=1.5: must be <= 0.99; nearest: 0.99"),
        ("pools", "model.attention.kind=null", "model.attention.kind: not known of this model"),
        ("pools", "steps=2", "steps=2: job=pools does not use it"),
        ("pools", "request.prompt=2", "request.prompt=2: belongs to job=request"),
        ("request", "request.cached=9000", "request.cached=9000: a part of request.prompt=8192"),
        ("request", "dispatcher=two_hop", "dispatcher=two_hop: job=request counts one exchange"),
        ("request", "cache.bits=0", "cache.bits=0.0: must be >= 1"),
        ("fabric", "hardware=mi355x", "hardware=mi355x: scale_out_GBps is not known; set"),
        ("fabric", "fabric.accelerators=99999", "fabric.tiers=2: switches of 64 ports join"),
    ],
)
def test_refusals_in_one_line(job, words, said):
    assert refusal(job, words).startswith(said)


def test_the_quoted_page_is_printed(capsys):
    """docs/memory.md: its text blocks, line by line and in order."""
    text = (ROOT / "docs" / "memory.md").read_text()
    blocks = [part.partition("```")[0].splitlines() for part in text.split("```text\n")[1:]]
    commands = (("pools", *H200), ("request", "ep_size=64", "wire.dispatch=mxfp8"))
    assert len(blocks) == len(commands)
    for block, (job, *words) in zip(blocks, commands, strict=True):
        assert f"wideep {job} {' '.join(words)}\n" in text
        JOBS[job].launch(compose([f"job={job}", *words]))
        lines, at = capsys.readouterr().out.splitlines(), 0
        for line in block:
            if line != "...":
                at = lines.index(line, at) + 1


def test_a_released_config_gives_the_same_page(capsys, tmp_path):
    """model=hf, from a file as it was released, and the built-in preset."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K3))
    from_file = page(capsys, "pools", "model=hf", f"model.path={tmp_path}")
    assert from_file.replace("kimi_linear", "kimi_k3") == page(capsys, "pools")
    typed = compose(
        ["job=pools", "model=hf", f"model.path={tmp_path}", "model.attention.full_layers=23"]
    )
    assert typed.model.attention.full_layers == 23  # typed values win


def test_no_torch_is_imported():
    look = (
        "import sys; from moe.__main__ import main;"
        "status = [main([job]) for job in ('pools', 'request', 'fabric')];"
        "sys.exit(f'{status} torch' if 'torch' in sys.modules else None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "PORTS" in done.stdout
