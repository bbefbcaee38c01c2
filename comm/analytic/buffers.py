"""Memory that an all-to-all and a step need beside weights and caches.

    low_latency   DeepEP V1: a slot for every token of every rank in each expert, sent and received
                  from both, twice, since one exchange is read while the next one fills
    rank_major    TensorRT-LLM one-sided: a slot for every token of each rank, whatever its experts

Legend: E experts, R ranks, T tokens a rank, W values of a row.
"""

from __future__ import annotations

SCALE_VALUES, SCALE_BYTES = 128, 4  # DeepEP: an fp32 scale for each 128 values
HEADER_BYTES = 16  # a message's source, padded to the width of a load
ALIGNMENT = 128
BUFFERS = ("low_latency", "rank_major", "none")
VALUE_BYTES = 2  # bf16
LOGIT_BYTES = 4  # fp32


def low_latency_bytes(num_experts: int, tokens: int, width: int) -> int:
    """DeepEP's size hint for low-latency mode; independent of the number of ranks."""
    scales = width // SCALE_VALUES * SCALE_BYTES
    dispatched = HEADER_BYTES + max(VALUE_BYTES * width, width + scales)
    combined = VALUE_BYTES * width + scales
    send = max(tokens * dispatched, num_experts * tokens * combined)
    receive = max(num_experts * tokens * dispatched, num_experts * tokens * combined)
    signals = -(-num_experts * 4 // ALIGNMENT) * ALIGNMENT
    return 2 * (send + receive + signals)


def low_latency_tokens(num_experts: int, width: int, budget_bytes: float) -> int:
    """The largest T whose low-latency buffers fit; 0 where not even one token's do."""
    fixed = low_latency_bytes(num_experts, 0, width)
    each = low_latency_bytes(num_experts, 1, width) - fixed
    return max(0, int((budget_bytes - fixed) // each))


def rank_major_bytes(ranks: int, tokens: int, row_bytes: int) -> int:
    """One receive buffer for rows and one for answers, of R x T slots each."""
    return 2 * ranks * tokens * row_bytes


def activation_bytes(
    tokens: int,
    hidden_size: int,
    payload_width: int,
    intermediate_size: int,
    top_k: int,
    vocab_size: int,
) -> int:
    """Values alive at once in a step of T tokens a rank, at most; balanced routing.

    Residual, its norm and a layer's output; K expert rows a token, as received, as the two inner
    products and as answered; the logits in fp32. Layers follow one another and reuse it.
    """
    expert_rows = top_k * (2 * payload_width + 2 * intermediate_size)
    return tokens * (VALUE_BYTES * (3 * hidden_size + expert_rows) + LOGIT_BYTES * vocab_size)
