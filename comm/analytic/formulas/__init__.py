"""The formulas that a claim may name; each has its parameters, its unit and the steps to it.

    base      what a formula is, and the registry
    routing   ranks, nodes and experts that a token reaches
    traffic   bytes of rows, and of a run under uniform routing
    memory    what a step reads, and how many machines hold it
    fabric    ports of a network

`arithmetic`, the formula with an expression of the claim's own, is in comm.claims.judge: it may
call any of these.
"""

from comm.analytic.formulas import fabric, memory, routing, traffic
from comm.analytic.formulas.base import FORMULAS, Formula, Parameter, Step

__all__ = ["FORMULAS", "Formula", "Parameter", "Step", "fabric", "memory", "routing", "traffic"]
