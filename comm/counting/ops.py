"""What torch's communication operators say of themselves: who calls what, and with how many bytes.

Every road into torch.distributed ends in an operator of `c10d` or `_c10d_functional`; their
arguments are all that is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from comm.counting.gloo import Call

Values = dict[str, Any]  # of an operator, by the names of its schema

NAMESPACES = ("c10d", "_c10d_functional")
SILENT = (
    *("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"),
    "c10d::check_for_nan",
)


class UnknownOperator(LookupError):
    """An operator that communicates in a way not known here."""


@dataclass(frozen=True)
class Member:
    """The caller in its group. ranks: global, by place; place: its own"""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def call(self, op: str, *tensors: Tensor, parts: Sequence[int] = (), **more: Any) -> Call:
        parts = tuple(parts) or (sum(map(num_bytes, tensors)),)
        item = tensors[0].element_size() if tensors else 1
        return Call(op, self.size, self.place, tuple(parts), item=item, **more)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def read(func: Any, args: Sequence[Any], kwargs: Values) -> tuple[Member, list[Call]] | None:
    """The collectives that an operator makes; None for one that sends nothing.

    func: torch._ops.OpOverload. Raises UnknownOperator.
    """
    schema = func._schema
    if schema.name in SILENT:
        return None
    if schema.name not in READERS:
        raise UnknownOperator(schema.name)
    names = [argument.name for argument in schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    member = _member(values)
    return member, READERS[schema.name](member, values)


def _member(values: Values) -> Member:
    if "process_group" in values:
        group = dist.ProcessGroup.unbox(values["process_group"])
    else:
        name = values["group_name"]
        group = _resolve_process_group(name) if isinstance(name, str) else name
    return member_of(group)


def member_of(group: dist.ProcessGroup) -> Member:
    return Member(group, tuple(dist.get_process_group_ranks(group)), group.rank())


def _row_parts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Bytes of each split of the rows; none given: equal ones."""
    if not splits:
        return [num_bytes(tensor) // size] * size
    row = num_bytes(tensor) // max(1, tensor.shape[0])
    return [int(split) * row for split in splits]


def _exchanged(member: Member, values: Values) -> list[Call]:
    tensor, splits = values["input"], values["input_split_sizes"]
    parts = _row_parts(tensor, splits, member.size)
    return [member.call("all_to_all", tensor, parts=parts)]


def _exchanged_list(member: Member, values: Values) -> list[Call]:
    tensors = values["input_tensors"]
    return [member.call("all_to_all", *tensors, parts=[num_bytes(one) for one in tensors])]


def _whole(op: str, name: str) -> Callable[[Member, Values], list[Call]]:
    """One tensor, or several that travel as one. name: of the argument"""

    def reader(member: Member, values: Values) -> list[Call]:
        given = values[name]
        return [member.call(op, *([given] if isinstance(given, Tensor) else given))]

    return reader


def _rooted(op: str, name: str, root: str) -> Callable[[Member, Values], list[Call]]:
    def reader(member: Member, values: Values) -> list[Call]:
        given = values[name]
        tensors = [given] if isinstance(given, Tensor) else given
        return [member.call(op, *tensors, root=values[root])]

    return reader


def _cut(name: str) -> Callable[[Member, Values], list[Call]]:
    """Reduced, and an equal part for each member. name: of one tensor or several"""

    def reader(member: Member, values: Values) -> list[Call]:
        given = values[name]
        return [
            member.call("reduce_scatter", one, parts=_row_parts(one, (), member.size))
            for one in ([given] if isinstance(given, Tensor) else given)
        ]

    return reader


def _cut_list(member: Member, values: Values) -> list[Call]:
    (tensors,) = values["input_tensors"]
    parts = [num_bytes(one) for one in tensors]
    return [member.call("reduce_scatter", *tensors, parts=parts, apart=True)]


def _scattered(member: Member, values: Values) -> list[Call]:
    tensors = values["input_tensors"][0] if values["input_tensors"] else ()
    root = values["root_rank"]
    return [member.call("scatter", *tensors, parts=[num_bytes(one) for one in tensors], root=root)]


READERS: dict[str, Callable[[Member, Values], list[Call]]] = {
    "c10d::alltoall_base_": _exchanged,
    "c10d::alltoall_": _exchanged_list,
    "c10d::allgather_": _whole("all_gather", "input_tensors"),
    "c10d::_allgather_base_": _whole("all_gather", "input_tensor"),
    "c10d::allgather_coalesced_": _whole("all_gather", "input_list"),
    "c10d::allgather_into_tensor_coalesced_": _whole("all_gather", "inputs"),
    "c10d::reduce_scatter_": _cut_list,
    "c10d::_reduce_scatter_base_": _cut("input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": _cut("inputs"),
    "c10d::allreduce_": _whole("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": _whole("all_reduce", "tensors"),
    "c10d::broadcast_": _rooted("broadcast", "tensors", "root_rank"),
    "c10d::reduce_": _rooted("reduce", "tensors", "root_rank"),
    "c10d::gather_": _rooted("gather", "input_tensors", "root_rank"),
    "c10d::scatter_": _scattered,
    "c10d::send": _rooted("send", "tensors", "dst"),
    "c10d::recv_": lambda member, values: [member.call("recv")],  # its sender counts it
    "c10d::recv_any_source_": lambda member, values: [member.call("recv")],
    "c10d::barrier": lambda member, values: [member.call("barrier")],
    "_c10d_functional::all_to_all_single": _exchanged,
    "_c10d_functional::all_gather_into_tensor": _whole("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": _whole("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": _whole("all_gather", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": _cut("input"),
    "_c10d_functional::reduce_scatter_tensor_out": _cut("input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _cut("inputs"),
    "_c10d_functional::all_reduce": _whole("all_reduce", "input"),
    "_c10d_functional::all_reduce_": _whole("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": _whole("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": _whole("all_reduce", "inputs"),
    "_c10d_functional::broadcast": _rooted("broadcast", "input", "src"),
    "_c10d_functional::broadcast_": _rooted("broadcast", "input", "src"),
}
