"""A matrix as a PNG of one pixel a cell: a 72 x 72 picture takes some kB.

Indexed colours: 0 is transparent, so that it looks empty on light and dark pages alike.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

Colour = tuple[int, int, int]

# Points of viridis (matplotlib, CC0), from little to much: even to the eye and to the colour-blind.
RAMP: tuple[Colour, ...] = (
    *((68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142)),
    *((31, 158, 137), (53, 183, 121), (109, 205, 89), (180, 222, 44), (253, 231, 37)),
)
# Too few on one side, too many on the other, nothing in between.
SIGNED: tuple[Colour, ...] = ((33, 102, 172), (146, 197, 222), (244, 165, 130), (178, 24, 43))
SHADES = 64  # as many as the eye tells apart; fewer bits make a smaller file


def palette(points: tuple[Colour, ...]) -> np.ndarray:
    """uint8 [SHADES + 1, 3]: the points with everything between them, after the empty colour."""
    known = np.linspace(1, SHADES, len(points))
    at = np.arange(1, SHADES + 1)
    shades = [np.interp(at, known, channel) for channel in zip(*points, strict=True)]
    return np.concatenate([np.zeros((1, 3)), np.stack(shades, axis=1)]).round().astype(np.uint8)


def shades(cells: np.ndarray, least: float, most: float) -> np.ndarray:
    """uint8, the shape of `cells`: 0 where a cell is 0, else 1 (least) ... SHADES (most)."""
    spread = (most - least) or 1
    level = 1 + np.rint((cells - least) / spread * (SHADES - 1))
    return np.where(cells == 0, 0, np.clip(level, 1, SHADES)).astype(np.uint8)


def data_uri(indices: np.ndarray, colours: np.ndarray) -> str:
    """The picture of `indices` [height, width] into `colours` as a data: address."""
    height, width = indices.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter, none
    rows[:, 1:] = indices
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours.tobytes()),
        (b"tRNS", b"\0"),  # colour 0 lets the page through
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    picture = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
