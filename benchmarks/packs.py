"""Packs to measure with: lengths of documents as in a real corpus, or between two bounds.

Guarantees: the same seed gives the same pack. The corpus is the length histogram (in tokens) of 13.5 million documents
that the benchmark of SandAI-org/MagiAttention publishes; inside a bucket lengths are log-uniform.
"""

import math
from collections.abc import Callable

import numpy as np

BUCKETS = (
    (1, 10, 30_254),
    (11, 50, 391_188),
    (51, 100, 699_596),
    (101, 200, 1_377_757),
    (201, 500, 3_794_735),
    (501, 1024, 3_316_785),
    (1025, 2048, 2_106_566),
    (2049, 4096, 988_525),
    (4097, 8192, 410_002),
    (8193, 16_384, 173_574),
    (16_385, 32_768, 115_007),
    (32_769, 65_536, 18_428),
    (65_537, 131_072, 22_513),
    (131_073, 196_608, 18_284),
)
"""(shortest, longest, documents)."""


def corpus_pack(num_tokens: int, seed: int, *, cap: int | None = None) -> list[int]:
    """Ends of documents drawn from the corpus; longer ones are cut to `cap` tokens, the last to what is left."""
    rng = np.random.default_rng(seed)
    share = np.array([count for _, _, count in BUCKETS], dtype=np.float64)
    share /= share.sum()

    def draw() -> int:
        low, high, _ = BUCKETS[rng.choice(len(BUCKETS), p=share)]
        return min(int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))), cap or num_tokens)

    return _fill(num_tokens, draw)


def uniform_pack(num_tokens: int, seed: int, *, shortest: int, longest: int) -> list[int]:
    """Ends of documents of `shortest` to `longest` tokens, the last cut to what is left."""
    rng = np.random.default_rng(seed)
    return _fill(num_tokens, lambda: int(rng.integers(shortest, longest + 1)))


def equal_pack(num_tokens: int, documents: int) -> list[int]:
    """Ends of `documents` documents of equal length, to one token."""
    return [num_tokens * (n + 1) // documents for n in range(documents)]


def _fill(num_tokens: int, draw: Callable[[], int]) -> list[int]:
    ends, end = [], 0
    while end < num_tokens:
        end = min(end + max(draw(), 1), num_tokens)
        ends.append(end)
    return ends
