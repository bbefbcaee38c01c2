"""Predictions of expert-parallel traffic, computed from plain arrays.

    rows      bytes of one row and of one counts message         (its own formulas)
    owners    the rank that must own each expert                 (its own placement)
    run       what is known of a run before its first token      (plain values)
    paths     lanes, nodes, proxies: who may send to whom        (run)
    choices   slots, admission and counts of recorded choices    (run, paths)
    sync      moved experts and summed gradients                 (run, paths)
    oracle    exact bytes of every cell, from recorded topk_ids  (choices x rows + sync)
    fanout    closed forms of one token under uniform routing    (exact rational arithmetic)
    traffic   expected bytes and deviations of a whole run       (fanout x rows)
    tail      exact tail probabilities where events are rare     (fanout, convolved)
    headline  "top_k x tokens x hidden x 2 B" taken apart
    conventions  every numerator that the field prints, of one routing

Nothing here imports the code that moves, encodes, orders or counts the real bytes: a fault there
cannot hide by appearing on both sides of a comparison. Only `comm.topology` is shared.
"""
