"""Tests on ranks: the pytest plugin, which comes with the package.

    @pytest.mark.ranks(8)               the body runs on 8 gloo ranks; torch.distributed is there
    @pytest.mark.ranks([2, 4, 8])       a test for each number
    rank, world_size, world             fixtures for such bodies (world: comm.world.World)
    emulate                             a fixture: runs the emulator, returns the run's record

Nothing heavy is imported before a marked test is about to run. docs/testing.md explains the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from comm.report.reading import Result
    from moe.ranked import Ranks

TIMEOUT = "ranks_timeout"
RANKS: pytest.StashKey[Ranks] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(TIMEOUT, "seconds that the body of a test may take on its ranks", default="60")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(n, timeout=None): run the body on n gloo ranks; a list makes a test for each number",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    numbers = mark.args[0] if mark is not None and mark.args else None
    if isinstance(numbers, list | tuple) and _wrong_numbers(numbers) is None:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", numbers, ids=[f"{one}ranks" for one in numbers])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        wrong = _misuse(item)
        if wrong:
            raise pytest.UsageError(f"{item.nodeid}: {wrong}")
    _default_timeout(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    marked = {item.nodeid: item for item in session.items if _is_marked(item)}
    if marked and not session.config.option.collectonly:
        from moe.ranked import Ranks

        ranks = session.config.stash[RANKS] = Ranks(marked)
        ranks.start()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The call of a marked test, its fixtures being set up."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    timeout = mark.kwargs.get("timeout") or _default_timeout(pyfuncitem.config)
    pyfuncitem.config.stash[RANKS].run(pyfuncitem, _number(pyfuncitem), timeout)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if RANKS in config.stash:
        config.stash[RANKS].close()
        del config.stash[RANKS]


# -- the mark --------------------------------------------------------------------------------------


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("ranks") is not None


def _number(item: pytest.Function) -> int:
    """Of ranks."""
    mark = item.get_closest_marker("ranks")
    number = mark.args[0]
    return number if isinstance(number, int) else item.callspec.params["world_size"]


def _misuse(item: pytest.Item) -> str | None:
    """What is wrong with the mark of a test, in words."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    if len(mark.args) != 1 or set(mark.kwargs) - {"timeout"}:
        return "the mark is ranks(n) or ranks([n, ...]), with timeout=seconds if need be"
    timeout = mark.kwargs.get("timeout")
    if timeout is not None and not (isinstance(timeout, Real) and timeout > 0):
        return f"ranks(..., timeout={timeout!r}): seconds, more than 0"
    numbers = mark.args[0]
    wrong = _wrong_numbers(numbers if isinstance(numbers, list | tuple) else [numbers])
    if wrong:
        return wrong
    from moe.ranked import is_plain

    why = is_plain(item)
    return f"it {why}, and cannot run on ranks" if why else None


def _wrong_numbers(numbers: list | tuple) -> str | None:
    for one in numbers:
        if not isinstance(one, int) or isinstance(one, bool) or not 1 <= one <= 250:
            return f"ranks({one!r}): a number of ranks is a whole number from 1 to 250"
    if not numbers or len(set(numbers)) < len(numbers):
        return f"ranks({list(numbers)}): at least one number, and none twice"
    return None


def _default_timeout(config: pytest.Config) -> float:
    text = config.getini(TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"{TIMEOUT}={text}: seconds, more than 0")
    return seconds


# -- fixtures --------------------------------------------------------------------------------------


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many ranks the test runs on."""
    return _number(_marked(request))


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """In the body: the number of the rank, as dist.get_rank()."""
    return _on_rank(request, "rank")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """In the body: the comm.world.World of the rank."""
    return _on_rank(request, "world")


def _on_rank(request: pytest.FixtureRequest, name: str) -> Any:
    from moe.ranked import OnRank

    _marked(request)
    return OnRank(name)


def _marked(request: pytest.FixtureRequest) -> pytest.Function:
    if not _is_marked(request.node):
        pytest.fail(f"usage: {request.fixturename} needs @pytest.mark.ranks(n)", pytrace=False)
    return request.node


@pytest.fixture
def emulate(tmp_path: Path) -> Callable[..., Result]:
    """Runs the emulator as `moe.emulate` does, in pytest's process; its files go to tmp_path."""
    from moe.api import emulate as emulated

    runs = count()

    def run(*settings: Any, **keys: Any) -> Result:
        given = {"output_dir": str(tmp_path / f"emulate{next(runs)}")} | keys
        return emulated(*settings, **given)

    return run
