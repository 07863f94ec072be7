"""The allocator on the device against a plain model of it, and what forks read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import functional
from pagedjax.errors import ConfigError
from pagedjax.functional import Cache, Sampling
from pagedjax.functional.cache import reserve
from tests.engine.tiny import SLIDING, UNIFORM, oracle_logprobs, tiny_params

SEQS, MAX_LEN, BLOCK_SIZE, BLOCKS = 4, 16, 4, 21


@functools.cache
def empty() -> Cache:
    return functional.init_cache(
        SLIDING, num_seqs=SEQS, max_len=MAX_LEN, block_size=BLOCK_SIZE, num_blocks=BLOCKS
    )


@jax.jit
def grow(cache: Cache, num_new: jax.Array) -> Cache:
    cache, fits = reserve(cache, num_new)
    lens = cache.context_lens + jnp.where(fits, num_new, 0)
    return Cache(**{**vars(cache), "context_lens": lens})


fork, release = jax.jit(functional.fork), jax.jit(functional.release)

_each = functools.partial(st.lists, min_size=SEQS, max_size=SEQS)
_changes = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), _each(st.integers(0, 9))),
        st.tuples(st.just("fork"), _each(st.integers(0, SEQS - 1))),
        st.tuples(st.just("release"), _each(st.booleans())),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(_changes)
def test_blocks_are_neither_lost_nor_given_twice(changes: list) -> None:
    cache, lens = empty(), [0] * SEQS
    for kind, values in changes:
        before = room = int(cache.num_free)
        if kind == "grow":
            blocks = [_blocks(c + n) - _blocks(c) for c, n in zip(lens, values, strict=True)]
            for seq, (new, n) in enumerate(zip(blocks, values, strict=True)):
                fits = lens[seq] + n <= MAX_LEN
                # Who lacks a block stops those behind that need one.
                room -= new * len(cache.block_tables) if fits else 0
                if fits and (new == 0 or room >= 0):
                    lens[seq] += n
            cache = grow(cache, jnp.array(values, jnp.int32))
        elif kind == "fork":
            cache = fork(cache, jnp.array(values, jnp.int32))
            lost = np.asarray(cache.context_lens) == 0
            lens = [0 if gone else lens[parent] for gone, parent in zip(lost, values, strict=True)]
        else:
            cache = release(cache, jnp.array(values))
            lens = [0 if gone else n for n, gone in zip(lens, values, strict=True)]
            assert int(cache.num_free) >= before
        assert np.asarray(cache.context_lens).tolist() == lens
        _check(cache, lens)


def _blocks(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def _check(cache: Cache, lens: list[int]) -> None:
    """Tables cover the tokens and no more; full blocks alone are shared; the rest is free."""
    tables = np.asarray(cache.block_tables)
    owners: dict[int, set[int]] = {}
    for group, own in enumerate(tables):
        for seq, row in enumerate(own.tolist()):
            used = _blocks(lens[seq])
            assert all(row[:used])
            assert not any(row[used:])
            for i, block in enumerate(row[:used]):
                owners.setdefault(block, set()).add(group * 100 + i)
                if (i + 1) * BLOCK_SIZE > lens[seq]:  # a partial last block has one owner
                    assert np.count_nonzero(tables == block) == 1
    assert all(len(places) == 1 for places in owners.values())
    free = np.asarray(cache.free)[: int(cache.num_free)].tolist()
    assert sorted([*free, *owners]) == list(range(1, BLOCKS))


@pytest.mark.parametrize("config", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
def test_prefill_decode_and_fork_by_hand(config) -> None:
    """Logits behind every step are the oracle's, whoever forked from whom."""
    params = tiny_params(config)
    cache = functional.init_cache(config, num_seqs=3, max_len=24, block_size=4)
    prefill = jax.jit(functional.prefill, static_argnums=0, donate_argnums=2)
    decode = jax.jit(functional.decode_step, static_argnums=0, donate_argnums=2)
    texts = [[5, 6, 7, 8, 9, 10], [40], [3, 1, 4, 1]]
    padded = np.full((3, 6), 90, np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    lens = jnp.array([len(text) for text in texts], jnp.int32)
    cache, logits = prefill(config, params, cache, jnp.asarray(padded), lens)
    steps = [None, [1, 1, 0], None, [2, 0, 0], None, None]
    for i, parents in enumerate(steps):
        if parents is not None:
            cache = fork(cache, jnp.array(parents, jnp.int32))
            texts = [list(texts[parent]) for parent in parents]
        tokens = [(7 * i + 11 * seq) % 97 for seq in range(3)]
        active = [i != 4, True, True]
        cache, logits = decode(
            config, params, cache, jnp.array(tokens, jnp.int32), jnp.array(active)
        )
        for text, token, grows, row in zip(texts, tokens, active, logits, strict=True):
            if grows:
                text.append(token)
                found = np.asarray(row) - np.log(np.exp(np.asarray(row, np.float64)).sum())
                np.testing.assert_allclose(found, oracle_logprobs(config, text)[-1], atol=1e-4)
    assert not np.asarray(cache.overflowed).any()


def test_samples_follow_the_distribution_and_need_no_history() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]], jnp.float32)).repeat(4000, axis=0)
    seeds = functional.request_seeds(jax.random.key(0), jnp.arange(4000, dtype=jnp.int32))
    out = functional.sample(logits, Sampling(), seeds, jnp.zeros(4000, jnp.int32))
    share = np.bincount(np.asarray(out.token_ids), minlength=3) / 4000
    np.testing.assert_allclose(share, [0.5, 0.3, 0.2], atol=0.03)
    chosen = np.asarray(logits)[0][np.asarray(out.token_ids)]
    np.testing.assert_allclose(out.logprobs, chosen, atol=1e-5)
    with pytest.raises(ConfigError, match="min_tokens needs the sequences' tokens"):
        functional.sample(logits, Sampling(min_tokens=1), seeds, jnp.zeros(4000, jnp.int32))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_seqs": 0}, "num_seqs is 0; it must be at least 1"),
        ({"max_len": 65}, r"max_len is 65; it must be in \[1, 64\]"),
        ({"num_blocks": 2}, "num_blocks is 2; it must be above 2"),
        ({"attention": "mosaic_tpu"}, "attention: "),
    ],
)
def test_a_cache_that_cannot_be_is_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        functional.init_cache(SLIDING, **{"num_seqs": 2, "max_len": 16, **sizes})
