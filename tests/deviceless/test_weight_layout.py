"""On v7x a step re-tiles every weight, unless weights lie in the format that it reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from pagedjax import deviceless
from pagedjax.batch import stop_input
from pagedjax.decode_ahead import decode_ahead
from pagedjax.deviceless import abstract_step, place_like_engine
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.layout import param_formats, place_params
from pagedjax.models.rope import RopeConfig
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.step import step
from tests.deviceless.targets import Compiled, compile_for, need

# So large that the weights of all layers do not fit in VMEM.
MODEL = DecoderConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=2048,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    max_position=2048,
    windows=(NO_WINDOW,) * 4,
    ropes=(RopeConfig(1e4),),
    rope_of_layer=(0,) * 4,
    attn_scale=128**-0.5,
    norm_eps=1e-6,
    tie_embeddings=True,
)
LIMITS = SchedulerConfig(8, 16, 2048, 16, MODEL.kv_layout.windows)
INPUTS = abstract_step(MODEL, LIMITS, num_tokens=8, num_blocks=512, platform="tpu", attention="xla")
WEIGHTS = {name: INPUTS[0]["layers"][name] for name in ("qkv", "out", "gate_up", "down")}
STACKED_BYTES = sum(w.size * w.dtype.itemsize for w in WEIGHTS.values())


def compiled(target: str, what: str, in_formats: bool) -> Compiled:
    if what == "step":
        fn, args = functools.partial(step, MODEL, ()), INPUTS
    else:
        fn = functools.partial(decode_ahead, MODEL, (), (1, 2), 4)
        args = (*INPUTS, stop_input([], 8))
    place = place_like_engine if in_formats else None
    return compile_for(target, fn, *args, donate=(1,), place=place)


def retiled(program: Compiled) -> set[str]:
    return {name for name, w in WEIGHTS.items() if program.program.relaid(w.shape)}


@pytest.mark.parametrize("what", ["step", "several decode steps"])
def test_v7x_reads_weights_where_they_are(what):
    program = compiled("v7x", what, in_formats=True)
    assert not retiled(program)
    assert not program.program.relaid(INPUTS[0]["embed"].shape)
    assert program.temp_bytes < STACKED_BYTES / 3


def test_v7x_would_retile_weights_in_the_default_format():
    """Negative control. When it fails, the compiler has learned better: remove `models/layout`."""
    program = compiled("v7x", "several decode steps", in_formats=False)
    assert retiled(program) == set(WEIGHTS)
    assert program.temp_bytes > STACKED_BYTES


@pytest.mark.parametrize("target", ["v6e"])
def test_other_tpus_read_weights_in_the_default_format(target):
    assert not retiled(compiled(target, "step", in_formats=False))


@pytest.mark.parametrize(("target", "wide"), [("cpu", False), ("v6e", False), ("v7x", True)])
def test_only_16_bit_matrices_on_v7x_have_a_format(target, wide):
    need(target)
    here = SingleDeviceSharding(deviceless.device(target))
    params = {
        "stack": jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16),
        "table": jax.ShapeDtypeStruct((32, 128), jnp.bfloat16),
        "flat": jax.ShapeDtypeStruct((8, 128), jnp.bfloat16),  # fewer rows than a tile
        "norm": jax.ShapeDtypeStruct((4, 128), jnp.float32),
        "float32": jax.ShapeDtypeStruct((4, 32, 128), jnp.float32),
    }
    formats = param_formats(params, here)
    assert formats.keys() == params.keys()
    special = {name for name, where in formats.items() if isinstance(where, Format)}
    assert special == ({"stack", "table"} if wide else set())
    assert all(where == here for name, where in formats.items() if name not in special)


def test_v7x_can_bring_weights_into_the_format():
    """The program that `jax.device_put` runs, for all it can be compiled without a chip."""
    need("v7x")
    here = SingleDeviceSharding(deviceless.device("v7x"))
    weight = WEIGHTS["gate_up"]
    target = param_formats({"w": weight}, here)["w"]
    given = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=here)
    put = jax.jit(lambda x: x, out_shardings=target, donate_argnums=0).lower(given).compile()
    assert put.output_formats == target
    assert put.input_formats[0][0] != target


def test_elsewhere_placed_parameters_are_the_same_arrays():
    here = SingleDeviceSharding(jax.devices()[0])
    params = {"a": jax.device_put(np.ones((32, 128), np.float32), here)}
    placed = place_params(params, here, donate=True)
    assert placed["a"].unsafe_buffer_pointer() == params["a"].unsafe_buffer_pointer()
    assert not params["a"].is_deleted()
