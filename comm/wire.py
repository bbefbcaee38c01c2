"""What a row of activations looks like on the wire: bytes of values, bytes of block scales.

Compact formats travel as `uint8` because gloo carries no 8-bit floats. A width that the block does
not divide has a shorter last block, which still costs a whole scale.

Legend: N rows, W width, B = ceil(W / block) blocks a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite e4m3 value
FP8_MAX_EXPONENT = 8  # 448 = 1.75 * 2^8


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
        exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - FP8_MAX_EXPONENT
        # An all-zero block gets the smallest scale; 2^-126 keeps the scale a normal fp32.
        biased = (exponent + 127).clamp(1, 254).to(torch.uint8)
        hidden = quantise_fp8(blocks / power_of_two(biased).unsqueeze(-1), rows.shape[1])
        return [("hidden", hidden), ("scales", biased)]

    def decode(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        scales = power_of_two(packed[:, width:])
        return apply_scales(packed[:, :width], scales, self.block_size, dtype)


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
    width = hidden.shape[1]
    values = hidden.contiguous().view(torch.float8_e4m3fn).float()
    blocks = to_blocks(values, block_size) * scales.unsqueeze(-1)
    return blocks.flatten(1)[:, :width].to(dtype)


def power_of_two(biased: Tensor) -> Tensor:
    """e8m0 codes 1..254 -> exact fp32 powers of two, by placing the fp32 exponent bits."""
    return (biased.to(torch.int32) << 23).view(torch.float32)


WIRE_FORMATS: dict[str, WireFormat] = {
    wire.name: wire
    for wire in (
        CastFormat("fp32", 0, torch.float32, 2.0**-24),
        CastFormat("bf16", 1, torch.bfloat16, 2.0**-8),
        CastFormat("fp16", 2, torch.float16, 2.0**-11),
        Fp8Block(),
        MxFp8(),
    )
}
