"""Benchmark workloads W1 to W4: seeded random token ids, so that nothing depends on a tokenizer.

`repeat` 0 is for warm-up; decoding is greedy and ignores end-of-sequence. Each returns the prompts
and the number of new tokens of each.
"""

import numpy as np

Workload = tuple[list[list[int]], int]

_BOS = 2  # of the Gemma 3 vocabulary
_W2_LENGTHS = np.random.default_rng(0).integers(16, 513, 32).tolist()  # 8,879 tokens


def _tokens(seed: int, count: int, bos: bool = True) -> list[int]:
    ids = np.random.default_rng(seed).integers(1000, 100000, count).tolist()
    if bos:
        ids[0] = _BOS
    return ids


def w1(repeat: int) -> Workload:
    """Single stream: one prompt of 128 tokens, 128 new ones."""
    return [_tokens(100 + repeat, 128)], 128


def w2(repeat: int) -> Workload:
    """Offline throughput: 32 prompts of 17 to 498 tokens, 64 new tokens each."""
    return [_tokens(1000 * repeat + j + 1, n) for j, n in enumerate(_W2_LENGTHS)], 64


def w3(repeat: int) -> Workload:
    """Shared prefix: 16 prompts of the same 1,024 tokens and 16 own ones, 16 new tokens each."""
    prefix = _tokens(300 + repeat, 1024)
    return [prefix + _tokens(5000 + 100 * repeat + j, 16, bos=False) for j in range(16)], 16


def w4(repeat: int) -> Workload:
    """Prefill: one prompt of 1,024 tokens, one new token."""
    return [_tokens(200 + repeat, 1024)], 1


WORKLOADS = {"W1": w1, "W2": w2, "W3": w3, "W4": w4}
