"""All bytes that one request puts on the network: all-to-all of its tokens, transfer of its cache.

    all-to-all   every token that is computed, prompt or output, in each MoE layer: there and back
    transfer     caches and states between instances, once

Who transfers what depends on the regime: nobody where one instance does all; the prompt's cache
where prefill and decode are apart; a prefix that another instance has already computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from comm.analytic.caches import Cache


@dataclass(frozen=True)
class Regime:
    """One way to serve the request, and the bytes it moves.

    moved: tokens of each transfer; a state goes along with each
    """

    name: str
    moved: tuple[int, ...]
    transfer: float
    all_to_all: float

    @property
    def share(self) -> float:
        """Of the transfer in all bytes of the request."""
        both = self.transfer + self.all_to_all
        return self.transfer / both if both else 0.0


def token_bytes(rows: float, dispatched: int, combined: int, layers: int) -> float:
    """All-to-all bytes of a token in a forward pass.

    rows: that leave its rank in one layer; dispatched, combined: bytes of one, there and back
    """
    return rows * (dispatched + combined) * layers


def regimes(
    cache: Cache, prompt: int, cached: int, output: int, bytes_per_token: float
) -> list[Regime]:
    """The request served in two ways, and in two more if part of its prompt is cached elsewhere.

    prompt: tokens, of which the first `cached` are not computed again
    output: tokens; the last one is sampled and never computed, which is left out of account
    """
    ways: list[tuple[str, tuple[int, ...]]] = [
        ("one instance", ()),
        ("prefill and decode apart", (prompt,)),
    ]
    if cached:
        ways += [
            ("one instance, prefix from another", (cached,)),
            ("apart, prefix from another", (cached, prompt)),
        ]
    computed = (prompt - cached + output) * bytes_per_token
    return [
        Regime(name, moved, sum(map(cache.transfer_bytes, moved)), computed) for name, moved in ways
    ]
