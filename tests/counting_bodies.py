"""Code that uses torch.distributed in every way there is, for tests/test_counting.py."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_to_all_single  # a name of its own, as many programs have it
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce

from comm.counting import count_traffic


def floats(number):
    return torch.ones(number)


def _exchange(group, n, place, k):
    """Row sizes that differ from pair to pair; some are 0."""
    rows = [[(3 * src + dst) % 4 * k for dst in range(n)] for src in range(n)]
    out, into = rows[place], [row[place] for row in rows]
    return torch.ones(sum(out), 3), torch.empty(sum(into), 3), into, out


def _even(group, n, place, k):
    all_to_all_single(torch.empty(n * k), floats(n * k), group=group)


def _uneven_later(group, n, place, k):
    message, received, into, out = _exchange(group, n, place, k)
    dist.all_to_all_single(received, message, into, out, group=group, async_op=True).wait()


def _listed(group, n, place, k):
    dist.all_to_all(list(torch.empty(n, k)), list(torch.ones(n, k)), group=group)


def _ring(group, n, place, k):
    """Point to point, each rank to the next."""
    ranks = dist.get_process_group_ranks(group)
    there, back = ranks[(place + 1) % n], ranks[(place - 1) % n]
    sends = dist.P2POp(dist.isend, floats(k + place), there, group)
    takes = dist.P2POp(dist.irecv, torch.empty(k + (place - 1) % n), back, group)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()


def _send(group, n, place, k):
    ranks = dist.get_process_group_ranks(group)
    if place == 0:
        dist.send(floats(k), ranks[n - 1], group)
    if place == n - 1:
        dist.recv(torch.empty(k), None, group)  # from whomever


def _coalesced(group, n, place, k):
    with dist._coalescing_manager(group, async_ops=True) as work:
        dist.all_reduce(floats(k), group=group)
        dist.all_reduce(floats(2 * k), group=group)
    work.wait()


def _backward(group, n, place, k):
    tokens = floats(n * k).requires_grad_()
    functional.all_to_all_single_autograd(tokens, [k] * n, [k] * n, group).sum().backward()


def _differentiable(group, n, place, k):
    differentiable_all_reduce(floats(k).requires_grad_(), group=group).sum().backward()


def root_of(group):
    return dist.get_process_group_ranks(group)[-1]


def lists(group, n, k):
    return [torch.empty(k) for _ in range(n)] if dist.get_rank() == root_of(group) else None


WAYS = {
    "all_to_all_single": _even,
    "all_to_all_single, uneven, async": _uneven_later,
    "all_to_all": _listed,
    "all_gather": lambda g, n, p, k: dist.all_gather(list(torch.empty(n, k)), floats(k), group=g),
    "all_gather_into_tensor": lambda g, n, p, k: dist.all_gather_into_tensor(
        torch.empty(n * k), floats(k), group=g
    ),
    "reduce_scatter": lambda g, n, p, k: dist.reduce_scatter(
        torch.empty(k), list(torch.ones(n, k)), group=g
    ),
    "reduce_scatter_tensor": lambda g, n, p, k: dist.reduce_scatter_tensor(
        torch.empty(k), floats(n * k), group=g
    ),
    "all_reduce": lambda g, n, p, k: dist.all_reduce(floats(k), group=g),
    "all_reduce, bytes": lambda g, n, p, k: dist.all_reduce(floats(k).to(torch.uint8), group=g),
    "coalesced": _coalesced,
    "broadcast": lambda g, n, p, k: dist.broadcast(floats(k), root_of(g), group=g),
    "reduce": lambda g, n, p, k: dist.reduce(floats(k), root_of(g), group=g),
    "gather": lambda g, n, p, k: dist.gather(floats(k), lists(g, n, k), root_of(g), group=g),
    "scatter": lambda g, n, p, k: dist.scatter(torch.empty(k), lists(g, n, k), root_of(g), group=g),
    "send": _send,
    "batch_isend_irecv": _ring,
    "barrier": lambda g, n, p, k: dist.barrier(g),
    "functional all_to_all": lambda g, n, p, k: functional.all_to_all_single(
        floats(n * k), [k] * n, [k] * n, g
    ).sum(),
    "functional all_to_all, backward": _backward,
    "functional all_gather": lambda g, n, p, k: functional.all_gather_tensor(
        floats(k), 0, g
    ).sum(),
    "functional reduce_scatter": lambda g, n, p, k: functional.reduce_scatter_tensor(
        floats(n * k), "sum", 0, g
    ).sum(),
    "functional all_reduce": lambda g, n, p, k: functional.all_reduce(floats(k), "sum", g).sum(),
    "functional broadcast": lambda g, n, p, k: functional.broadcast(floats(k), n - 1, g).sum(),
    "functional, several": lambda g, n, p, k: [
        functional.all_reduce_coalesced([floats(k), floats(3)], "sum", g)[0].sum(),
        functional.all_gather_into_tensor_coalesced([floats(k), floats(3)], g)[0].sum(),
        functional.reduce_scatter_tensor_coalesced(
            [floats(n * k), floats(n)], "sum", [0, 0], g
        )[0].sum(),
    ],
    "autograd of torch.distributed.nn": _differentiable,
}  # fmt: skip


def every_way(world, sizes, parts):
    """The traffic of each way, counted and witnessed, in the whole world and in one of its parts.

    sizes: elements of a tensor; parts: of the world, one group each
    """
    found = {}
    groups = [dist.new_group(part) for part in parts]
    part = next(group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER)
    warnings.simplefilter("ignore")  # names that torch would rather see replaced
    for name, use in WAYS.items():
        for group in (dist.group.WORLD, part):
            n, place = group.size(), group.rank()
            with count_traffic(kernel=True) as traffic:
                for k in sizes:
                    use(group, n, place, k)
            found[name, group is part] = traffic.gather()
    return found if world.rank == 0 else None
