"""How the body of a test gets to the ranks, and what it says there gets back.

The ranks are copies of pytest as it was after collection (comm.rank_server): they have the very
test functions, however these were made. Only the values of fixtures travel, pickled, with what a
body may have around it: working folder, environment, warning filters.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.assertion import pytest_runtest_protocol as explaining_assertions

from moe.rank_report import describe, named

if TYPE_CHECKING:
    from comm.ranks import Outcome, RankPool, RankServer
    from comm.world import World

# Fixtures that reach into pytest's own process, and what to do instead.
HERE_ONLY = {
    "request": "take what you need from it in a fixture",
    "capsys": "what ranks print is shown with a failure",
    "capfd": "what ranks print is shown with a failure",
    "capsysbinary": "what ranks print is shown with a failure",
    "capfdbinary": "what ranks print is shown with a failure",
    "caplog": "attach a handler to the logger in the body",
    "recwarn": "use pytest.warns in the body",
    "pytester": "start the inner pytest without ranks",
    "record_property": "record in a fixture",
}
OWN_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class OnRank:
    """Stands for a value that only a rank has: its number, its world, a monkeypatch of its own."""

    name: str

    def of(self, world: World, stack: contextlib.ExitStack) -> Any:
        if self.name == "monkeypatch":
            return stack.enter_context(pytest.MonkeyPatch.context())
        return world.rank if self.name == "rank" else world


@dataclass(frozen=True)
class Body:
    """One test for the ranks.

    values: argument -> pickled value; given: arguments that parametrize gave, which ranks have
    state: of the instance, for a method
    """

    nodeid: str
    values: Mapping[str, bytes]
    given: tuple[str, ...]
    state: bytes
    cwd: str
    environ: Mapping[str, str]
    filters: Sequence[tuple]


@dataclass
class Ranks:
    """The pools of a session, one for each number of ranks that was asked for.

    items: node id -> test, as collected
    """

    items: Mapping[str, pytest.Function]
    _server: RankServer | None = None
    _pools: dict[int, RankPool] = field(default_factory=dict)

    def start(self) -> None:
        """Fork the server, before any test has run. Raises pytest.UsageError."""
        if sys.platform != "linux":
            raise pytest.UsageError(f"tests with the mark ranks need Linux; this is {sys.platform}")
        from comm.rank_server import RankServer

        _collected.clear()
        _collected.update(self.items)
        self._server = RankServer()

    def run(self, item: pytest.Function, world_size: int, deadline_s: float) -> None:
        """Raises pytest's outcomes: failed with what all ranks say, or skipped."""
        body = _body(item)
        pool = self._pool(world_size)
        try:
            outcome = pool.run(on_rank, body, deadline_s=deadline_s)
            _show_output(item, pool)
        finally:
            if not pool.usable:
                self._pools.pop(world_size).close()
        _judge(outcome)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _pool(self, world_size: int) -> RankPool:
        from comm.ranks import RankPool

        if world_size not in self._pools:
            assert self._server is not None
            self._pools[world_size] = RankPool(self._server, world_size)
        return self._pools[world_size]


_collected: dict[str, pytest.Function] = {}  # as the ranks have them


# -- in pytest's process ---------------------------------------------------------------------------


def _body(item: pytest.Function) -> Body:
    values, given = {}, []
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if item.nodeid not in _collected:
        pytest.fail(f"{item.nodeid} was made after collection: the ranks do not have it", False)
    for name in item._fixtureinfo.argnames:
        value = item.funcargs[name]
        if name in HERE_ONLY:
            _refuse(f"{name} works in pytest's process only: {HERE_ONLY[name]}")
        if name in params and params[name] is value:
            given.append(name)
            continue
        value = OnRank("monkeypatch") if isinstance(value, pytest.MonkeyPatch) else value
        values[name] = _pickled(f"the value of fixture {name}", value)
    instance = getattr(item, "instance", None)
    state = _pickled("the test's instance", vars(instance) if instance is not None else None)
    environ = {key: text for key, text in os.environ.items() if key not in OWN_ENVIRONMENT}
    filters = list(warnings.filters)
    return Body(item.nodeid, values, tuple(given), state, os.getcwd(), environ, filters)


