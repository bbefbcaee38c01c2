"""Counts what any code sends through torch.distributed.

    with count_traffic(ranks_per_node=4) as traffic:
        output = my_layer(tokens)
    everything = traffic.gather()
    everything.bytes(op="all_to_all", tier="scale_out")

listener   hears every communication operator of this thread
ops        reads from an operator's arguments who sends how many bytes to whom
gloo       what a collective needs, and what gloo moves for it
traffic    the ledger that is asked
witness    the kernel's counters beside it
"""

from comm.counting.listener import count_traffic
from comm.counting.traffic import Traffic

__all__ = ["Traffic", "count_traffic"]
