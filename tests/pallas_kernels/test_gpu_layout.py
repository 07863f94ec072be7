"""The GPU kernel's work list, for random batches: everything once, nothing stored twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import GpuTiles, GpuTileSizes, RaggedBatch
from pallas_kernels.gpu_layout import (
    END,
    POSITION,
    ROW,
    SEQ,
    SPLIT,
    GpuCallLayout,
    lay_out,
    tile_tokens,
)
from pallas_kernels.gpu_tiles import TILE_ROWS, GpuShape
from pallas_kernels.kv_format import FORMATS, Row

NUM_SEQS, NUM_ROWS, NUM_KEYS = 6, 96, 512
TILES = GpuTiles(GpuTileSizes(2, 64, 2, 128), GpuTileSizes(2, 64, 2, 64))
jitted = jax.jit(lay_out, static_argnums=(1, 2, 3), static_argnames=("batch_invariant",))


@st.composite
def batches(draw) -> list[tuple[int, int]]:
    """Tokens of this step and of the context, of up to six sequences with 96 rows."""
    rows, lengths = NUM_ROWS, []
    for _ in range(draw(st.integers(0, NUM_SEQS))):
        query = draw(st.one_of(st.integers(0, min(2, rows)), st.integers(0, rows)))
        old = draw(st.one_of(st.just(0), st.integers(0, NUM_KEYS - query)))
        lengths.append((query, query + old))
        rows -= query
    return lengths


def stored(part: GpuCallLayout, group: int, tokens: int) -> list[tuple[int, ...]]:
    """(split, first row, row behind the last) that each item stores, in units of 8 rows."""
    found = []
    for item in np.asarray(part.items)[: int(part.count[0])].tolist():
        rows = -(-min(tokens, item[END] - item[POSITION]) * group // 8) * 8
        found.append((item[SPLIT], item[ROW], item[ROW] + rows))
    return found


def check(part: GpuCallLayout, lengths: list[tuple[int, int]], want, sizes, group, tokens):
    """`want`: rows (sequence, position) that this call computes, by their row of the batch."""
    items = np.asarray(part.items)[: int(part.count[0])]
    target = np.asarray(part.rows.target)
    position, end = np.asarray(part.position), np.asarray(part.end)
    size = len(part.rows.source)
    assert np.flatnonzero(part.chosen).tolist() == sorted(want)
    seen = {(split, row) for split, row, _ in stored(part, group, tokens)}
    assert len(seen) == len(items), "two items with the same result"
    used = {}
    for split, first, last in stored(part, group, tokens):
        assert first % 8 == 0
        assert last <= size * group
        for row in range(first, last):
            assert used.setdefault((split, row), first) == first, "stored by two tiles"
    covered: dict[int, list[int]] = {row: [] for row in want}
    for item in items.tolist():
        seq, start, stop, split = item[SEQ], item[POSITION], item[END], item[SPLIT]
        query, context = lengths[seq]
        assert context - query <= start < stop <= context
        assert stop - start <= tokens
        assert item[ROW] + max(TILE_ROWS * sizes.warpgroups, group) <= size * group or tokens == 1
        for token in range(stop - start):
            place = item[ROW] // group + token
            assert (position[place], end[place]) == (start, stop)
            row = int(part.rows.source[place])
            assert want[row] == (seq, start + token)
            assert target[row] == place
            keys = range(split * sizes.split, min((split + 1) * sizes.split, start + token + 1))
            covered[row] += keys
    for row, (_, at) in want.items():
        assert covered[row] == list(range(at + 1)), "keys of a row"
    nobody = np.ones(size, bool)
    nobody[target[list(want)]] = False
    assert not position[nobody].any()
    assert not end[nobody].any()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 17])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=batches())
def test_every_row_meets_each_of_its_keys_once(group, batch_invariant, lengths):
    shape = GpuShape(2, group, 64, 16, NUM_KEYS, FORMATS["bfloat16"], Row(64, 64))
    padding = [(0, 0)] * (NUM_SEQS - len(lengths))
    query_lens, contexts = zip(*lengths, *padding, strict=True)
    start = np.cumsum([0, *query_lens]).astype(np.int32)
    tables = jnp.zeros((NUM_SEQS, NUM_KEYS // 16), jnp.int32)
    batch = RaggedBatch(jnp.asarray(start), jnp.asarray(contexts, jnp.int32), tables)
    layout = jitted(batch, NUM_ROWS, shape, TILES, batch_invariant=batch_invariant)
    assert (layout.decode is None) == batch_invariant
    for part, sizes in ((layout.decode, TILES.decode), (layout.chunk, TILES.chunk)):
        if part is None:
            continue
        is_decode = part is layout.decode
        row_group = shape.row_group(sizes, is_decode=is_decode)
        want = {
            int(start[s]) + token: (s, context - query + token)
            for s, (query, context) in enumerate(lengths)
            if query and is_decode == (query == 1 and not batch_invariant)
            for token in range(query)
        }
        tokens = tile_tokens(shape, sizes, is_decode=is_decode)
        check(part, lengths, want, sizes, row_group, tokens)


def test_one_row_makes_no_chunks():
    shape = GpuShape(2, 4, 64, 16, NUM_KEYS, FORMATS["bfloat16"], Row(64, 64))
    arrays = (jnp.array([0, 1]), jnp.array([5]), jnp.zeros((1, 32), jnp.int32))
    batch = RaggedBatch(*(x.astype(jnp.int32) for x in arrays))
    assert lay_out(batch, 1, shape, TILES, batch_invariant=False).chunk is None
    assert lay_out(batch, 1, shape, TILES, batch_invariant=True).decode is None