def _pickled(what: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever a __reduce__ of the user's raises
        why = str(error)
    _refuse(
        f"{what} cannot be sent to them ({why}): make it in the body, or let the fixture return"
        " what it is made from"
    )


def _refuse(why: str) -> NoReturn:
    pytest.fail(f"usage: a test on ranks: {why}", pytrace=False)


def _show_output(item: pytest.Function, pool: RankPool) -> None:
    for rank in range(pool.world_size):
        text = pool.output(rank)
        if not text:
            continue
        if item.config.getoption("capture") == "no":
            print("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), end="")
        else:
            item.add_report_section("call", f"stdout of rank {rank}", text)


def _judge(outcome: Outcome) -> None:
    failures = outcome.failures
    if failures and all(one.kind == "XFailed" for one in outcome.reports):  # pytest.xfail()
        pytest.xfail(failures[0].error.partition(": ")[2])
    if failures:
        pytest.fail(describe(failures, len(outcome.reports)), pytrace=False)
    skipped = {one.rank: one.value for one in outcome.reports if one.value is not None}
    if len(skipped) == len(outcome.reports):
        pytest.skip(skipped[0])
    if skipped:
        pytest.fail(f"{named(skipped)} skipped and the others did not: all must", pytrace=False)


# -- on a rank -------------------------------------------------------------------------------------


def on_rank(world: World, body: Body) -> str | None:
    """Run a body; why it skipped, if it did. What it raises brings pytest's text as `details`."""
    item = _collected[body.nodeid]
    with contextlib.ExitStack() as stack:
        _surround(body, stack)
        try:
            values = {name: pickle.loads(value) for name, value in body.values.items()}
            for name, value in values.items():
                if isinstance(value, OnRank):
                    values[name] = value.of(world, stack)
            values |= {name: item.callspec.params[name] for name in body.given}
            _function(item, body)(**values)
        except pytest.skip.Exception as skipped:
            return str(skipped.msg)
        except BaseException as error:
            error.details = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
            raise
    return None


def _function(item: pytest.Function, body: Body) -> Any:
    """The test function; a method with an instance as pytest's own has been set up."""
    state = pickle.loads(body.state)
    if state is None:
        return item.obj
    instance = object.__new__(item.cls)
    vars(instance).update(state)
    return getattr(instance, item.originalname)


def _surround(body: Body, stack: contextlib.ExitStack) -> None:
    """What a body finds around it is pytest's, and the same whatever ran before."""
    os.chdir(body.cwd)
    own = {name: os.environ[name] for name in OWN_ENVIRONMENT if name in os.environ}
    os.environ.clear()
    os.environ.update(body.environ)
    os.environ.update(own)
    random.seed(0)
    sys.modules["torch"].manual_seed(0)
    sys.modules["numpy"].random.seed(0)
    stack.enter_context(warnings.catch_warnings())
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(body.filters):
        texts = [getattr(one, "pattern", one) or "" for one in (message, module)]
        warnings.filterwarnings(action, texts[0], category, texts[1], line)
    stack.enter_context(_explained(_collected[body.nodeid]))


@contextlib.contextmanager
def _explained(item: pytest.Function) -> Iterator[None]:
    """Have failed assertions compare their two sides, as in pytest's process."""
    protocol = explaining_assertions(item)
    next(protocol)
    try:
        yield
    finally:
        protocol.close()


def is_plain(item: pytest.Item) -> str:
    """Why a test cannot run on ranks; "" where it can."""
    if not isinstance(item, pytest.Function):
        return "is no test function"
    function = inspect.unwrap(item.obj)
    if item.cls is not None and hasattr(item.cls, "assertEqual"):
        return "is a method of unittest.TestCase"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "is a coroutine or a generator"
    if getattr(item.obj, "is_hypothesis_test", False):
        return "draws its examples with hypothesis, on each rank others"
    return ""
