"""What the GPU kernel must return for ragged batches, simulated with race detection."""

import contextlib
import dataclasses
import functools
import io
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as simulator

from pallas_kernels import NO_WINDOW, GpuTiles, GpuTileSizes
from pallas_kernels._compat import JAX_VERSION, gpu_simulator
from pallas_kernels.gpu_attention import gpu_attention
from pallas_kernels.gpu_tiles import GpuShape
from pallas_kernels.kv_format import FORMATS, KVFormat, plain_format
from tests.pallas_kernels import ragged_cases
from tests.pallas_kernels.ragged_cases import LAYER, Case

TOLERANCE = {"bfloat16": 5e-3, "float16": 2e-3}  # by dtype of the products; |v| < 5
# Simulated in Python anyway: do not spend seconds to optimize the programs.
UNOPTIMIZED: Any = {"xla_backend_optimization_level": 0}


# The others are said of a barrier that completes with nobody waiting for it.
RACES = (
    "RACE DETECTED|before previous completion was observed|no threads observed|"
    "only observed barrier up to|did not observe all phases|barrier is already at phase"
)


def small_tiles(
    decode: tuple[int, int, int] = (2, 64, 2), chunk: tuple[int, int, int] = (2, 64, 2)
) -> GpuTiles:
    """Sizes of (warpgroups, keys, stages), and splits so short that a context has several."""
    return GpuTiles(GpuTileSizes(*decode, split=128), GpuTileSizes(*chunk, split=128))


@dataclasses.dataclass(frozen=True)
class Setup(ragged_cases.Setup):
    """All that a compiled program depends on; sizes of the kernel's pieces are made small."""

    head_dim: int = 64
    platform: str = "gpu"
    block_size: int = 16
    kv: KVFormat = dataclasses.field(default_factory=lambda: plain_format("bfloat16"))
    num_rows: int = 136
    tiles: GpuTiles | None = dataclasses.field(default_factory=small_tiles)

    @property
    def compute(self) -> str:
        return "float16" if self.kv.k in (jnp.float16, jnp.float8_e4m3fn) else "bfloat16"

    @property
    def shape(self) -> GpuShape:
        return GpuShape(
            self.kv_heads,
            self.num_heads // self.kv_heads,
            self.row.head_dim(self.kv.k),
            self.block_size,
            self.table_width * self.block_size,
            self.kv,
            self.row,
        )

    def scaled(self, q: np.ndarray) -> np.ndarray:
        return q.astype(jnp.dtype(self.compute)).astype(np.float64) * self.head_dim**-0.5


def kernel_format(name: str) -> KVFormat:
    """As the kernel sees it: queries that come to it are rotated already."""
    return dataclasses.replace(FORMATS[name], is_rotated=False)


def paged(block_size: int, **fields: Any) -> Setup:
    """A setup with contexts of up to 384 tokens, or three blocks."""
    width = max(3, 384 // block_size)
    return Setup(block_size=block_size, table_width=width, num_blocks=1 + 3 * width, **fields)


def simulate(case: Case) -> np.ndarray:
    """The kernel's result, f32[rows, H, D].

    Raises:
      AssertionError: a race, or padding rows not zero.
    """
    with races_are_errors():
        out = np.asarray(compiled(case.setup)(*arguments(case)))
    assert not out[case.num_rows :].any()
    return out[: case.num_rows]


def check(case: Case) -> None:
    """Result against the oracle."""
    assert_right(case, simulate(case))


def check_anew(case: Case) -> None:
    """`check` of a kernel that is traced anew."""
    with races_are_errors():
        out = np.asarray(compile_anew(case.setup)(*arguments(case)))
    assert_right(case, out[: case.num_rows])


def assert_right(case: Case, out: np.ndarray) -> None:
    tolerance = TOLERANCE[case.setup.compute]
    np.testing.assert_allclose(out, case.oracle(), rtol=tolerance, atol=tolerance)


def arguments(case: Case) -> tuple[Any, ...]:
    """What `call` takes, on the device."""
    scales = None if case.scales is None else jnp.asarray(case.scales)
    window = jnp.int32(NO_WINDOW if case.window is None else case.window)
    q, pool = jnp.asarray(case.q), jnp.asarray(case.after)
    return q, pool, scales, jnp.int32(LAYER), case.batch, window


def call(setup: Setup, q, pool, scales, layer, batch, window):
    return gpu_attention(
        q,
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
        interpret=gpu_simulator(detect_races=True),
    )


def compile_anew(setup: Setup) -> Any:
    """`call` as one program, whose layer, window and lengths are traced."""
    return jax.jit(functools.partial(call, setup), compiler_options=UNOPTIMIZED)


compiled = functools.cache(compile_anew)


@contextlib.contextmanager
def races_are_errors() -> Iterator[None]:
    """AssertionError if a kernel that is simulated inside has a race.

    The simulator keeps what it finds for one kernel only, and a call here is two of them.
    """
    name = "RaceDetectionState" if JAX_VERSION < (0, 12) else "GPURaceDetectionState"
    make, found, printed = getattr(simulator, name), [], io.StringIO()

    def record(*args: Any, **options: Any) -> Any:
        found.append(make(*args, **options))
        return found[-1]

    setattr(simulator, name, record)
    try:
        with contextlib.redirect_stdout(printed), threads_compiled_once():
            yield
            jax.effects_barrier()
    except RuntimeError as error:  # from jax 0.12 on, a race raises
        if re.search(RACES, str(error)):
            raise AssertionError(str(error)) from error
        raise
    finally:
        setattr(simulator, name, make)
        simulator.reset_gpu_interpret_mode_state()
    assert found, "no kernel was simulated"
    assert not any(state.races_found for state in found), printed.getvalue()


@contextlib.contextmanager
def threads_compiled_once() -> Iterator[None]:
    """jax 0.10 compiles a simulated warpgroup's program anew for each of them, at every call."""
    run = thread_map._run_jaxpr
    if JAX_VERSION < (0, 12):
        thread_map._run_jaxpr = _run_compiled
    try:
        yield
    finally:
        thread_map._run_jaxpr = run


_compiling = threading.Lock()


def _run_compiled(jaxpr: Any, consts: Any, *args: jax.Array) -> None:
    with _compiling:
        program = _program(jaxpr)
        if not program:
            evaluate = jax.jit(
                functools.partial(core.eval_jaxpr, jaxpr), compiler_options=UNOPTIMIZED
            )
            program.append(evaluate.lower(consts, *args).compile())
    program[0](consts, *args)


@functools.lru_cache(maxsize=16)
def _program(jaxpr: Any) -> list[Any]:
    """Where the compiled program of `jaxpr` is kept."""
    return []
