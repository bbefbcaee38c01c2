"""Draws the plan of a run before any rank starts, so that what cannot be planned is refused early:
a placement or a trace that does not fit the model, a router that the network has no room for."""

from __future__ import annotations

from comm.topology import Topology
from moe.combinations import why_not
from moe.plan import plan_on
from moe.settings import Config


def refusal(config: Config) -> str | None:
    """Why this configuration cannot be run, in one line; None when it can."""
    if reason := why_not(config):
        return reason
    try:
        # Who chooses which experts, and where they lie, depends on no node.
        plan = plan_on(config, Topology((0,) * config.world_size))
        _ = plan.routing
    except ValueError as error:
        return str(error)
    return None
