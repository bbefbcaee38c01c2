"""What a row of activations looks like on the wire: bytes of values, bytes of block scales.

Compact formats travel as `uint8` because gloo carries no 8-bit floats, and none carries 4-bit ones:
two of them share a byte, the first in the low nibble. A width that the block does not divide has a
shorter last block, which still costs a whole scale; an odd width leaves its last high nibble zero.

Finite values saturate. A value that is not finite stays so: in the formats with e8m0 or e4m3 scales
its whole block becomes NaN, by way of the scale.

Legend: N rows, W width, B = ceil(W / block) blocks a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite e4m3 value
FP8_MAX_EXPONENT = 8  # 448 = 1.75 * 2^8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the codes 0..7; 8 more is negative
FP4_MAX_EXPONENT = 2  # 6 = 1.5 * 2^2
E8M0_NAN = 255

Parts = list[tuple[str, Tensor]]
"""What a row is made of: (kind, uint8 [N, bytes of that kind]), in the order of the row."""


class WireFormat(Protocol):
    """How rows [N, W] become bytes and back.

    code: what the header of a message calls the format
    row_error: relative L2 error that rounding causes in a row of ordinary values, at most
    """

    name: str
    code: int
    row_error: float

    def hidden_bytes(self, width: int) -> int:
        """Bytes of the values of one row of `width` values."""

    def scale_bytes(self, width: int) -> int:
        """Bytes of the block scales of one row; 0 for formats without scales."""

    def encode(self, rows: Tensor) -> Parts:
        """[N, W] floats -> ("hidden", uint8 [N, hidden_bytes(W)]) and, where there are any,
        ("scales", uint8 [N, scale_bytes(W)])."""

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The inverse, up to rounding: uint8 [N, hidden_bytes + scale_bytes], values first, to
        [N, width] of `dtype`; a view where nothing has to change."""


def pack(parts: Parts) -> Tensor:
    """Parts side by side, in order: uint8 [N, sum of their bytes]."""
    return torch.cat([part for _, part in parts], dim=1) if len(parts) > 1 else parts[0][1]


@dataclass(frozen=True)
class CastFormat:
    """A plain floating-point type, no scales."""

    name: str
    code: int
    dtype: torch.dtype
    row_error: float

    def hidden_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def scale_bytes(self, width: int) -> int:
        return 0

    def encode(self, rows: Tensor) -> Parts:
        return [("hidden", as_bytes(rows.to(self.dtype)))]

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return view_as(packed, self.dtype).to(dtype)


@dataclass(frozen=True)
class Fp8Block:
    """e4m3 values, one fp32 scale for each block, so that the block's largest value maps to 448.

    Source of the layout: DeepSeek-V3's block-wise FP8 (1 x 128 tiles).
    """

    name: str = "fp8_block128"
    code: int = 3
    block_size: int = 128
    row_error: float = 2.0**-4

    def hidden_bytes(self, width: int) -> int:
        return width

    def scale_bytes(self, width: int) -> int:
        return 4 * num_blocks(width, self.block_size)

    def encode(self, rows: Tensor) -> Parts:
        blocks = to_blocks(rows.float(), self.block_size)  # [N, B, block]
        largest = blocks.abs().amax(-1)
        scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
        hidden = quantise_fp8(blocks / scales.unsqueeze(-1), rows.shape[1])
        return [("hidden", hidden), ("scales", as_bytes(scales))]

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        scales = view_as(packed[:, width:], torch.float32)
        return apply_scales(packed[:, :width], scales, self.block_size, dtype)


@dataclass(frozen=True)
class MxFp8:
    """e4m3 values, one power-of-two scale (e8m0, one byte) for each block of 32.

    The scale is the largest value's exponent less 8, so a block's largest value lands in
    [256, 512) and saturates at 448. Source: OCP Microscaling Formats (MX) 1.0.
    """

    name: str = "mxfp8"
    code: int = 4
    block_size: int = 32
    row_error: float = 0.09  # a narrow row; one value may be off by an eighth (512 saturates)

    def hidden_bytes(self, width: int) -> int:
        return width

    def scale_bytes(self, width: int) -> int:
        return num_blocks(width, self.block_size)

    def encode(self, rows: Tensor) -> Parts:
        blocks = to_blocks(rows.float(), self.block_size)  # [N, B, 32]
        biased = shared_exponents(blocks, FP8_MAX_EXPONENT)
        hidden = quantise_fp8(blocks / power_of_two(biased).unsqueeze(-1), rows.shape[1])
        return [("hidden", hidden), ("scales", biased)]

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        scales = power_of_two(packed[:, width:])
        return apply_scales(packed[:, :width], scales, self.block_size, dtype)


