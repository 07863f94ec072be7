"""The engine's step as pure functions over pytrees, for programs that have a `jit` of their own.

Everything here can be traced: under `jax.jit`, `lax.scan` and `jax.shard_map`, with the parameters
of a training step. Nothing calls back to the host, nothing raises for what only the device knows: a
pool that is too small is told as data. The decoder, the pool, the kernels, the sampler and the step
are those of `LLMEngine`.

    cache = functional.init_cache(config, num_seqs=64, max_len=1024)

    @functools.partial(jax.jit, donate_argnames="cache")
    def rollout(params, cache, prompts, lengths, key):
        seeds = functional.request_seeds(key, jnp.arange(len(prompts)), n=8)
        return functional.generate(
            config, params, cache, prompts, lengths, seeds, n=8, max_tokens=512
        )

`config` (`DecoderConfig`) is static; pass it by closure or as a static argument.
"""

from pagedjax.finish_code import FinishCode
from pagedjax.functional.cache import Cache, fork, init_cache, release
from pagedjax.functional.forward import decode_step, prefill
from pagedjax.functional.generate import Generation, generate
from pagedjax.functional.sampling import Sampling, engine_seeds, request_seeds, sample
from pagedjax.functional.score import score

__all__ = [
    "Cache",
    "FinishCode",
    "Generation",
    "Sampling",
    "decode_step",
    "engine_seeds",
    "fork",
    "generate",
    "init_cache",
    "prefill",
    "release",
    "request_seeds",
    "sample",
    "score",
]
