"""The meter counts what it is given, where it is told, and refuses parts that do not add up."""

import pickle

import numpy as np
import pytest
import torch

from comm.meter import KINDS, PHASES, Position, Traffic, TrafficMeter


def message(rows, *parts):
    """A packed message and its parts, from (kind, bytes a row)."""
    return (
        torch.zeros(rows, sum(size for _, size in parts), dtype=torch.uint8),
        [(kind, torch.zeros(1, size, dtype=torch.uint8)) for kind, size in parts],
    )


def test_bytes_rows_and_receipts_land_in_their_cells():
    meter = TrafficMeter(num_layers=2, world_size=3)
    packed, parts = message(6, ("hidden", 10), ("scales", 4))
    meter.record(Position(1, "combine"), packed, parts, [1, 5, 0], [2, 0, 7])
    cells = meter.sent[1, 0, PHASES.index("combine")]
    assert cells[KINDS.index("hidden")].tolist() == [10, 50, 0]
    assert cells[KINDS.index("scales")].tolist() == [4, 20, 0]
    assert meter.sent.sum() == 6 * 14  # and nowhere else
    assert meter.rows[1, 0, 1].tolist() == [1, 5, 0] and meter.rows.sum() == 6
    assert meter.received[1, 0, 1].tolist() == [28, 0, 98]
    assert meter.collectives == 1


def test_what_each_group_carries_is_kept_apart():
    """Bytes and messages, empty ones too, by the connections that they go over."""
    meter = TrafficMeter(num_layers=1, world_size=4)
    packed, parts = message(3, ("hidden", 10))
    meter.record(Position(0, "dispatch"), packed, parts, [2, 0, 1, 0], [0] * 4)
    pair = np.array([1, 3])
    meter.record(Position(0, "combine"), packed, parts, [0, 3], [0, 0], pair, None, 2)
    meter.record(Position(0, "combine"), packed, parts, [1, 2], [0, 0], pair, [1, 0], 2)
    assert meter.carried[0].tolist() == [[20, 0, 10, 0], [1, 1, 1, 1]]
    assert meter.carried[2].tolist() == [[0, 10, 0, 50], [0, 2, 0, 2]]
    both = meter.carried[0][0] + meter.carried[2][0]
    assert np.array_equal(both, meter.sent.sum(axis=(0, 1, 2, 3)))
    meter.enabled = False
    meter.record(Position(0, "dispatch"), packed, parts, [2, 0, 1, 0], [0] * 4)
    assert meter.carried[0][1].tolist() == [1, 1, 1, 1]


def test_counts_messages_have_bytes_and_no_rows():
    meter = TrafficMeter(1, 2)
    packed, parts = message(4, ("counts", 8))
    meter.record(Position(0, "dispatch"), packed, parts, [2, 2], [2, 2])
    assert meter.sent.sum() == 32 and meter.rows.sum() == 0


def test_parts_must_sum_to_the_row():
    meter = TrafficMeter(1, 2)
    packed, parts = message(2, ("hidden", 10), ("scales", 4))
    with pytest.raises(AssertionError, match="do not sum to the 14 B"):
        meter.record(Position(0, "dispatch"), packed, parts[:1], [1, 1], [1, 1])


def test_splits_must_sum_to_the_rows():
    meter = TrafficMeter(1, 2)
    packed, parts = message(2, ("hidden", 10))
    with pytest.raises(AssertionError, match="against 2 rows"):
        meter.record(Position(0, "dispatch"), packed, parts, [1, 2], [1, 1])


def test_gradients_have_bytes_and_no_rows():
    meter = TrafficMeter(1, 2, phases=(*PHASES, "grad_sync"))
    packed, parts = message(4, ("gradients", 4))
    meter.record(Position(0, "grad_sync", "backward"), packed, parts, [2, 2], [2, 2])
    assert meter.sent[0, 1, 2].sum() == meter.sent.sum() == 16 and meter.rows.sum() == 0


def test_a_ledger_has_the_places_of_its_run_and_no_others():
    meter = TrafficMeter(3, 2, ("forward",), (*PHASES, "tp_reduce"))
    assert meter.place(Position(2, "tp_reduce")) == (2, 0, 2)
    assert meter.sent.shape == (3, 1, 3, len(KINDS), 2)
    for wrong in (Position(0, "dispatch", "backward"), Position(0, "grad_sync")):
        packed, parts = message(2, ("hidden", 10))
        with pytest.raises(ValueError):
            meter.record(wrong, packed, parts, [1, 1], [1, 1])
    assert not meter.sent.any()


def test_all_bytes_of_empty_rows_are_padding():
    meter = TrafficMeter(1, 2)
    packed, parts = message(7, ("hidden", 10), ("scales", 4))
    meter.record(Position(0, "dispatch"), packed, parts, [3, 4], [0, 0], empty_rows=[3, 1])
    cells = dict(zip(KINDS, meter.sent[0, 0, 0].tolist(), strict=True))
    assert (cells["hidden"], cells["scales"], cells["padding"]) == ([0, 30], [0, 12], [42, 14])
    assert meter.rows[0, 0, 0].tolist() == [3, 4]