@dataclass(frozen=True)
class MxFp4:
    """e2m1 values, one power-of-two scale (e8m0, one byte) for each block of 32.

    The scale is the largest value's exponent less 2, so a block's largest value lands in [4, 8) and
    saturates at 6. Source: OCP Microscaling Formats (MX) 1.0.
    """

    name: str = "mxfp4"
    code: int = 5
    block_size: int = 32
    row_error: float = 0.19  # 32 normal values; a single one may be off by a quarter (8 saturates)

    def hidden_bytes(self, width: int) -> int:
        return -(-width // 2)

    def scale_bytes(self, width: int) -> int:
        return num_blocks(width, self.block_size)

    def encode(self, rows: Tensor) -> Parts:
        blocks = to_blocks(rows.float(), self.block_size)  # [N, B, 32]
        biased = shared_exponents(blocks, FP4_MAX_EXPONENT)
        hidden = quantise_fp4(blocks / power_of_two(biased).unsqueeze(-1), rows.shape[1])
        return [("hidden", hidden), ("scales", biased)]

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        hidden, scales = packed.tensor_split([self.hidden_bytes(width)], dim=1)
        values = unpack_fp4(hidden, width)
        return scaled(values, power_of_two(scales), self.block_size, dtype)


@dataclass(frozen=True)
class NvFp4:
    """e2m1 values, one e4m3 scale for each block of 16, so that its largest value maps to about 6.

    There is no second scale for the whole tensor, which would bring any row into range: blocks
    saturate above 6 * 448, and those up to 6 * 2^-10 become zero with their scale. Source of the
    layout: NVIDIA's NVFP4, without its tensor scale.
    """

    name: str = "nvfp4"
    code: int = 6
    block_size: int = 16
    row_error: float = 0.15  # 32 normal values

    def hidden_bytes(self, width: int) -> int:
        return -(-width // 2)

    def scale_bytes(self, width: int) -> int:
        return num_blocks(width, self.block_size)

    def encode(self, rows: Tensor) -> Parts:
        blocks = to_blocks(rows.float(), self.block_size)  # [N, B, 16]
        largest = blocks.abs().amax(-1)
        scales = (largest / E2M1[-1]).clamp(max=FP8_MAX)
        scales = torch.where(largest.isfinite(), scales, torch.nan).to(torch.float8_e4m3fn)
        divisor = scales.float()
        divisor = torch.where(divisor == 0, 1.0, divisor)  # such values round to zero undivided
        hidden = quantise_fp4(blocks / divisor.unsqueeze(-1), rows.shape[1])
        return [("hidden", hidden), ("scales", scales.view(torch.uint8))]

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        hidden, scales = packed.tensor_split([self.hidden_bytes(width)], dim=1)
        scales = scales.contiguous().view(torch.float8_e4m3fn).float()
        return scaled(unpack_fp4(hidden, width), scales, self.block_size, dtype)


def quantisation_error(wire: WireFormat, rows: Tensor) -> float:
    """Relative error that encoding and decoding rows [N, W] causes: root mean square of the
    differences over that of the values; 0 for no rows and for zeros."""
    sent = rows.float()
    received = wire.decode(pack(wire.encode(sent)), rows.shape[1], torch.float32)
    norm = sent.double().norm()
    return float((received.double() - sent).norm() / norm) if norm > 0 else 0.0


def as_bytes(rows: Tensor) -> Tensor:
    """[N, W] of any type -> uint8 [N, W * itemsize]; a view where the rows lie packed."""
    if rows.stride() != (rows.shape[1], 1):  # also rows so few that torch calls them contiguous
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8)


def view_as(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [N, b] as `dtype` [N, b / itemsize]; copies only where alignment forbids a view."""
    size = dtype.itemsize
    if packed.storage_offset() % size or packed.stride(0) % size:
        packed = packed.clone(memory_format=torch.contiguous_format)
    return packed.view(dtype)


def num_blocks(width: int, block_size: int) -> int:
    return -(-width // block_size)


def to_blocks(rows: Tensor, block_size: int) -> Tensor:
    """[N, W] -> [N, B, block_size], the last block filled up with zeros."""
    blocks = num_blocks(rows.shape[1], block_size)
    padded = torch.nn.functional.pad(rows, (0, blocks * block_size - rows.shape[1]))
    return padded.view(len(rows), blocks, block_size)


def quantise_fp8(blocks: Tensor, width: int) -> Tensor:
    """Scaled [N, B, block] -> e4m3 bytes uint8 [N, W], saturating, the filling dropped."""
    values = blocks.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).flatten(1)[:, :width]


def apply_scales(hidden: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """e4m3 bytes [N, W] times their blocks' scales [N, B] -> [N, W] of `dtype`."""
    values = hidden.contiguous().view(torch.float8_e4m3fn).float()
    return scaled(values, scales, block_size, dtype)


def scaled(values: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Values [N, W] times their blocks' scales [N, B] -> [N, W] of `dtype`."""
    blocks = to_blocks(values, block_size) * scales.unsqueeze(-1)
    return blocks.flatten(1)[:, : values.shape[1]].to(dtype)


def shared_exponents(blocks: Tensor, max_exponent: int) -> Tensor:
    """e8m0 codes of the scales of blocks [N, B, block] by the rule of OCP MX: uint8 [N, B].

    max_exponent: that of the element type's largest value
    """
    largest = blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - max_exponent
    # Not below 2^-126, which keeps the scale a normal fp32.
    biased = (exponent + 127).clamp(1, 254).to(torch.uint8)
    return torch.where(largest.isfinite(), biased, E8M0_NAN)


def power_of_two(biased: Tensor) -> Tensor:
    """e8m0 codes 1..254 -> exact fp32 powers of two, by placing the exponent bits; 255 -> NaN."""
    exact = (biased.to(torch.int32) << 23).view(torch.float32)
    return torch.where(biased == E8M0_NAN, torch.nan, exact)


def quantise_fp4(blocks: Tensor, width: int) -> Tensor:
    """Scaled [N, B, block] -> e2m1, two a byte: uint8 [N, ceil(W / 2)], saturating, the filling
    dropped."""
    values = blocks.flatten(1)[:, :width]
    size = values.abs()
    # Codes rise by one with each step, and steps are 1/2 up to 2, 1 up to 4, 2 up to 6. Counted in
    # steps that are too fine or too coarse for its place, a value gets a code that is too high.
    codes = torch.minimum((2 * size).round(), size.round() + 2)
    codes = torch.minimum(codes, (size / 2).round() + 4).clamp(max=7).to(torch.uint8)
    codes |= values.signbit().to(torch.uint8) << 3
    codes = torch.nn.functional.pad(codes, (0, width % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_fp4(hidden: Tensor, width: int) -> Tensor:
    """The values fp32 [N, W] of e2m1 codes packed as uint8 [N, ceil(W / 2)]."""
    pairs = _fp4_pairs(hidden.device).index_select(0, hidden.flatten().to(torch.int32))
    return pairs.view(len(hidden), 2 * hidden.shape[1])[:, :width]


@cache
def _fp4_pairs(device: torch.device) -> Tensor:
    """fp32 [256, 2], the two values of each byte, that of the low nibble first."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).to(device)


WIRE_FORMATS: dict[str, WireFormat] = {
    wire.name: wire
    for wire in (
        CastFormat("fp32", 0, torch.float32, 2.0**-24),
        CastFormat("bf16", 1, torch.bfloat16, 2.0**-8),
        CastFormat("fp16", 2, torch.float16, 2.0**-11),
        Fp8Block(),
        MxFp8(),
        MxFp4(),
        NvFp4(),
    )
}
