"""Code that uses torch.distributed in every way there is, for tests/test_counting.py."""

from __future__ import annotations

import threading
import warnings

import pytest
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


def due(name, n, src, dst, k):
    """Bytes that one rank needs from another, for each of WAYS, in words as plain as can be."""
    away, last = src != dst, n - 1
    share = [4 * (k // n + (place < k % n)) for place in range(n)]
    double = [4 * (3 * k // n + (place < 3 * k % n)) for place in range(n)]
    bytes_each = [k // n + (place < k % n) for place in range(n)]
    three = [4 * ((k + 3) // n + (place < (k + 3) % n)) for place in range(n)]
    return {
        "all_to_all_single, uneven, async": (3 * src + dst) % 4 * k * 12,
        "all_reduce": away * (share[src] + share[dst]),
        "functional all_reduce": away * (share[src] + share[dst]),
        "all_reduce, bytes": away * (bytes_each[src] + bytes_each[dst]),
        "coalesced": away * (double[src] + double[dst]),
        "broadcast": away * (src == last) * 4 * k,
        "functional broadcast": away * (src == last) * 4 * k,
        "reduce": away * (dst == last) * 4 * k,
        "gather": (dst == last) * 4 * k,
        "scatter": (src == last) * 4 * k,
        "send": (src == 0 and dst == last) * 4 * k,
        "batch_isend_irecv": (dst == (src + 1) % n) * 4 * (k + src),
        "barrier": 0,
        "functional all_to_all, backward": 8 * k,
        "functional, several": away * (three[src] + three[dst]) + 2 * 4 * (k + 3) - 8,
        "autograd of torch.distributed.nn": 2 * away * (share[src] + share[dst]),
    }.get(name, 4 * k)  # the others bring k floats from each to each, what stays included


def every_way(world, sizes, parts):
    """The traffic of each way, counted and witnessed, in the whole world and in its parts.

    sizes: elements of a tensor; parts: of the world, one group each
    """
    found = {}
    groups = [dist.new_group(part) for part in parts]
    part = next(group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER)
    warnings.simplefilter("ignore")  # names that torch would rather see replaced
    for name, use in WAYS.items():
        with count_traffic(kernel=True) as traffic:
            for group in (dist.group.WORLD, part):
                for k in sizes:
                    use(group, group.size(), group.rank(), k)
        found[name] = traffic.gather()
    return found if world.rank == 0 else None


def foreign(world, topk_ids, width):
    """A dispatcher that knows nothing of this program: counts by all_gather, rows point to point,
    and the answers by one all_to_all; what was counted, and what the kernel says."""
    n, rank = world.world_size, world.rank
    owner = [[expert % n for expert in token] for token in topk_ids[rank]]
    tokens = torch.randn(len(owner), width, dtype=torch.bfloat16)
    with count_traffic(node_of_rank=[one % 2 for one in range(n)], kernel=True) as traffic:
        to = [[i for i, token in enumerate(owner) if dst in token] for dst in range(n)]
        mine = torch.tensor([len(rows) for rows in to])
        counts = [torch.empty_like(mine) for _ in range(n)]
        dist.all_gather(counts, mine)
        arrived = [torch.empty(int(one[rank]), width, dtype=torch.bfloat16) for one in counts]
        arrived[rank] = tokens[to[rank]]
        others = [one for one in range(n) if one != rank]
        sends = [dist.P2POp(dist.isend, tokens[to[one]], one) for one in others if to[one]]
        takes = [dist.P2POp(dist.irecv, arrived[one], one) for one in others if len(arrived[one])]
        for work in dist.batch_isend_irecv(sends + takes):
            work.wait()
        answers = torch.cat(arrived).float()
        back = torch.empty(int(mine.sum()), width)
        splits = [len(rows) for rows in arrived]
        all_to_all_single(back, answers, mine.tolist(), splits)
    return traffic.gather()


def of_fairscale(world, tokens, width):
    """Forward and backward of a layer of fairscale, with Top2Gate; the traffic, and the number of
    expert parameters that DDP would not touch."""
    warnings.simplefilter("ignore")
    from fairscale.nn.moe.moe_layer import MOELayer
    from fairscale.nn.moe.top2gate import Top2Gate

    torch.manual_seed(world.rank)
    layer = MOELayer(Top2Gate(width, 2 * world.world_size), expert_pair(width))
    with count_traffic(kernel=True) as traffic:
        layer(torch.randn(2, tokens // 2, width, requires_grad=True)).sum().backward()
    return traffic.gather()


def expert_pair(width):
    return torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(2)])


def other_roads(world):
    """What the program does not call itself, but DDP, FSDP and compiled code."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    warnings.simplefilter("ignore")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 10))
    with count_traffic() as traffic:
        model(torch.ones(2, 30)).sum().backward()
    found["ddp"] = traffic.gather()
    whole = fully_shard(torch.nn.Linear(30, 20, bias=False))
    with count_traffic() as traffic:
        whole(torch.ones(2, 30)).sum().backward()
    found["fsdp"] = traffic.gather()
    compiled = torch.compile(
        lambda one: functional.all_reduce(one, "sum", dist.group.WORLD) + 1, backend="eager"
    )
    with count_traffic() as traffic:
        compiled(floats(5))
    found["compiled"] = traffic.gather()
    return found


def limits(world):
    """Where the kernel is no witness, what it says of a wrong law, and what is refused."""
    n, found = world.world_size, refusals(world)
    with count_traffic(kernel=True) as traffic:
        dist.all_reduce(floats(n), group=dist.new_group(list(range(n))))
        dist.all_reduce(floats(n), group=dist.new_subgroups_by_enumeration([[0, 1], [2]])[0])
    found["new group"] = traffic.gather()
    with count_traffic() as traffic:
        dist.monitored_barrier()
        dist.all_reduce(floats(n))
    found["unknown"] = traffic.gather()
    found["right"], found["wrong"] = miscounted(world, 0), miscounted(world, 1)
    return found


def refusals(world):
    """What is said to who asks for what cannot be had."""
    said = {}

    def tell(name, use):
        try:
            use()
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)

    def in_a_thread():
        with count_traffic():
            other = threading.Thread(target=dist.all_reduce, args=(floats(3),))
            other.start()
            other.join()

    def inside():
        with count_traffic() as traffic:
            traffic.gather()

    tell("thread", in_a_thread)
    tell("inside", inside)
    tell("layout", lambda: count_traffic(ranks_per_node=2).__enter__())
    tell("nodes", lambda: count_traffic(node_of_rank=[0]).__enter__())
    with count_traffic() as traffic:
        dist.all_reduce(floats(3))
    tell("tier", lambda: traffic.bytes(tier="scale_out"))
    tell("name", lambda: traffic.bytes(tier="rack"))
    tell("op", lambda: traffic.bytes(op="all2all"))
    return said


def miscounted(world, by):
    """A law that is off by so many bytes on one rank; what the kernel says to it."""
    from comm.counting import traffic as ledger

    law = ledger.moved

    def wrong(call):
        payload, messages = law(call)
        payload[(call.place + 1) % call.size] += by
        return payload, messages

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(ledger, "moved", wrong)
        with count_traffic(kernel=True) as traffic:
            dist.all_reduce(floats(100))
    return traffic.kernel
