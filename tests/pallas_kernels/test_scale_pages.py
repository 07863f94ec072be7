"""Scales written by pages are the scales that `write_kv` writes row by row."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import RaggedBatch, slot_mapping
from pallas_kernels.scale_pages import touched_pages, write_scale_pages

HEADS, SEQS, WIDTH = 3, 5, 12


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=SEQS),
    size=st.sampled_from([1, 4, 8]),
    padding=st.integers(0, 3),
)
def test_every_row_gets_its_word_and_no_other_word_changes(seed, lengths, size, padding):
    rng = np.random.default_rng(seed)
    lengths = [(new, min(old, WIDTH * size - new)) for new, old in lengths if new <= WIDTH * size]
    lengths += [(0, 0)] * (SEQS - len(lengths))
    new, old = np.array(lengths).T
    num_rows = max(1, int(new.sum()) + padding)
    tables = rng.permutation(np.arange(1, 1 + SEQS * WIDTH)).reshape(SEQS, WIDTH)
    start, context = np.cumsum([0, *new]), np.where(new > 0, new + old, 0)
    batch = RaggedBatch(*(jnp.asarray(x.astype(np.int32)) for x in (start, context, tables)))
    scales = rng.integers(0, 2**32, (2, 1 + SEQS * WIDTH, HEADS, size), np.uint32)
    words = rng.integers(0, 2**32, (num_rows, HEADS), np.uint32)

    @jax.jit
    def write(scales, words, layer, batch):
        pages = touched_pages(batch, num_rows, size)
        return write_scale_pages(scales, layer, words, batch, pages)

    got = write(scales, words, jnp.int32(1), batch)
    want = scales.copy()
    block, slot = map(
        np.asarray, slot_mapping(batch, num_rows, block_size=size, num_blocks=scales.shape[1])
    )
    for row in range(int(new.sum())):
        want[1, block[row], :, slot[row]] = words[row]
    np.testing.assert_array_equal(got, want)
