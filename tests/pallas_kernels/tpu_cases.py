"""Ragged batches for the TPU kernel, what it must return, and both ways to simulate it."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import NO_WINDOW, RaggedBatch, TileSizes, TpuTiles
from pallas_kernels.reference import reference_attention
from pallas_kernels.tpu_attention import tpu_attention
from pallas_kernels.tpu_tiles import KernelShape

Lengths = list[tuple[int, int]]  # of each sequence: tokens of this step, tokens of the context
NUM_LAYERS, LAYER = 2, 1
NUM_SEQS, TABLE_WIDTH, NUM_BLOCKS, NUM_ROWS = 5, 12, 40, 72  # one program serves many batches
SMALL_TILES = TpuTiles(TileSizes(1, 4, 16), TileSizes(8, 4, 16))
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # by dtype of the products; |v| < 5

# Uninitialized memory is NaN. Copies that share an entry of the vector clock, given at random, are
# never seen to race: the default of one entry for all of them finds next to nothing.
_races = pltpu.InterpretParams(detect_races=True, vector_clock_size=256)
SIMULATED: dict[str, Any] = {
    "races": _races,  # a copy moves its bytes when it is waited for
    "eager": dataclasses.replace(_races, dma_execution_mode="eager"),  # ... when it is started
    "plain": True,
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a compiled program depends on; sizes of the kernel's pieces are made small."""

    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    lanes: int = 16
    block_size: int = 8
    kv_dtype: str = "float32"
    is_quantized: bool = False
    tiles: TpuTiles | None = SMALL_TILES
    soft_cap: float | None = None
    with_sinks: bool = False
    batch_invariant: bool = False
    writes: bool = True
    num_rows: int = NUM_ROWS

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.kv_dtype)

    @property
    def compute(self) -> str:
        return "float32" if self.kv_dtype == "float32" else "bfloat16"

    @property
    def shape(self) -> KernelShape:
        return KernelShape(
            self.kv_heads,
            self.num_heads // self.kv_heads,
            self.lanes,
            self.block_size,
            TABLE_WIDTH * self.block_size,
            self.dtype,
            self.is_quantized,
        )

    @property
    def sinks(self) -> np.ndarray | None:
        return np.linspace(-1, 2, self.num_heads).astype(np.float32) if self.with_sinks else None


@dataclasses.dataclass
class TpuCase:
    """A batch of `setup`'s shapes.

    Attributes:
      q: f32[N, H, D]. new: [N, KVH, 2 * lanes].
      before, after: [Lg, P, KVH, T, 2 * lanes], the pool without and with this step's rows.
      scales: f32[Lg, P, KVH, 2, T], this step's already written; or None.
    """

    setup: Setup
    q: np.ndarray
    new: np.ndarray
    before: np.ndarray
    after: np.ndarray
    scales: np.ndarray | None
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    window: int | None

    @property
    def num_rows(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.query_start[-1])

    @property
    def batch(self) -> RaggedBatch:
        arrays = (self.query_start, self.context_lens, self.block_tables)
        return RaggedBatch(*map(jnp.asarray, arrays))

    def oracle(self) -> np.ndarray:
        """f64[rows, H, D] from the queries and values that the kernel multiplies."""
        dtype = jnp.dtype(self.setup.compute)
        return reference_attention(
            (self.q * np.float32(self.setup.head_dim**-0.5)).astype(dtype).astype(np.float64),
            self.after.astype(np.float32),
            LAYER,
            self.query_start,
            self.context_lens,
            self.block_tables,
            scales=self.scales,
            sm_scale=1.0,
            soft_cap=self.setup.soft_cap,
            window=self.window,
            sinks=self.setup.sinks,
        )[: self.num_rows]


