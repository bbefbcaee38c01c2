"""Wire formats: bytes of a row, rounding, and the numbers that break careless encoders."""

import math

import numpy as np
import pytest
import torch

from comm.wire import WIRE_FORMATS, pack, quantisation_error

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
        ("mxfp4", 3584, 1792, 112),
        ("mxfp4", 33, 17, 2),
        ("nvfp4", 3584, 1792, 224),  # 2016 together, 0.28125 of bf16
        ("nvfp4", 33, 17, 3),
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


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX 1.0, table of the element type
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest_code(value, table):
    """The code of the nearest entry, ties to the even code, above the last one the last."""
    value = min(value, table[-1])
    return min(range(len(table)), key=lambda code: (abs(table[code] - value), code % 2))


def slow_fp4(name, row):
    """One row of Python floats by the rule of its format: its bytes and the values they mean."""
    block_size = {"mxfp4": 32, "nvfp4": 16}[name]
    codes, scales, values = [], [], []
    for start in range(0, len(row), block_size):
        block = row[start : start + block_size]
        largest = max(abs(value) for value in block)
        if name == "mxfp4":
            exponent = max(math.frexp(largest)[1] - 1 - 2, -126) if largest else None
            scale = 2.0**exponent if largest else 1.0
            scales.append(exponent + 127 if largest else None)  # of zeros any scale will do
        else:
            scales.append(nearest_code(float(np.float32(largest) / np.float32(6)), E4M3))
            scale = E4M3[scales[-1]]
        for value in block:
            code = nearest_code(abs(value) / scale, E2M1) if scale else 0
            negative = math.copysign(1.0, value) < 0
            codes.append(code + 8 * negative)
            values.append(math.copysign(E2M1[code] * scale, value))
    codes += [0] * (len(codes) % 2)
    return (
        [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)],
        scales,
        values,
    )


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_fp4_follows_its_rule_byte_by_byte(name, width):
    """Rows of all sizes: below the smallest scale, and above the largest of nvfp4."""
    wire = WIRE_FORMATS[name]
    sent = rows(39, width) * torch.logspace(-40, 36, 39).unsqueeze(1)
    sent[::3, ::2] = 0
    sent[3, : width // 2] = 0
    hidden, scales = encoded(wire, sent)
    received = wire.decode(pack(wire.encode(sent)), width, torch.float32)
    for row, *found in zip(sent, hidden.tolist(), scales.tolist(), received.tolist(), strict=True):
        wanted_hidden, wanted_scales, values = slow_fp4(name, row.tolist())
        assert found[0] == wanted_hidden
        for scale, wanted in zip(found[1], wanted_scales, strict=True):
            assert wanted is None or scale == wanted
        assert found[2] == values


@pytest.mark.parametrize(("name", "one"), [("mxfp4", 127), ("nvfp4", 0x38)])
def test_every_fp4_code_there_and_back(name, one):
    """All sixteen in one block, whose scale is 1; the first value lies in the low nibble."""
    wire = WIRE_FORMATS[name]
    sent = torch.tensor([E2M1 + [-value for value in E2M1]])
    hidden, scales = encoded(wire, sent)
    assert hidden.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert scales.tolist() == [[one]]
    every_byte = torch.cat([torch.arange(256, dtype=torch.uint8), torch.full((256,), one)])
    packed = every_byte.to(torch.uint8)[: 256 + wire.scale_bytes(512)].view(1, -1)
    values = wire.decode(packed, 512, torch.float32)[0].tolist()
    table = E2M1 + [-value for value in E2M1]
    wanted = [table[nibble] for byte in range(256) for nibble in (byte % 16, byte // 16)]
    assert list(map(str, values)) == list(map(str, wanted))  # also the sign of a zero


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_fp4_rounds_half_way_values_to_the_even_code(name):
    wire = WIRE_FORMATS[name]
    half_way = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above, below = (torch.nextafter(half_way, torch.tensor(end)) for end in (9.0, 0.0))

    def rounded(values):
        sent = torch.cat([values, torch.tensor([6.0])])[None]  # the scale is 1
        return wire.decode(pack(wire.encode(sent)), 8, torch.float32)[0, :7].tolist()

    assert rounded(half_way) == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert rounded(above) == E2M1[1:]
    assert rounded(below) == E2M1[:-1]
    assert rounded(-half_way) == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


def test_fp4_at_the_ends_of_its_range():
    def there_and_back(name, values):
        wire = WIRE_FORMATS[name]
        sent = torch.tensor([values])
        return wire.decode(pack(wire.encode(sent)), len(values), torch.float32)[0].tolist()

    assert there_and_back("mxfp4", [7.99, 1.0]) == [6.0, 1.0]
    assert there_and_back("mxfp4", [2.0**127, -(2.0**126)]) == [2.0**127, -(2.0**126)]
    assert there_and_back("mxfp4", [2.0**-140, 0.0]) == [0.0, 0.0]
    assert there_and_back("nvfp4", [1e6, -1e6, 448.0]) == [2688.0, -2688.0, 448.0]
    assert there_and_back("nvfp4", [6 * 2.0**-9, 2.0**-9]) == [6 * 2.0**-9, 2.0**-9]
    assert there_and_back("nvfp4", [6 * 2.0**-10, 2.0**-9]) == [0.0, 0.0]  # a tie, to scale 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_become_finite(name, bad):
    wire = WIRE_FORMATS[name]
    sent = torch.ones(2, 300)
    sent[1, 130] = bad
    received = wire.decode(pack(wire.encode(sent)), 300, torch.float32)
    assert not received[1, 130].isfinite()
    far_away = torch.ones(300, dtype=torch.bool)
    far_away[128:256] = False
    assert ((received[0] - 1).abs() < 0.05).all()
    assert ((received[1, far_away] - 1).abs() < 0.05).all()
    if name in ("mxfp8", "mxfp4", "nvfp4"):  # the scale is what says so
        size = 16 if name == "nvfp4" else 32
        assert received[1].isnan().tolist() == [128 <= place < 128 + size for place in range(300)]


@pytest.mark.parametrize(("name", "tight"), [("mxfp4", 0.85), ("nvfp4", 0.85), ("bf16", 0.7)])
def test_the_stated_error_is_that_of_a_row_of_32_normal_values(name, tight):
    """Neither exceeded in any of many rows, nor far from the worst of them."""
    wire = WIRE_FORMATS[name]
    sent = rows(20_000, 32)
    received = wire.decode(pack(wire.encode(sent)), 32, torch.float32)
    error = (received - sent).norm(dim=1) / sent.norm(dim=1)
    assert tight * wire.row_error <= error.max() <= wire.row_error


def test_quantisation_error():
    assert quantisation_error(WIRE_FORMATS["fp32"], rows(5, 40)) == 0
    for name in ALL:
        assert quantisation_error(WIRE_FORMATS[name], torch.empty(0, 40)) == 0
        assert quantisation_error(WIRE_FORMATS[name], torch.zeros(2, 40)) == 0
    # 7 becomes 6 in mxfp4: off by 1 in one value of two, relative to 7 and 4.
    sevens = torch.tensor([[7.0, 4.0]])
    assert quantisation_error(WIRE_FORMATS["mxfp4"], sevens) == pytest.approx(1 / math.sqrt(65))
    ordinary = rows(200, 512)
    for name, seen in (("mxfp8", 0.0295), ("mxfp4", 0.115), ("nvfp4", 0.0955)):
        assert quantisation_error(WIRE_FORMATS[name], ordinary) == pytest.approx(seen, rel=0.03)
    half = ordinary.to(torch.bfloat16)
    assert quantisation_error(WIRE_FORMATS["bf16"], half) == 0


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
