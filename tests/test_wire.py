"""Wire formats: bytes of a row, rounding, and the numbers that break careless encoders."""

import math

import numpy as np
import pytest
import torch

from comm.wire import WIRE_FORMATS, pack

WIDTHS = (1, 31, 32, 33, 127, 128, 129, 256, 3584)
ALL = sorted(WIRE_FORMATS)


def rows(num_rows, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(width)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


def encoded(wire, sent):
    """Values and scales, no bytes wide where the format has no scales."""
    parts = dict(wire.encode(sent))
    return parts["hidden"], parts.get("scales", parts["hidden"][:, :0])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_of_a_row_are_what_encode_makes(name, width):
    wire = WIRE_FORMATS[name]
    hidden, scales = encoded(wire, rows(3, width))
    assert hidden.dtype == scales.dtype == torch.uint8
    assert hidden.shape == (3, wire.hidden_bytes(width))
    assert scales.shape == (3, wire.scale_bytes(width))


@pytest.mark.parametrize(
    ("name", "width", "hidden", "scales"),
    [
        ("fp32", 3584, 14336, 0),
        ("bf16", 3584, 7168, 0),
        ("fp16", 3584, 7168, 0),
        ("fp8_block128", 7168, 7168, 224),  # 7392 together, 0.515625 of bf16
        ("fp8_block128", 200, 200, 8),  # field case 7: ceil(200 / 128) = 2 scales
        ("mxfp8", 3584, 3584, 112),  # 3696 together
        ("mxfp8", 33, 33, 2),
    ],
)
def test_published_row_sizes(name, width, hidden, scales):
    wire = WIRE_FORMATS[name]
    assert (wire.hidden_bytes(width), wire.scale_bytes(width)) == (hidden, scales)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip_stays_within_the_stated_error(name, width, dtype):
    wire = WIRE_FORMATS[name]
    sent = rows(64, width, dtype)
    received = wire.decode(pack(wire.encode(sent)), width, dtype)
    assert received.dtype == dtype and received.shape == sent.shape
    error = (received.double() - sent.double()).norm() / sent.double().norm()
    assert error <= wire.row_error + torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_type_carried_in_its_own_format_is_untouched(name):
    wire = WIRE_FORMATS[name]
    sent = rows(5, 33, wire.dtype)
    assert torch.equal(wire.decode(pack(wire.encode(sent)), 33, wire.dtype), sent)


def slow_mxfp8(row):
    """The OCP rule, value by value in Python floats."""
    out = []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        largest = max(abs(value) for value in block)
        scale = 2.0 ** (math.floor(math.log2(largest)) - 8) if largest else 1.0
        out += [scale * nearest_e4m3(value / scale) for value in block]
    return out


def nearest_e4m3(value):
    """Nearest number 1.xxx * 2^e (ties to even), subnormals below 2^-6, saturating at 448."""
    magnitude = min(abs(value), 448.0)
    exponent = max(math.floor(math.log2(magnitude)), -6) if magnitude else -6
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(magnitude / step) * step, 448.0), value)


@pytest.mark.parametrize("width", [32, 33, 100])
def test_mxfp8_follows_the_ocp_rule_value_by_value(width):
    sent = rows(20, width) * torch.logspace(-12, 12, 20).unsqueeze(1)
    wire = WIRE_FORMATS["mxfp8"]
    received = wire.decode(pack(wire.encode(sent)), width, torch.float32)
    expected = np.array([slow_mxfp8(row) for row in sent.tolist()])
    np.testing.assert_array_equal(received.numpy(), expected.astype(np.float32))


def test_fp8_maps_the_largest_value_of_each_block_to_448():
    sent = rows(4, 300) * torch.tensor([[1e-6], [1.0], [1e3], [1e6]])
    hidden, scales = encoded(WIRE_FORMATS["fp8_block128"], sent)
    values = hidden.view(torch.float8_e4m3fn).float().abs()
    for start in (0, 128, 256):
        assert (values[:, start : start + 128].amax(1) == 448).all()
    blocks = torch.nn.functional.pad(sent.abs(), (0, 84)).view(4, 3, 128).amax(-1)
    torch.testing.assert_close(scales.view(torch.float32), blocks / 448)


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros_and_no_rows_are_no_bytes(name):
    wire = WIRE_FORMATS[name]
    zeros = torch.zeros(2, 130)
    assert torch.equal(wire.decode(pack(wire.encode(zeros)), 130, torch.float32), zeros)
    nothing = pack(wire.encode(torch.empty(0, 130)))
    assert wire.decode(nothing, 130, torch.float32).shape == (0, 130)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_rows", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, 8, 1, 3])
def test_decoding_a_slice_of_a_packed_message(name, offset, num_rows):
    """A row's values may start anywhere in a message, also where no aligned view exists."""
    wire = WIRE_FORMATS[name]
    row = pack(wire.encode(rows(num_rows, 65)))
    message = torch.full((num_rows, offset + row.shape[1] + 3), 255, dtype=torch.uint8)
    inside = message[:, offset : offset + row.shape[1]]
    inside.copy_(row)
    whole = wire.decode(row, 65, torch.float32)
    assert torch.equal(wire.decode(inside, 65, torch.float32), whole)


def test_codes_are_distinct():
    """The header of a message names the format by its code."""
    assert len({wire.code for wire in WIRE_FORMATS.values()}) == len(WIRE_FORMATS)
