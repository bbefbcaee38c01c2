"""Random words are a function of (seed, purpose, layer, index, counter) and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from moe.philox import Purpose, random_words, words_per_item


def test_golden_words() -> None:
    words = random_words(seed=1, purpose=Purpose.EXPERT, layer=2, index=3, num_words=5)
    # whatever changes these changes every weight and every route of recorded runs
    assert words.tolist() == [
        1862124747584763432,
        13525543717751540189,
        17637065255388183903,
        5572922490656072925,
        13926431364557874022,
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"seed": 1 + 2**32},  # lost on a generator that reads the low half of its seed
        {"purpose": Purpose.ROUTER},
        {"layer": 3},
        {"index": 4},
        {"layer": 3, "index": 2},
    ],
)
def test_every_part_of_the_key_matters(change: dict[str, int]) -> None:
    base = {"seed": 1, "purpose": Purpose.EXPERT, "layer": 2, "index": 3, "num_words": 4}
    assert not set(random_words(**base)) & set(random_words(**base | change))


def test_skipping_blocks_is_reading_on() -> None:
    key = {"seed": 9, "purpose": Purpose.HIDDEN, "layer": 0, "index": 0}
    whole = random_words(**key, num_words=40)
    assert np.array_equal(random_words(**key, num_words=8, first_block=7), whole[28:36])


@pytest.mark.parametrize("words", [1, 4, 5, 16])
def test_rows_belong_to_items_not_to_callers(words: int) -> None:
    def rows(first: int, count: int) -> np.ndarray:
        return words_per_item(3, Purpose.TOPK_IDS, 1, 2, first, count, words)

    whole = rows(100, 10)
    assert whole.shape == (10, words)
    assert np.array_equal(whole, np.concatenate([rows(100, 3), rows(103, 0), rows(103, 7)]))
    assert len(np.unique(whole)) == whole.size


def test_a_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        random_words(-1, Purpose.HIDDEN, 0, 0, 1)
    with pytest.raises(ValueError, match="layer=65536"):
        random_words(0, Purpose.HIDDEN, 65536, 0, 1)