def bits(x: np.ndarray) -> np.ndarray:
    """The array as unsigned integers: NaNs compare by their patterns."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def make_case(setup: Setup, seed: int, lengths: Lengths, window: int | None = None) -> TpuCase:
    """A random batch of `lengths`; whatever nobody may read is NaN, in many patterns.

    That is: other layers, other blocks (the null block, too), slots behind a context's end, lanes
    of new rows that are padding rows, blocks that lie before every window, and in `before` the
    slots of this step.
    """
    rng = np.random.default_rng(seed)
    size = setup.block_size
    tables = _tables(rng, setup, lengths, window)
    pool_shape = (NUM_LAYERS, NUM_BLOCKS, setup.kv_heads, size, 2 * setup.lanes)
    before, after = (_poison(rng, pool_shape, setup) for _ in range(2))
    after[:] = before
    new = _poison(rng, (setup.num_rows, setup.kv_heads, 2 * setup.lanes), setup)
    scales = None
    if setup.is_quantized:
        scales = np.full((NUM_LAYERS, NUM_BLOCKS, setup.kv_heads, 2, size), np.nan, np.float32)
    row = 0
    for s, (query, context) in enumerate(lengths):
        for position in range(context):
            block, slot = tables[s, position // size], position % size
            if block == 0:
                continue
            values = _values(rng, setup)
            after[LAYER, block, :, slot] = values
            if scales is not None:
                scales[LAYER, block, :, :, slot] = rng.uniform(0.5, 2, (setup.kv_heads, 2))
                scales[LAYER, block, :, :, slot] *= 0.01 if setup.kv_dtype == "int8" else 1.0
            if position < context - query:
                before[LAYER, block, :, slot] = values
            else:
                new[row] = values
                row += 1
    query_lens = [query for query, _ in lengths] + [0] * (NUM_SEQS - len(lengths))
    contexts = [context for _, context in lengths] + [0] * (NUM_SEQS - len(lengths))
    return TpuCase(
        setup,
        rng.standard_normal((setup.num_rows, setup.num_heads, setup.head_dim)).astype(np.float32),
        new,
        before if setup.writes else after,
        after,
        scales,
        np.cumsum([0, *query_lens]).astype(np.int32),
        np.array(contexts, np.int32),
        tables,
        window,
    )


def random_lengths(rng: np.random.Generator, setup: Setup) -> Lengths:
    """Up to five sequences within the limits of the programs on rows, pages and blocks."""
    rows, blocks, lengths = NUM_ROWS, NUM_BLOCKS - 1, []
    for _ in range(rng.integers(1, NUM_SEQS + 1)):
        most = min(blocks, TABLE_WIDTH) * setup.block_size
        query = int(rng.choice([0, 1, 1, rng.integers(0, min(rows, most, 40) + 1)]))
        query = min(query, rows, most)
        old = int(rng.choice([0, rng.integers(0, most - query + 1)])) if query else 0
        lengths.append((query, query + old))
        rows -= query
        blocks -= -(-(query + old) // setup.block_size)
    return lengths


def _tables(
    rng: np.random.Generator, setup: Setup, lengths: Lengths, window: int | None
) -> np.ndarray:
    """i32[S, B]: random blocks for the pages that some row sees, the null block for others."""
    ids = iter(rng.permutation(np.arange(1, NUM_BLOCKS)))
    tables = np.zeros((NUM_SEQS, TABLE_WIDTH), np.int32)
    for s, (query, context) in enumerate(lengths):
        first = 0 if window is None else max(0, context - query - window + 1)
        for page in range(first // setup.block_size, -(-context // setup.block_size)):
            tables[s, page] = next(ids)
    return tables


def _poison(rng: np.random.Generator, shape: tuple[int, ...], setup: Setup) -> np.ndarray:
    """NaNs of random patterns; of int8, which has none, random numbers (their scales are NaN)."""
    if setup.kv_dtype == "int8":
        return rng.integers(-127, 128, shape, np.int8)
    base = bits(np.full((), np.nan, setup.dtype))
    sign = np.array(1 << (8 * setup.dtype.itemsize - 1), base.dtype)
    # On CPU, a bfloat16 that is moved keeps the sign of a NaN, but not the rest of its pattern.
    payload = rng.integers(0, 8, shape).astype(base.dtype) if setup.dtype.itemsize == 4 else 0
    return (
        (base | payload | np.where(rng.random(shape) < 0.5, sign, 0))
        .astype(base.dtype)
        .view(setup.dtype)
    )


def _values(rng: np.random.Generator, setup: Setup) -> np.ndarray:
    """[KVH, 2 * lanes], K and V of a token, zero from D on."""
    shape = (setup.kv_heads, 2, setup.lanes)
    if setup.kv_dtype == "int8":
        values = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        values = rng.standard_normal(shape).astype(np.float32).astype(setup.dtype)
    values[..., setup.head_dim :] = 0
    return values.reshape(setup.kv_heads, 2 * setup.lanes)


def simulate(case: TpuCase, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result, f32[rows, H, D], and the pool, in one of the `SIMULATED` modes.

    Raises:
      AssertionError: a race, a semaphore that is not zero in the end, or padding rows not zero.
    """
    with races_are_errors():
        out, pool = compiled(case.setup, mode)(*arguments(case))
        out, pool = np.asarray(out), np.asarray(pool)
    assert not out[case.num_rows :].any()
    return out[: case.num_rows], pool


