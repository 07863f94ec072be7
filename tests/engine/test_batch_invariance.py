"""Batch-invariant steps: a token's bits depend on its own sequence, never on how it was computed.

Sequences are cut in random chunks, mixed in random batches over a pool of stale blocks and NaN, and
compared bit by bit with the same sequences computed alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import KVCache, Params, StepInput, bind, random_params
from pallas_kernels import plain_format, storage_dtype
from tests.engine.tiny import SLIDING, UNIFORM, tiny_params

NULL_BLOCK = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The one bucket, N rows and S sequences, and the blocks."""

    rows: int
    seqs: int
    block_size: int = 16
    table_width: int = 20  # contexts of several loop steps of the attention

    @property
    def max_len(self) -> int:
        return self.block_size * self.table_width


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens of a sequence; the first `shared` of them are found in the blocks of `parent`."""

    token_ids: np.ndarray
    parent: int = 0
    shared: int = 0


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _step(
    config: DecoderConfig,
    params: Params,
    token_ids: jax.Array,
    step: StepInput,
    cache: KVCache,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array, KVCache]:
    model = bind(config, params)
    hidden, cache = model(token_ids, step, cache)
    return hidden, model.logits(hidden[rows]), cache


class World:
    """Computes chunks of `prompts` over one pool, and keeps what came out for every token.

    Attributes:
      done: tokens of each sequence that are computed.
      hidden: f32[sequences, max_len, hidden]; logits: f32[sequences, max_len, vocab]; zero where
        nothing was computed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        shape: Shape,
        prompts: list[Prompt],
        rng: np.random.Generator,
    ):
        self.config, self.params, self.shape, self.prompts = config, params, shape, prompts
        self.rng = rng
        self.done = [prompt.shared for prompt in prompts]
        self.hidden = np.zeros((len(prompts), shape.max_len, config.hidden_size), np.float32)
        self.logits = np.zeros((len(prompts), shape.max_len, config.vocab_size), np.float32)
        groups = config.kv_layout.num_groups
        size = (groups, len(prompts), shape.table_width)
        blocks = rng.permutation(np.arange(1, np.prod(size) + 1, dtype=np.int32))
        self.tables = blocks.reshape(size)
        for i, prompt in enumerate(prompts):
            known = prompt.shared // shape.block_size
            self.tables[:, i, :known] = self.tables[:, prompt.parent, :known]
        self.cache = self._stale_cache(len(blocks) + 1)

    def _stale_cache(self, num_blocks: int) -> KVCache:
        """Blocks of NaN and of large values that others have left behind."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        shape = (c.num_kv_heads, self.shape.block_size, 2 * c.head_dim)
        shape = (c.kv_layout.layers_per_group, num_blocks, *shape)
        pool = self.rng.normal(0, 100, shape).astype(np.float32)
        pool[:, self.rng.random(num_blocks) < 0.5] = np.nan
        pool[:, NULL_BLOCK] = 0
        pool = pool.astype(dtype).view(storage_dtype(dtype, jax.default_backend()))
        return KVCache(jnp.array(pool), None, plain_format(dtype), None, batch_invariant=True)

    def ready(self) -> list[int]:
        """Sequences that have tokens to compute and find their prefix computed."""
        return [
            i
            for i, p in enumerate(self.prompts)
            if self.done[i] < len(p.token_ids) and self.done[p.parent] >= p.shared
        ]

    def compute(self, chunks: list[tuple[int, int]]) -> None:
        """One step: `(sequence, tokens)` in the order of their rows."""
        owners = [(i, self.done[i] + j) for i, length in chunks for j in range(length)]
        hidden, logits, wanted = self._run(chunks, owners)
        for row, (i, position) in enumerate(owners):
            self.hidden[i, position] = hidden[row]
        for k, row in enumerate(wanted):
            self.logits[owners[row]] = logits[k]
        for i, length in chunks:
            self.done[i] += length

    def _run(self, chunks: list[tuple[int, int]], owners: list[tuple[int, int]]) -> tuple:
        shape, rng = self.shape, self.rng
        token_ids = rng.integers(0, self.config.vocab_size, shape.rows, np.int32)
        positions = rng.integers(0, shape.max_len, shape.rows, np.int32)
        for row, (i, position) in enumerate(owners):
            token_ids[row], positions[row] = self.prompts[i].token_ids[position], position
        starts = np.zeros(shape.seqs + 1, np.int32)
        lengths = [length for _, length in chunks] + [0] * (shape.seqs - len(chunks))
        np.cumsum(lengths, out=starts[1:])
        context_lens = np.zeros(shape.seqs, np.int32)
        tables = np.full((len(self.tables), shape.seqs, shape.table_width), NULL_BLOCK, np.int32)
        for s, (i, length) in enumerate(chunks):
            context_lens[s] = self.done[i] + length
            tables[:, s] = self._tables_of(i)
        step = StepInput(*map(jnp.asarray, (positions, starts, context_lens, tables)))
        rows = rng.permutation(len(owners))[: shape.seqs]
        padded = np.zeros(shape.seqs, np.int32)
        padded[: len(rows)] = rows
        hidden, logits, self.cache = _step(
            self.config, self.params, jnp.asarray(token_ids), step, self.cache, jnp.asarray(padded)
        )
        return np.asarray(hidden), np.asarray(logits), rows

    def _tables_of(self, i: int) -> np.ndarray:
        """i32[G, B]; blocks that no later token sees are given back, often to somebody else."""
        tables = self.tables[:, i].copy()
        for group, window in enumerate(self.config.kv_layout.windows):
            gone = max(0, self.done[i] - window + 1) // self.shape.block_size
            tables[group, :gone] = self.rng.choice([NULL_BLOCK, self.tables.max()], gone)
        return tables

    def kept(self) -> np.ndarray:
        """The pool's bits of every computed token: [sequences, max_len, G, Lg, KVH, 2 * D]."""
        pool = np.asarray(self.cache.pool)
        pool = pool.view(f"u{pool.dtype.itemsize}")
        rows = pool[:, self.tables]  # [Lg, G, sequences, B, KVH, T, 2 * D]
        rows = rows.transpose(2, 3, 5, 1, 0, 4, 6)
        rows = rows.reshape(rows.shape[0], self.shape.max_len, *rows.shape[3:])
        for i, done in enumerate(self.done):
            rows[i, done:] = 0
        return rows


