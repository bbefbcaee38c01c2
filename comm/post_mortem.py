"""Which rank is to blame when others waited in vain: the one that says nothing any more.

A collective that fails tells a rank only that *some* other did not answer. So each rank that it
fails on leaves word in the store by which the ranks met, and looks a moment later who has not:

    all have     somebody raised and says so itself, or the network failed
    some have not    they hang, or are gone; of these the one that had come least far is named

torch's monitored_barrier names a rank as well, but on rank 0 only, and only if rank 0 itself is
well and the default group unhurt. The store needs neither.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from comm.notebook import Address, Notebook, ask_for_stacks, read_note

WAIT_S = 1.0  # for the word of the others: when one collective fails, it fails on all within this
PREFIX = "wideep/"


class RankSilent(RuntimeError):
    """Ranks waited for one that does not answer.

    rank: that one; where: the last phase that it began, if it can be known here
    first: whether this is the rank to say so, where all can speak
    """

    def __init__(self, rank: int, where: str, text: str, first: bool) -> None:
        super().__init__(text)
        self.rank, self.where, self.first = rank, where, first


def introduce(rank: int, notebook: Notebook) -> None:
    """Tell the others where this rank can be found."""
    _store().set(f"{PREFIX}address/{rank}", json.dumps(asdict(notebook.address)))
    notebook.answer_signals()


def leave_word(rank: int, told: bool) -> None:
    """This rank has failed and knows it; told: it says so itself, and need not be blamed."""
    with contextlib.suppress(Exception):
        _store().set(f"{PREFIX}word/{rank}", "told" if told else "waited")


def somebody_told(world_size: int) -> bool:
    """Has a rank that failed of itself said so, or another named it?"""
    with contextlib.suppress(Exception):
        store = _store()
        words = [f"{PREFIX}word/{one}" for one in range(world_size)]
        return any(store.check([word]) and store.get(word) == b"told" for word in words)
    return False


def find_silent(
    rank: int, world_size: int, notebook: Notebook, waited_s: float
) -> RankSilent | None:
    """Blame a rank that does not answer; None where all do, or the store itself is lost.

    waited_s: how long a collective waits. Keeps the stacks of this rank, and of all silent ones of
    its host, in the results. Must be called where the error that it is about is being handled.
    """
    leave_word(rank, told=False)
    try:
        store = _store()
        silent = _silent(store, world_size)
        if not silent:
            return None
        addresses = [Address(**_read(store, f"address/{one}")) for one in range(world_size)]
    except Exception:  # the store ended with the rank that held it
        return None
    heard = [one for one in range(world_size) if one not in silent]
    here = [one for one in silent if addresses[one].host == notebook.address.host]
    notes = {one: read_note(addresses[one].note) for one in here}
    alive = [one for one in here if Path(f"/proc/{addresses[one].pid}").exists()]
    if alive or len(here) < len(silent):
        _keep(notebook.results, rank, traceback.format_exc())
    if rank == min(one for one in heard if addresses[one].host == notebook.address.host):
        stacks = ask_for_stacks([addresses[one] for one in alive])
        for one, text in zip(alive, stacks, strict=True):
            _keep(notebook.results, one, text)
    guilty = min(silent, key=lambda one: notes[one].begun if one in notes else 1 << 31)
    where = str(notes[guilty]) if guilty in notes else ""
    what = "hangs" if guilty in alive or guilty not in here else "is gone"
    others = [str(one) for one in silent if one != guilty]
    also = f"; no word from {', '.join(others)} either" if others else ""
    text = f"{what}: the others waited for it (timeout_s={waited_s:g}){also}"
    if what == "hangs" and notebook.results is not None:
        text += f"; stacks of all ranks are in {notebook.results}/stacks.rank*.txt"
    return RankSilent(guilty, where, text, first=rank == min(heard))


def _silent(store: Any, world_size: int) -> list[int]:
    """The ranks that leave no word in time."""
    silent, deadline = list(range(world_size)), time.monotonic() + WAIT_S
    while silent and time.monotonic() < deadline:
        silent = [one for one in silent if not store.check([f"{PREFIX}word/{one}"])]
        time.sleep(0.05)
    return silent


def _read(store: Any, name: str) -> dict[str, Any]:
    store.set_timeout(timedelta(seconds=WAIT_S))
    return json.loads(store.get(PREFIX + name))


def _keep(results: Path | None, rank: int, text: str) -> None:
    if results is not None and text:
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            (results / f"stacks.rank{rank}.txt").write_text(text, encoding="utf-8")


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
