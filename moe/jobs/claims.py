"""job=claims: what others say of a network's traffic, worked out and judged; a run only on request.

conf/claims/, claims.path --> claims --> outcomes (comm.claims) --+--> one table, or one in full
                                run=true: runs of the emulator ---+
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from comm.analytic.expressions import nearest
from comm.analytic.quantity import QuantityError
from comm.claims.changes import changes
from comm.claims.form import Claim, ClaimError, Input, read_input
from comm.claims.judge import Outcome, evaluate, names_of, with_run
from comm.claims.scope import World
from comm.claims.words import outcome_words
from comm.report.answer import LABEL
from comm.report.claims_page import claim_page, claims_page
from comm.report.console import WIDTH, print_lines
from comm.report.layout import labelled
from moe.claim_files import read_claims, tables
from moe.conf_files import conf_dir
from moe.settings import Config, ConfigError
from moe.version import VERSION

DIFFERS = 3


def launch(config: Config) -> int:
    """Print the claims; 0, or 3 where a verdict is another one than recorded."""
    try:
        outcomes, world = judge(config)
        if config.run:
            outcomes = _decided_by_runs(outcomes)
        page = _page(config, outcomes, world)
    except ClaimError as error:
        raise ConfigError(str(error)) from error
    head = labelled(f"WideEP {VERSION}", _head(config, outcomes), WIDTH, LABEL, "bold")
    print_lines([*head, *page])
    return DIFFERS if any(outcome.differs for outcome in outcomes) else 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank judges, the others have nothing to do."""
    return launch(config) if os.environ.get("RANK", "0") == "0" else 0


def judge(config: Config) -> tuple[list[Outcome], World]:
    """The claims that were asked for, worked out; raises ClaimError."""
    found = read_claims(conf_dir() / "claims", {})
    if config.claims.path is not None:
        taken = {name: path for name, (_, path) in found.items()}
        own = Path(config.claims.path)
        if not own.is_dir():
            raise ClaimError(f"claims.path={own}: is no folder")
        found |= read_claims(own, taken)
    claims = _chosen([claim for claim, _ in found.values()], config.id)
    known = tables(config.model)
    world = World(known, _given(config.claims.set or (), claims, known))
    return [evaluate(claim, world) for claim in claims], world


def _chosen(claims: Sequence[Claim], name: str | None) -> list[Claim]:
    """All in the order of their rows, or those of one id or row: 18 means 18a and 18b."""
    ordered = sorted(claims, key=lambda claim: _row_key(claim.row))
    if name is None:
        return ordered
    chosen = [
        one
        for one in ordered
        if name in (one.id, one.row) or re.fullmatch(rf"{re.escape(name)}[a-z]", one.row)
    ]
    if not chosen:
        near = nearest(name, [claim.id for claim in claims])
        raise ClaimError(f"id={name}: no such claim{near}; wideep claims lists them")
    return chosen


def _row_key(row: str) -> tuple[bool, int, str]:
    """18b comes after 18a and before 19, a claim without a row last."""
    number = re.match(r"\d+", row)
    return number is None, int(number[0]) if number else 0, row


def _given(
    words: Sequence[str], claims: Sequence[Claim], known: Mapping[str, object]
) -> dict[str, Input]:
    """claims.set=[memory:141GiB,model.num_moe_layers:120] by name."""
    usable = dict.fromkeys(names_of(claims))
    given = {}
    for word in words:
        name, colon, value = (part.strip() for part in word.partition(":"))
        if not colon:
            raise ClaimError(f"claims.set={word}: write name:value")
        if name not in usable and name.partition(".")[0] not in known:
            raise ClaimError(
                f"claims.set={word}: no claim here has an input {name}{nearest(name, usable)}"
            )
        try:
            given[name] = read_input(f"claims.set={name}", value)
        except (ValueError, QuantityError) as error:
            raise ClaimError(str(error)) from error
    return given


def _decided_by_runs(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes with what a run counts as one more case, where the claim has a run."""
    from moe.jobs.claim_runs import figures_of

    commands = [plan.commands for one in outcomes if (plan := one.claim.run) is not None]
    if not commands:
        raise ClaimError("run=true: none of these claims is one that a run decides")
    figures = figures_of(words for plan in commands for words in plan.values())
    decided = []
    for outcome in outcomes:
        plan = outcome.claim.run
        if plan is not None:
            outcome = with_run(
                outcome, {name: figures[words] for name, words in plan.commands.items()}
            )
        decided.append(outcome)
    return decided


def _head(config: Config, outcomes: Sequence[Outcome]) -> str:
    runs = sum(outcome.claim.run is not None for outcome in outcomes)
    ran = f"; {runs} decided by runs, too" if config.run else ""
    return f"claims: {len(outcomes)} worked out from their formulas{ran}"


def _page(config: Config, outcomes: Sequence[Outcome], world: World) -> list:
    if config.id is None:
        return claims_page([outcome_words(outcome, {}) for outcome in outcomes], WIDTH)
    lines = []
    for outcome in outcomes:
        claim = outcome.claim
        turns = {
            case.setting: changes(claim, world, case.setting)
            for case in outcome.cases
            if case.setting in (claim.settings or {"": {}})
        }
        lines += claim_page(outcome_words(outcome, turns), WIDTH)
    return lines
