"""What a sequence keeps between steps: caches that grow with its tokens, states that do not.

    cache    of each full layer, some values a token; a window layer keeps those of the last ones
    state    of each linear layer, one matrix a head and the last inputs of three convolutions

A hybrid trades the cache of some layers for states: below `break_even_tokens` it keeps more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONVOLUTIONS = 3  # of queries, keys and values
CONVOLUTION_BYTES = 2  # bf16, whatever the state is kept in


@dataclass(frozen=True)
class Cache:
    """The memory of one sequence.

    values: that a token leaves in one layer; bits: of each
    full_layers, window_layers, window: layers that keep all tokens, or the last `window`
    state_bytes: of all linear layers, for one slot; slots: that a sequence holds of them
    """

    values: int
    bits: float
    full_layers: int
    window_layers: int = 0
    window: int = 0
    state_bytes: float = 0.0
    slots: int = 1

    @property
    def layer_bytes(self) -> float:
        """A token in one layer."""
        return self.values * self.bits / 8

    @property
    def token_bytes(self) -> float:
        """What each further token adds, once the windows are full."""
        return self.full_layers * self.layer_bytes

    def cache_bytes(self, tokens: int) -> float:
        """All that grows, of a sequence of so many tokens."""
        windowed = self.window_layers * min(tokens, self.window)
        return (self.full_layers * tokens + windowed) * self.layer_bytes

    @property
    def constant_bytes(self) -> float:
        return self.slots * self.state_bytes

    def sequence_bytes(self, tokens: int) -> float:
        return self.cache_bytes(tokens) + self.constant_bytes

    def transfer_bytes(self, tokens: int) -> float:
        """What moves with a sequence: its cache and one state, whatever slots it holds."""
        return self.cache_bytes(tokens) + self.state_bytes

    def tokens_within(self, num_bytes: float) -> float:
        """The longest sequence that fits; 0 where not even its state does, inf if nothing grows."""
        left = num_bytes - self.constant_bytes
        if left < 0:
            return 0
        growing = (self.full_layers + self.window_layers) * self.layer_bytes
        if left < growing * self.window:  # the windows are not full yet
            return math.floor(left / growing)
        if self.token_bytes == 0:
            return math.inf
        kept = self.window_layers * self.window * self.layer_bytes
        return math.floor((left - kept) / self.token_bytes)


def linear_state_bytes(
    layers: int, heads: int, head_dim: int, conv_size: int, state_bits: float
) -> float:
    """States of all linear layers, of one sequence.

    A head's matrix is head_dim x head_dim. A convolution over conv_size tokens keeps one fewer.
    """
    matrix = heads * head_dim * head_dim * state_bits / 8
    inputs = CONVOLUTIONS * (conv_size - 1) * heads * head_dim * CONVOLUTION_BYTES
    return layers * (matrix + inputs)


def break_even_tokens(cache: Cache, linear_layers: int) -> float:
    """Tokens from which the hybrid keeps less than if its linear layers cached like the full ones.

    Without linear layers it never does: inf.
    """
    saved = linear_layers * cache.layer_bytes
    return cache.constant_bytes / saved if saved else math.inf


def saved_share(cache: Cache, linear_layers: int, tokens: int) -> float:
    """By how much the hybrid's sequence is smaller than one of full layers alone; negative: larger.

    >>> k3 = Cache(576, 16, 24, state_bytes=linear_state_bytes(69, 96, 128, 4, 32))
    >>> round(saved_share(k3, 69, 1_048_576), 3)
    0.738
    """
    full = (cache.full_layers + linear_layers) * cache.layer_bytes * tokens
    return 1 - cache.sequence_bytes(tokens) / full


def multi_head_values(heads: int, key_dim: int, value_dim: int) -> int:
    """Values that plain attention caches of a token in one layer."""
    return heads * (key_dim + value_dim)
