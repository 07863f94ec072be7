"""A hash stands for all tokens up to a block's end and what they were computed with, in one way."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.block_hash import block_hash, private_root, root_hash

ROOT = root_hash(0)


def chain(root: bytes, *blocks: list[int]) -> list[bytes]:
    hashes = []
    for block in blocks:
        root = block_hash(root, block)
        hashes.append(root)
    return hashes


def test_values_are_the_same_in_every_process_and_version() -> None:
    # Written down once. A change of them is no error, but must be meant: stored caches would miss.
    salted = root_hash(3, adapter_id="adapter", cache_salt="salt")
    values = [ROOT, salted, block_hash(ROOT, [1, 2, 3]), private_root(7)]
    assert [value.hex()[:16] for value in values] == [
        "375f9fbe1fd6bf47",
        "346b3f86a523bd6a",
        "c46c4080ade2ad2e",
        "4733c26b3a68b31e",
    ]
    assert {len(value) for value in values} == {32}


def test_another_process_finds_the_same() -> None:
    code = (
        "from pagedjax.block_hash import *;"
        "print(block_hash(root_hash(1, cache_salt='salt'), [5, 6]).hex())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == block_hash(root_hash(1, cache_salt="salt"), [5, 6]).hex()


def test_a_hash_depends_on_every_token_before_and_their_order() -> None:
    first, second = chain(ROOT, [1, 2], [3, 4])
    assert first != second
    for blocks in ([[1, 2], [4, 3]], [[2, 1], [3, 4]], [[3, 4], [1, 2]], [[9, 2], [3, 4]]):
        assert chain(ROOT, *blocks)[1] != second
    assert block_hash(ROOT, [3, 4]) != second  # the same tokens, at the beginning
    assert chain(ROOT, [1, 2], [3, 4]) == [first, second]


def test_how_tokens_are_cut_into_blocks_matters() -> None:
    whole = block_hash(ROOT, [1, 2, 3, 4])
    assert whole not in chain(ROOT, [1, 2], [3, 4]) + chain(ROOT, [1], [2, 3, 4])


def test_tokens_do_not_run_into_each_other() -> None:
    lists = [[12, 3], [1, 23], [123], [1, 2, 3], [0, 123], [123, 0], [], [0], [0, 0], [256], [1, 0]]
    assert len({block_hash(ROOT, tokens) for tokens in lists}) == len(lists)


@given(st.lists(st.integers(0, 300), max_size=5), st.lists(st.integers(0, 300), max_size=5))
def test_different_tokens_have_different_hashes(one: list[int], other: list[int]) -> None:
    assert (block_hash(ROOT, one) == block_hash(ROOT, other)) == (one == other)


def test_any_kind_of_integers_gives_the_same_hash() -> None:
    for tokens in ((1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.int32)):
        assert block_hash(ROOT, tokens) == block_hash(ROOT, [1, 2, 3])


ROOTS = [
    {"weights_version": 0},
    {"weights_version": 1},
    {"weights_version": 10},
    *({"weights_version": 0, name: "a"} for name in ("adapter_id", "cache_salt")),
    {"weights_version": 0, "adapter_id": "a", "cache_salt": "a"},
    {"weights_version": 0, "adapter_id": "a", "cache_salt": ""},
    {"weights_version": 0, "cache_salt": ""},
    # What a careless join of the parts would confuse with others of this list.
    {"weights_version": 0, "cache_salt": "null"},
    {"weights_version": 0, "cache_salt": "None"},
    {"weights_version": 0, "adapter_id": 'a", "a'},
    {"weights_version": 0, "adapter_id": "a, a"},
    {"weights_version": 0, "adapter_id": '", null]'},
    {"weights_version": 0, "cache_salt": '["a"]'},
    {"weights_version": 0, "adapter_id": "ab", "cache_salt": "c"},
    {"weights_version": 0, "adapter_id": "a", "cache_salt": "bc"},
    {"weights_version": 0, "cache_salt": "\\u00e9"},
    {"weights_version": 0, "cache_salt": "é"},
    {"weights_version": 0, "cache_salt": "e\u0301"},
    {"weights_version": 0, "cache_salt": "\0"},
    {"weights_version": 0, "cache_salt": "\ud800"},  # no valid text, but a str
]


def test_different_extras_have_different_roots() -> None:
    roots = [root_hash(**extras) for extras in ROOTS]
    assert len(set(roots)) == len(roots)


def test_different_roots_share_no_block() -> None:
    roots = [root_hash(**extras) for extras in ROOTS] + [private_root(i) for i in range(20)]
    assert len({block_hash(root, [1, 2]) for root in roots}) == len(roots)


def test_private_roots_are_all_different_and_nobody_elses() -> None:
    roots = {private_root(i) for i in range(1000)}
    assert len(roots) == 1000
    assert roots.isdisjoint(root_hash(i) for i in range(1000))
    assert roots.isdisjoint(root_hash(0, cache_salt=str(i)) for i in range(1000))
