"""Is the attention kernel right on this very device? A small batch at start, against plain XLA.

A kernel that was tested on one chip, driver and compiler runs on others that its authors never saw.
Wrong results would look like a bad model, so the engine compares before it serves anybody. What
cannot be seen here: a kernel that hangs, or that breaks the device for everything after it.

The batch has what a step has: decodes at both sides of a block's border and far from it, a prompt's
beginning, a chunk behind an old context, padding rows and sequences, blocks in random order. What
nobody may read is NaN: slots behind a context's end and those of this step, blocks that left the
window, the null block, another layer.
"""

import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.errors import KernelCheckError
from pagedjax.memory import pool_shape
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pallas_kernels import (
    Implementation,
    KVFormat,
    RaggedBatch,
    paged_attention_and_write,
    plan_attention,
    slot_mapping,
    storage_dtype,
    to_storage,
    write_kv,
)

CHECKED: frozenset[tuple[str, str]] = frozenset({("gpu", "mosaic_gpu")})
"""Platform and implementation of what is checked when an engine starts."""

_NUM_ROWS, _NUM_SEQS = 96, 8  # more than the batch has: the others are padding
_NUM_LAYERS, _LAYER = 2, 1
_NAN_SCALES = np.uint32(0x7FC07FC0)  # of K and of V
_SMALL_WINDOW = 40  # shorter than the chunk and most contexts, no multiple of a block's size

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What came of a check.

    Attributes:
      largest_difference: between a number of the kernel's and XLA's; NaN if one of them is NaN.
      tolerance: the largest difference that rounding explains.
      is_pool_right: the kernel left every bit of the pool, and of its scales, as XLA did.
      error: what compiling or running the kernel raised; then the others say nothing.
    """

    largest_difference: float
    tolerance: float
    is_pool_right: bool
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        # NaN compares as False, so it must not be asked whether a difference is too large.
        near = self.largest_difference <= self.tolerance
        return self.error is None and self.is_pool_right and near

    def __str__(self) -> str:
        if self.error is not None:
            first_line = (str(self.error).splitlines() or [""])[0]
            return f"it raised {type(self.error).__name__}: {first_line}"
        pool = "is right" if self.is_pool_right else "differs"
        return (
            f"its largest difference from plain XLA is {self.largest_difference:.3g}, "
            f"the tolerance {self.tolerance:.3g}; what it wrote to the KV pool {pool}"
        )


def working_attention(
    wanted: Implementation | None,
    chosen: Implementation,
    model: DecoderConfig,
    *,
    block_size: int,
    kv_format: KVFormat,
    device: Any,
    batch_invariant: bool,
) -> Implementation:
    """`chosen`, if it is none that is checked on `device`, or right; else "xla", and a warning.

    Args:
      wanted: what the user named; None leaves the choice to us.
      device: the `jax.Device` that will compute.

    Raises:
      KernelCheckError: the kernel that the user named is not right.
    """
    if (device.platform, chosen) not in CHECKED:
        return chosen
    with jax.default_device(device):
        result = check_attention(
            model,
            block_size=block_size,
            kv_format=kv_format,
            implementation=chosen,
            platform=device.platform,
            batch_invariant=batch_invariant,
        )
    if result.ok:
        return chosen
    backend = " ".join(device.client.platform_version.split())
    what = (
        f"the attention kernel {chosen!r} failed its self-check on {device.device_kind}: {result}"
    )
    report = f"please report this message, with jax {jax.__version__}, {backend} and the driver"
    if wanted is not None:
        raise KernelCheckError(
            f'{what}; attention=None or "xla" goes on without it; {report}'
        ) from result.error
    _log.warning(
        "%s. ATTENTION NOW RUNS IN PLAIN XLA, WHICH IS SLOWER; %s",
        what,
        report,
        exc_info=result.error,
    )
    return "xla"


def check_attention(
    model: DecoderConfig,
    *,
    block_size: int,
    kv_format: KVFormat,
    implementation: Implementation,
    platform: str,
    batch_invariant: bool = False,
) -> CheckResult:
    """Run `implementation` and "xla" on the same small batch of the model's heads.

    Without a window and, if the model has windows, with a small one.

    Args:
      block_size, kv_format, batch_invariant: as the engine will use them.
      platform: whose layout the pool gets; computed is on JAX's default device.

    Returns:
      The result, with whatever the kernel raised. What "xla" raises is not caught.
    """
    case = _make_case(model, block_size, kv_format, platform, batch_invariant)
    wanted, wanted_cache = _attend(case, "xla")
    # Kernels multiply in 16 bits what is not float32: queries and weights are rounded by up to
    # 2**-9 of themselves, and XLA rounds them at another place, or not at all. In such a batch, of
    # scores and values of about 1, that makes up to 0.009. All multiply float32 as it is.
    tolerance = 1e-4 if kv_format.k == jnp.float32 else 2e-2
    try:
        got, cache = _attend(case, implementation)
    except Exception as error:  # whatever it is, the engine can do without the kernel
        return CheckResult(math.nan, tolerance, False, error)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should
        difference = np.abs(got - wanted).max()
    is_pool_right = all(map(np.array_equal, cache, wanted_cache))
    return CheckResult(float(difference), tolerance, is_pool_right)


@dataclasses.dataclass(frozen=True)
class _Case:
    """What both implementations are given.

    Attributes:
      q: f32[N, H, D]. k, v: f32[N, KVH, D]; float32 as in the decoder.
      pool, scales: as in `KVCache`, without this step's rows.
      batches: windows, and the batch whose tables lack the blocks that the window passed.
    """

    model: DecoderConfig
    kv_format: KVFormat
    batch_invariant: bool
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pool: jax.Array
    scales: jax.Array | None
    batches: list[tuple[int, RaggedBatch]]

    @property
    def num_used_rows(self) -> int:
        return int(self.batches[0][1].query_start[-1])


def _lengths(block_size: int) -> np.ndarray:
    """i64[sequences, 2]: tokens of this step, and of the context."""
    border = block_size
    # The longest is cut in two by kernels that spread a decode's keys over several programs.
    return np.array([(1, border), (1, border + 1), (1, 1), (1, 1100), (70, 203), (9, 9)])


def _make_case(
    model: DecoderConfig,
    block_size: int,
    kv_format: KVFormat,
    platform: str,
    batch_invariant: bool,
) -> _Case:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    heads, head_dim = model.num_kv_heads, model.head_dim
    # Scores of about 1, whatever the model's scale: large ones blow up the rounding of q.
    q = normal(_NUM_ROWS, model.num_heads, head_dim) / (model.attn_scale * math.sqrt(head_dim))
    k, v = normal(_NUM_ROWS, heads, head_dim), normal(_NUM_ROWS, heads, head_dim)
    lengths = _lengths(block_size)
    pages = -(-lengths[:, 1] // block_size)
    num_blocks = int(pages.sum()) + 4
    ids = rng.permutation(np.arange(1, num_blocks))
    tables = np.zeros((_NUM_SEQS, pages.max()), np.int32)
    old_rows, places = [], []
    for s, (query, context) in enumerate(lengths):
        tables[s, : pages[s]], ids = ids[: pages[s]], ids[pages[s] :]
        old = np.arange(context - query)
        old_rows.append(normal(2, len(old), heads, head_dim))
        places.append((tables[s, old // block_size], old % block_size))
    shape = pool_shape(model, block_size, num_blocks, kv_format, platform)
    pool, scales = write_kv(
        *_poison((_NUM_LAYERS, *shape[1:]), kv_format, platform),
        _LAYER,
        *np.concatenate(old_rows, axis=1),
        *np.concatenate(places, axis=1).astype(np.int32),
        kv_dtype=kv_format,
    )
    return _Case(
        model,
        kv_format,
        batch_invariant,
        *(q, k, v),
        *(pool, scales),
        [(window, _batch(lengths, tables, block_size, window)) for window in _windows(model)],
    )


def _poison(
    shape: tuple[int, ...], kv_format: KVFormat, platform: str
) -> tuple[jax.Array, jax.Array | None]:
    """A pool and its scales, NaN everywhere; integer elements are some number, times NaN."""
    element = kv_format.element
    is_integer = jnp.issubdtype(element, jnp.integer)
    values = jnp.full(shape, 77 if is_integer else math.nan, element)
    pool = to_storage(values, element, storage_dtype(element, platform))
    scales = jnp.full(shape[:-1], _NAN_SCALES, jnp.uint32) if kv_format.has_scales else None
    return pool, scales


def _windows(model: DecoderConfig) -> list[int]:
    smallest = min(model.windows)
    return [NO_WINDOW] if smallest == NO_WINDOW else [NO_WINDOW, min(smallest, _SMALL_WINDOW)]


def _batch(lengths: np.ndarray, tables: np.ndarray, block_size: int, window: int) -> RaggedBatch:
    """The batch, with the null block for what no row sees through the window, as in an engine."""
    query, context = np.pad(lengths, ((0, _NUM_SEQS - len(lengths)), (0, 0))).T
    first = np.maximum(0, context - query - window + 1) // block_size
    tables = np.where(np.arange(tables.shape[1]) < first[:, None], 0, tables)
    starts = np.cumsum([0, *query])
    return RaggedBatch(*(jnp.asarray(x.astype(np.int32)) for x in (starts, context, tables)))


def _attend(case: _Case, implementation: Implementation) -> tuple[np.ndarray, list[np.ndarray]]:
    """Results f32[batches, used rows, H, D], and the bits of pool and scales after each batch."""

    @jax.jit  # anew: a later check must not believe what an earlier one compiled
    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pool: jax.Array,
        scales: jax.Array | None,
        layer: jax.Array,
        batch: RaggedBatch,
        window: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        how = {
            "kv_dtype": case.kv_format,
            "implementation": implementation,
            "batch_invariant": case.batch_invariant,
        }
        model = case.model
        return paged_attention_and_write(
            *(q, k, v, pool, scales, layer, batch),
            slots=slot_mapping(batch, len(q), block_size=pool.shape[3], num_blocks=pool.shape[1]),
            layout=plan_attention(
                batch, len(q), model.num_heads, model.head_dim, pool, scales, **how
            ),
            sm_scale=model.attn_scale,
            soft_cap=model.attn_soft_cap,
            window=window,
            **how,
        )

    rows = (case.q, case.k, case.v, case.pool, case.scales)
    results = [
        attend(*rows, jnp.int32(_LAYER), batch, jnp.int32(window)) for window, batch in case.batches
    ]
    outs = [np.asarray(out)[: case.num_used_rows] for out, *_ in results]
    written = [np.asarray(x) for _, *cache in results for x in jax.tree.leaves(cache)]
    return np.stack(outs), [x.view(f"u{x.itemsize}") for x in written]
