"""Moves tokens between ranks, counts every byte, and predicts the same bytes independently.

Knows nothing of neural networks: that is the `moe` package, which `comm` never imports.
"""