def test_rows_of_a_group_land_at_its_ranks():
    meter = TrafficMeter(1, 5)
    packed, parts = message(3, ("hidden", 10))
    meter.record(Position(0, "dispatch"), packed, parts, [1, 2], [4, 0], np.array([1, 4]))
    assert meter.sent[0, 0, 0].sum(axis=0).tolist() == [0, 10, 0, 0, 20]
    assert meter.rows[0, 0, 0].tolist() == [0, 1, 0, 0, 2]
    assert meter.received[0, 0, 0].tolist() == [0, 40, 0, 0, 0]


def test_rows_in_shared_memory_are_counted_by_both_ends():
    """Who lays out two rows that are taken three times counts three; takers count by themselves."""
    meter, ranks, at = TrafficMeter(1, 4), np.array([0, 3]), Position(0, "dispatch")
    _, parts = message(2, ("ids", 4), ("hidden", 10))
    meter.put(at, parts, [1, 2], ranks)
    meter.taken(at, 14, np.array([0, 5]), ranks)
    cells = dict(zip(KINDS, meter.sent[0, 0, 0].tolist(), strict=True))
    assert cells["ids"] == [4, 0, 0, 8] and cells["hidden"] == [10, 0, 0, 20]
    assert meter.rows[0, 0, 0].tolist() == [1, 0, 0, 2]
    assert meter.received[0, 0, 0].tolist() == [0, 0, 0, 70] and meter.collectives == 0
    _, words = message(2, ("counts", 8))
    meter.put(at, words, [2, 2], ranks)
    assert meter.rows.sum() == 3
    meter.enabled = False
    meter.put(at, parts, [1, 2], ranks)
    meter.taken(at, 14, [1, 1], ranks)
    assert meter.rows.sum() == 3 and meter.received.sum() == 70


def test_nothing_is_counted_while_disabled():
    meter = TrafficMeter(1, 2, enabled=False)
    packed, parts = message(2, ("hidden", 10))
    meter.record(Position(0, "dispatch"), packed, parts, [1, 1], [1, 1])
    meter.phase_ended(Position(0, "dispatch"), 1.0)
    assert not meter.sent.any() and not meter.seconds.any() and meter.collectives == 0


def test_a_listener_hears_every_phase():
    heard = []
    meter = TrafficMeter(1, 2, on_phase=lambda position, seconds: heard.append((position, seconds)))
    meter.phase_ended(Position(0, "combine"), 0.5)
    assert heard == [(Position(0, "combine"), 0.5)]
    assert meter.seconds.tolist() == [[[0.0, 0.5], [0.0, 0.0]]]


def test_assembled_axes_are_source_then_destination():
    meters = [TrafficMeter(1, 3) for _ in range(3)]
    packed, parts = message(1, ("hidden", 10))
    meters[2].record(Position(0, "dispatch"), packed, parts, [0, 1, 0], [0, 0, 0])
    meters[1].record(Position(0, "dispatch"), packed[:0], parts, [0, 0, 0], [0, 0, 1])
    traffic = Traffic.assemble(meters)
    assert np.argwhere(traffic.bytes).tolist() == [[0, 0, 0, KINDS.index("hidden"), 2, 1]]
    assert np.argwhere(traffic.rows).tolist() == [[0, 0, 0, 2, 1]]
    assert np.argwhere(traffic.received).tolist() == [[0, 0, 0, 2, 1]]
    assert traffic.layers == (0,)


def test_large_counts_do_not_wrap():
    """Field case 19: 5.4e9 elements to one rank."""
    meter = TrafficMeter(1, 1)
    packed = torch.empty(1, 1, dtype=torch.uint8).expand(1_310_720, 16384)
    meter.record(Position(0, "dispatch"), packed, [("hidden", packed)], [1_310_720], [1_310_720])
    assert meter.sent.sum() == 1_310_720 * 16384 > 2**32


def test_what_is_put_and_taken_is_booked_where_it_belongs_place_by_place():
    """Back and forth between places, also by equal positions, and after a journey by pickle."""
    meter = TrafficMeter(2, 2)
    parts = [("hidden", torch.zeros(1, 3, dtype=torch.uint8))]
    for round_ in range(2):
        for layer, phase in ((0, "dispatch"), (0, "combine"), (1, "dispatch")):
            meter.put(Position(layer, phase), parts, [1, layer + 2])
            meter.taken(Position(layer, phase), 5, [0, 1])
        if not round_:
            meter = pickle.loads(pickle.dumps(meter))
    hidden = meter.sent[:, 0, :, KINDS.index("hidden")]
    assert hidden.tolist() == [[[6, 12], [6, 12]], [[6, 18], [0, 0]]]
    assert meter.rows[:, 0].tolist() == [[[2, 4], [2, 4]], [[2, 6], [0, 0]]]
    assert meter.received[:, 0].tolist() == [[[0, 10], [0, 10]], [[0, 10], [0, 0]]]
