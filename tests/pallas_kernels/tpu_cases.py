"""What the TPU kernel must return for ragged batches, and both ways to simulate it."""

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

from pallas_kernels import FORMATS, NO_WINDOW, KVFormat, TileSizes, TpuTiles
from pallas_kernels.tpu_attention import tpu_attention
from pallas_kernels.tpu_tiles import KernelShape
from tests.pallas_kernels import ragged_cases
from tests.pallas_kernels.ragged_cases import LAYER, Case, bits

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


def kept_as(name: str) -> KVFormat:
    """A format by its name, as the kernel sees it: rotated or not, it does not know."""
    return dataclasses.replace(FORMATS[name], is_rotated=False)


@dataclasses.dataclass(frozen=True)
class Setup(ragged_cases.Setup):
    """All that a compiled program depends on; sizes of the kernel's pieces are made small."""

    platform: str = "tpu"
    tiles: TpuTiles | None = SMALL_TILES
    writes: bool = True

    @property
    def compute(self) -> str:
        return "float32" if self.kv.k == jnp.float32 else "bfloat16"

    @property
    def shape(self) -> KernelShape:
        return KernelShape(
            self.kv_heads,
            self.num_heads // self.kv_heads,
            self.row.head_dim(self.kv.k),
            self.block_size,
            self.table_width * self.block_size,
            self.kv,
            self.row,
        )

    def scaled(self, q: np.ndarray) -> np.ndarray:
        scaled = q * np.float32(self.head_dim**-0.5)
        return scaled.astype(jnp.dtype(self.compute)).astype(np.float64)


def simulate(case: Case, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result, f32[rows, H, D], and the pool, in one of the `SIMULATED` modes.

    Raises:
      AssertionError: a race, a semaphore that is not zero in the end, or padding rows not zero.
    """
    with races_are_errors():
        out, pool = compiled(case.setup, mode)(*arguments(case))
        out, pool = np.asarray(out), np.asarray(pool)
    assert not out[case.num_rows :].any()
    return out[: case.num_rows], pool


def check(case: Case, mode: str) -> None:
    """Result against the oracle, and every bit of the pool."""
    out, pool = simulate(case, mode)
    tolerance = TOLERANCE[case.setup.compute]
    np.testing.assert_allclose(out, case.oracle(), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(bits(pool), bits(case.after))


def arguments(case: Case) -> tuple[Any, ...]:
    """What `call` takes, on the device."""
    new = jnp.asarray(case.new) if case.setup.writes else None
    scales = None if case.scales is None else jnp.asarray(case.scales)
    window = jnp.int32(NO_WINDOW if case.window is None else case.window)
    pool = jnp.asarray(case.before if case.setup.writes else case.after)
    q, batch = jnp.asarray(case.q), case.batch
    return q, new, pool, scales, jnp.int32(LAYER), batch, window


def call(setup: Setup, mode: str, q, new, pool, scales, layer, batch, window):
    return tpu_attention(
        q,
        new,
        pool,
        scales,
        layer,
        batch,
        kv_format=setup.kv,
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