def check(case: TpuCase, mode: str) -> None:
    """Result against the oracle, and every bit of the pool."""
    out, pool = simulate(case, mode)
    tolerance = TOLERANCE[case.setup.compute]
    np.testing.assert_allclose(out, case.oracle(), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(bits(pool), bits(case.after))


def arguments(case: TpuCase) -> tuple[Any, ...]:
    """What `call` takes, on the device."""
    new = jnp.asarray(case.new) if case.setup.writes else None
    scales = None if case.scales is None else jnp.asarray(case.scales)
    window = jnp.int32(NO_WINDOW if case.window is None else case.window)
    q, pool, batch = jnp.asarray(case.q), jnp.asarray(case.before), case.batch
    return q, new, pool, scales, jnp.int32(LAYER), batch, window


def call(setup: Setup, mode: str, q, new, pool, scales, layer, batch, window):
    return tpu_attention(
        q,
        new,
        pool,
        scales,
        layer,
        batch,
        sm_scale=setup.head_dim**-0.5,
        soft_cap=setup.soft_cap,
        window=window,
        sinks=None if setup.sinks is None else jnp.asarray(setup.sinks),
        batch_invariant=setup.batch_invariant,
        tiles=setup.tiles,
        interpret=SIMULATED[mode],
    )


def compile_anew(setup: Setup, mode: str) -> Any:
    """`call` as one program, whose layer, window and lengths are traced."""
    # Simulated in C++ or Python anyway: do not spend seconds to optimize the program.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(call, setup, mode), compiler_options=options)


compiled = functools.cache(compile_anew)


@contextlib.contextmanager
def races_are_errors() -> Iterator[None]:
    """AssertionError if a kernel that is simulated inside has a race or leaves a semaphore.

    The simulator keeps what it finds for one kernel only, and a call here is two of them.
    """
    found = []
    make = simulator.RaceDetectionState

    def record(*args: Any, **options: Any) -> Any:
        found.append(make(*args, **options))
        return found[-1]

    printed = io.StringIO()
    simulator.RaceDetectionState = record
    try:
        with contextlib.redirect_stdout(printed):
            yield
            jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:  # from jax 0.12 on, a race raises
        if "RACE DETECTED" in str(error):
            raise AssertionError(str(error)) from error
        raise
    finally:
        simulator.RaceDetectionState = make
        pltpu.reset_tpu_interpret_mode_state()
    assert not any(state.races_found for state in found), printed.getvalue()
    assert "non-zero count" not in printed.getvalue(), printed.getvalue()
