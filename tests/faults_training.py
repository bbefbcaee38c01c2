"""Deliberate faults in training: gradients on their way back, and between ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from faults import A_FEW, COMPACT, around, change_result, fault
from faults_counting import move, recount

import moe.training
from comm import grad_sync
from comm.dispatch.all_to_all import AllToAll
from comm.dispatch.base import DispatchSetup
from comm.dispatch.by_rank import ByRank
from comm.dispatch.one_sided import OneSided
from comm.wire import WIRE_FORMATS

STRATEGIES = (AllToAll, ByRank, OneSided)

# -- rows' gradients -------------------------------------------------------------------------------


def change_backward(patch, step, change):
    """change(original, self, *arguments) is that step of every strategy."""
    for strategy in STRATEGIES:
        around(patch, strategy, step, change)


@fault("gradients", run="training")
def gradients_sent_without_weights(patch):
    """experts get the gradient of the sum as if every weight were one"""

    def unweighted(original, self, grad, output, answers, handle):
        handle = replace(handle, weights=torch.ones_like(handle.weights))
        return original(self, grad, output, answers, handle)

    change_backward(patch, "_combine_backward", unweighted)


@fault("gradients", run="training")
def gradients_of_weights_forgotten(patch):
    """the router hears nothing of what its weights did"""

    def forget(original, self, *arguments):
        of_output, of_weights = original(self, *arguments)
        return of_output, torch.zeros_like(of_weights)

    change_backward(patch, "_combine_backward", forget)


@fault("gradients", run="training")
def gradients_of_a_token_lost(patch):
    """the first token of each rank gets none back from its experts"""

    def forget(original, self, *arguments):
        of_hidden, of_weights = original(self, *arguments)
        of_hidden = of_hidden.clone()
        of_hidden[:1] = 0
        return of_hidden, of_weights

    change_backward(patch, "_dispatch_backward", forget)


@fault("gradients", run="training", on=COMPACT)
def gradients_of_two_rows_swapped(patch):
    """on their way back the gradients of an expert's first and last row change places"""

    def swap(original, self, grad, *rest):
        grad = torch.cat([grad[-1:], grad[1:-1], grad[:1]]) if len(grad) > 1 else grad
        return original(self, grad, *rest)

    change_backward(patch, "_dispatch_backward", swap)


@fault("exact", run="training")
def gradients_in_another_format(patch):
    """gradients travel in fp32, whatever was asked for"""
    patch.setattr(DispatchSetup, "gradients", WIRE_FORMATS["fp32"])


@fault("gradients", run="training")
def gradients_summed_too_often(patch):
    """what all ranks hold gets the sum over ranks as many times as there are ranks"""
    change_result(patch, grad_sync, "sum_in_order", lambda total: total * dist.get_world_size())


@fault("gradients", run="training")
def gradients_of_a_rank_left_out(patch):
    """the last rank has no part in the sum"""
    around(patch, grad_sync, "sum_in_order", lambda original, terms: original(terms[:-1]))


@fault("exact", run="training")
def gradients_not_synchronised(patch):
    """each rank keeps its own gradient of what all ranks hold"""
    patch.setattr(moe.training, "sync_replicated", lambda *arguments: None)


@fault("exact", run="trained groups", on=A_FEW)
def experts_of_another_group_not_synchronised(patch):
    """an expert's gradient stays in its group"""

    def alone(placement, rank, *rest):
        return {expert: (rank,) for expert in placement.local_experts(rank % 2).tolist()}

    patch.setattr(moe.training, "expert_holders", alone)


@fault("gradients", run="trained groups", on=A_FEW)
def experts_of_another_group_forgotten(patch):
    """an expert's gradient reaches its other holders, who do not add it"""

    def forget(original, transport, layer, holders, gradients):
        own = gradients.clone()
        original(transport, layer, holders, gradients)
        gradients.copy_(own)

    around(patch, moe.training, "sync_experts", forget)


# -- counted ---------------------------------------------------------------------------------------


@fault("exact", run="training")
def backward_booked_as_forward(patch):
    """gradients of rows count as rows"""

    def change(booking):
        synchronised = booking.position.phase == "grad_sync"
        return booking if synchronised else move(direction="forward")(booking)

    recount(patch, change)


@fault("exact", run="training")
def synchronised_gradients_not_counted(patch):
    """what ranks send to add up their gradients passes the meter by"""
    recount(patch, lambda booking: None if booking.position.phase == "grad_sync" else booking)