def run_alone(world: World) -> World:
    """Every sequence from row 0, one after the other, logits of every token."""
    while ready := world.ready():
        i = ready[0]
        world.compute([(i, min(world.shape.seqs, len(world.prompts[i].token_ids) - world.done[i]))])
    return world


def run_mixed(world: World) -> World:
    """Random batches of random chunks; many decodes."""
    rng = world.rng
    while ready := world.ready():
        chosen = rng.permutation(ready)[: rng.integers(1, world.shape.seqs + 1)]
        budget, chunks = world.shape.rows, []
        for i in chosen.tolist():
            left = min(len(world.prompts[i].token_ids) - world.done[i], budget)
            if left:
                chunks.append((i, 1 if rng.random() < 0.5 else int(rng.integers(1, left + 1))))
                budget -= chunks[-1][1]
        world.compute(chunks)
    return world


def random_prompts(rng: np.random.Generator, shape: Shape, vocab: int, count: int) -> list[Prompt]:
    """Prompts of random length; every second one starts like one before it."""
    prompts: list[Prompt] = []
    for i in range(count):
        token_ids = rng.integers(0, vocab, rng.integers(1, shape.max_len + 1), np.int32)
        parent, shared = i, 0
        if i % 2:
            parent = 2 * int(rng.integers(0, i // 2 + 1))
            most = min(len(token_ids) - 1, len(prompts[parent].token_ids)) // shape.block_size
            shared = int(rng.integers(0, most + 1)) * shape.block_size
            token_ids[:shared] = prompts[parent].token_ids[:shared]
        prompts.append(Prompt(token_ids, parent, shared))
    return prompts


def assert_same_bits(mixed: World, alone: World) -> None:
    for i, prompt in enumerate(mixed.prompts):
        own = slice(prompt.shared, None)
        np.testing.assert_array_equal(
            mixed.hidden[i, own].view(np.uint32), alone.hidden[i, own].view(np.uint32)
        )
    np.testing.assert_array_equal(mixed.kept(), alone.kept())
    asked = mixed.logits.any(-1)
    assert asked.any()
    np.testing.assert_array_equal(
        mixed.logits[asked].view(np.uint32), alone.logits[asked].view(np.uint32)
    )


def check(config: DecoderConfig, params: Params, shape: Shape, seeds: range, count: int) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        prompts = random_prompts(rng, shape, config.vocab_size, count)
        apart = [Prompt(p.token_ids, i) for i, p in enumerate(prompts)]
        alone = run_alone(World(config, params, shape, apart, rng))
        for _ in range(3):
            assert_same_bits(run_mixed(World(config, params, shape, prompts, rng)), alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
def test_random_schedules_give_the_same_bits_as_sequences_alone(model, dtype):
    config = dataclasses.replace(model, dtype=dtype)
    params = tiny_params(model) if dtype == "float32" else random_params(config, "cpu")
    check(config, params, Shape(rows=48, seqs=5), range(2), count=6)


# In the manner of Gemma 3 270M, and of a Llama with three query heads on each KV head.
GEMMA = dataclasses.replace(
    SLIDING,
    vocab_size=4099,
    hidden_size=640,
    intermediate_size=2048,
    num_kv_heads=1,
    head_dim=256,
    windows=(100, NO_WINDOW) * 2,
    attn_scale=1 / 16,
    embed_scale=640**0.5,
)
LLAMA = dataclasses.replace(
    UNIFORM,
    vocab_size=3001,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    attn_scale=1 / 8,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "rows"),
    [
        (GEMMA, "float32", 64),
        (GEMMA, "bfloat16", 208),
        (LLAMA, "float32", 208),
        (LLAMA, "bfloat16", 64),
    ],
    ids=["gemma-float32-64", "gemma-bfloat16-208", "llama-float32-208", "llama-bfloat16-64"],
)
def test_large_models_give_the_same_bits_in_random_schedules(model, dtype, rows):
    config = dataclasses.replace(model, dtype=dtype)
    params = random_params(config, "cpu")
    check(config, params, Shape(rows, seqs=rows // 8), range(1), count=12)


def test_a_step_whose_rows_leave_a_remainder_is_refused():
    prompts = [Prompt(np.zeros(3, np.int32))]
    rng = np.random.default_rng(0)
    world = World(UNIFORM, tiny_params(UNIFORM), Shape(rows=20, seqs=2), prompts, rng)
    with pytest.raises(AssertionError, match="20"):
        world.compute([(0, 3)])


def test_other_steps_do_differ():
    """Negative control: these schedules do tell when results depend on the batch."""
    shape, rng = Shape(rows=48, seqs=5), np.random.default_rng(0)
    prompts = random_prompts(rng, shape, SLIDING.vocab_size, 6)
    alone, mixed = (World(SLIDING, tiny_params(SLIDING), shape, prompts, rng) for _ in range(2))
    for world in (alone, mixed):
        world.cache = dataclasses.replace(world.cache, batch_invariant=False)
    with pytest.raises(AssertionError):
        assert_same_bits(run_mixed(mixed), run_alone(alone))
