"""A suite with tests on ranks, good and bad, that tests/test_pytest_plugin.py runs."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from comm.counting import count_traffic


@pytest.fixture
def letters(tmp_path):
    """A value that travels, and a folder that all ranks share."""
    return {"a": torch.arange(3), "folder": tmp_path}


@pytest.fixture
def maker():
    return lambda: 3


@pytest.fixture
def scale(world_size):
    """A fixture that depends on how many ranks there are."""
    return 10 * world_size


@pytest.mark.ranks(4)
def test_values_of_fixtures(rank, world_size, world, letters, scale):
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert world.rank == rank and scale == 40 and int(os.environ["RANK"]) == rank
    assert letters["a"].tolist() == [0, 1, 2]
    (letters["folder"] / str(rank)).touch()
    dist.barrier()
    assert len(list(letters["folder"].iterdir())) == 4


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("function", [lambda x: x + 1, lambda x: 2 * x])
def test_each_number(function, world_size):
    assert function(1) == 2 and dist.get_world_size() == world_size


@pytest.mark.ranks(4)
def test_one_is_wrong(rank):
    print("on rank", rank)
    if rank == 2:
        assert [1, 2, rank] == [1, 2, 3]
    dist.barrier()


@pytest.mark.ranks(4)
def test_all_are_wrong(rank):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 5


@pytest.mark.ranks(3)
def test_two_are_wrong(rank):
    if rank:
        raise KeyError(rank)


@pytest.mark.ranks(3, timeout=1)
def test_one_hangs(rank):
    if rank == 1:
        time.sleep(60)
    dist.barrier()


@pytest.mark.ranks(3, timeout=1)
def test_one_stays_away(rank):
    if rank == 0:
        dist.barrier()


@pytest.mark.ranks(4)
def test_one_is_killed(rank):
    if rank == 3:
        os.kill(os.getpid(), 9)
    dist.barrier()


@pytest.mark.ranks(4)
def test_after_that(rank):
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == 6


class TestMethods:
    def setup_method(self):
        self.number = 5

    @pytest.mark.ranks(2)
    def test_method(self, monkeypatch):
        assert self.number == 5
        monkeypatch.setenv("LEFT_BEHIND", "1")
        dist.new_group([0, 1])


@pytest.mark.ranks(2)
def test_nothing_is_left(tmp_path, monkeypatch):
    assert "LEFT_BEHIND" not in os.environ
    assert len(dist.distributed_c10d._world.pg_map) == 2  # of all, and the metered one


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_A_FIXTURE", "yes")
    return tmp_path


@pytest.mark.ranks(2)
def test_folder_and_environment(elsewhere):
    assert os.getcwd() == str(elsewhere) and os.environ["FROM_A_FIXTURE"] == "yes"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [0, 1])
def test_random_numbers_are_the_same_in_each_test(again, rank):
    every = [None, None]
    dist.all_gather_object(every, torch.rand(1).item())
    assert every == [torch.manual_seed(0) and torch.rand(1).item()] * 2


@pytest.mark.ranks(2)
def test_warnings_are_errors():
    warnings.warn("as in pytest itself", stacklevel=1)


@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not today")


@pytest.mark.ranks(2)
def test_expects_to_fail():
    pytest.xfail("not yet")


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.ranks(2)
def test_raises_an_error_without_a_text():
    raise Mute


@pytest.mark.ranks(2)
def test_one_skips(rank):
    if rank == 0:
        pytest.skip("not on all")


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_known_to_fail():
    raise AssertionError


@pytest.mark.ranks(2)
def test_closure_as_a_fixture(maker):
    pass


@pytest.mark.ranks(2)
def test_capsys(capsys):
    pass


def test_rank_without_ranks(rank):
    pass


@pytest.mark.ranks(3)
def test_counting(rank):
    with count_traffic() as traffic:
        dist.all_reduce(torch.ones(10))
    assert traffic.gather().bytes(moved=True) == 2 * 2 * 40
