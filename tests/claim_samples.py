"""Claims for the tests: those of conf/claims, and short ones made on the spot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from comm.claims.form import Claim, read_claim
from comm.claims.judge import Outcome, evaluate
from comm.claims.scope import World
from moe.claim_files import read_claims, tables
from moe.conf_files import conf_dir
from moe.config import compose

FOLDER = conf_dir() / "claims"


@cache
def all_tables() -> dict:
    return tables(compose([]).model)


@cache
def all_claims() -> dict[str, Claim]:
    return {name: claim for name, (claim, _) in read_claims(FOLDER, {}).items()}


@cache
def outcome(name: str) -> Outcome:
    return evaluate(all_claims()[name], World(all_tables()))


def given(**values: object) -> World:
    """The world with other values; `model__top_k` stands for model.top_k."""
    from comm.claims.form import read_input

    named = {name.replace("__", "."): read_input(name, value) for name, value in values.items()}
    return World(all_tables(), named)


def entry(**fields: object) -> dict:
    """A small claim, as YAML would bring it; a field of None is left out."""
    usual = yaml.safe_load(
        """
        id: sample
        claim: Seven racks of 72 have 504 accelerators.
        source: these tests
        says: 504 accelerators
        inputs: {racks: 7, in_a_rack: 72 accelerators}
        formula: arithmetic
        expression: racks * in_a_rack
        verdict: holds
        why: Seven times 72.
        """
    )
    return {name: value for name, value in {**usual, **fields}.items() if value is not None}


def judged(**fields: object) -> Outcome:
    """The outcome of a small claim."""
    return evaluate(read_claim(entry(**fields)), World(all_tables()))


def write(folder: Path, name: str, *claims: dict) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump({"claims": list(claims)}, sort_keys=False))
    return path
