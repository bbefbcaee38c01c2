"""What a fixed number of rows for each slot drops."""

from math import comb

import numpy as np
import pytest

from comm.analytic.padding import dropped_share, expected_dropped, kept_variance


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("capacity", [0, 1, 4, 9, 12])
def test_enumeration(chance: float, capacity: int) -> None:
    x = np.arange(10)
    p = np.array([comb(9, n) * chance**n * (1 - chance) ** (9 - n) for n in x])
    dropped, kept = np.maximum(0, x - capacity), np.minimum(x, capacity)
    assert expected_dropped(9, chance, capacity) == pytest.approx(p @ dropped, rel=1e-12, abs=0)
    variance = p @ kept**2 - (p @ kept) ** 2
    assert kept_variance(9, chance, capacity) == pytest.approx(variance, rel=1e-9, abs=1e-13)
    share = p @ dropped / (9 * chance) if chance else 0
    assert dropped_share(9, chance, capacity) == pytest.approx(share, rel=1e-12)


def test_kimi_k3_at_capacity_factor_one() -> None:
    """T = 4096, K / E = 16 / 896, C = 74: simulated; and all is dropped, or nothing."""
    loads = np.random.default_rng(0).binomial(4096, 16 / 896, 400_000)
    excess = np.maximum(0, loads - 74) / (4096 * 16 / 896)
    share = dropped_share(4096, 16 / 896, 74)
    assert share == pytest.approx(excess.mean(), abs=4 * excess.std() / 400_000**0.5)
    assert 0.03 < share < 0.06
    assert dropped_share(4096, 16 / 896, 0) == pytest.approx(1)
    assert 0 < dropped_share(4096, 16 / 896, 200) < 1e-30  # not lost in a difference
    assert dropped_share(0, 0.5, 3) == 0


def test_a_million_tokens() -> None:
    """Half the deviation over sqrt(2 pi) lies above the mean, whatever the size."""
    chance = 16 / 896
    sd = (1e6 * chance * (1 - chance)) ** 0.5
    mean = round(1e6 * chance)
    assert expected_dropped(1_000_000, chance, mean) == pytest.approx(
        sd / (2 * np.pi) ** 0.5, rel=0.01
    )
