# pyright: reportMissingImports=false
"""Reinforcement learning with Tunix: our decoder for its trainer, our engine for its rollouts.

    actor = TunixDecoder(config, params)
    cluster = RLCluster(
        actor=actor,
        reference=TunixDecoder(config, params),
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            rollout_engine=functools.partial(
                PagedJaxRollout, engine_config=EngineConfig(memory_utilization=0.4)
            ),
            ...
        ),
    )

Trainer and engine compute with the same layers, so a token has the same log-probability in both, up
to rounding. Written for google-tunix 0.1.7.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.functional import request_seeds, score
from pagedjax.integrations.tunix_decoder import TunixDecoder, check_names_and_shapes
from pagedjax.llm import LLM
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.models.param_values import as_stored
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.request import FinishReason
from pagedjax.sampling_params import SamplingParams

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        f'pagedjax.integrations.tunix needs Tunix: pip install "pagedjax[tunix]" with Python 3.12 '
        f"or later ({error})"
    ) from error

__all__ = ["PagedJaxRollout", "TunixDecoder"]

_request_seeds = jax.jit(request_seeds)


class PagedJaxRollout(BaseRollout):
    """Tunix's rollout worker over an engine, for `ClusterConfig.rollout_engine`.

    The engine computes on one device. Where the trainer has its parameters there too, in the dtype
    that the engine stores, both read the same buffers; else they are cast and copied over. Tunix's
    `offload_to_cpu` does no harm but saves nothing: the engine keeps its weights.

    A lock makes threads take turns; requests of one call share the engine's steps.

    Args:
      rollout_actor: a `TunixDecoder`; or any nnx model, with `to_params` and `config`.
      tokenizer: what Tunix's `TokenizerAdapter` takes, or one of these.
      mesh: of one device, the engine's; None is no different.
      rollout_config: `data_type`, if it has one, is what the engine computes in; `temperature` is
        that of `get_per_token_logps`. None: the actor's dtype, and 1.
      engine_config: settings of the engine. The pool takes `memory_utilization` of an accelerator's
        memory, whatever the trainer needs.
      to_params: makes our parameters (`models.decoder.abstract_params`; floats of any dtype) of the
        nnx state that Tunix sends: at first the actor's whole state, later what it trains, which
        are the LoRA parameters alone if there are any.
      config: the decoder that those parameters are for.
      keep_eos: leave the token that ended a completion in `RolloutOutput.tokens`, as Tunix's vLLM
        worker does; its vanilla one does not. Without it the trainer never sees the model stop.

    Attributes:
      llm: generates; its `engine` has the weights and counts them (`weights_version`).

    Raises:
      ConfigError: the actor is of another kind and `to_params` or `config` is missing; the mesh has
        other devices than the engine's; `rollout_config` asks for what there is not, by name; or
        the parameters or settings do not fit (see `LLMEngine`).
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        engine_config: EngineConfig | None = None,
        to_params: Callable[[Any], Params] | None = None,
        config: DecoderConfig | None = None,
        keep_eos: bool = True,
    ):
        self._temperature = 1.0 if rollout_config is None else rollout_config.temperature
        rollout_config = rollout_config or RolloutConfig()
        _check_supported(rollout_config)
        self._config = _decoder_config(rollout_actor, to_params, config, rollout_config)
        self._to_params = to_params
        self._tokenizer = (
            tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        )
        self._keep_eos = keep_eos
        self._lock = threading.Lock()
        device = jax.devices()[0]
        _check_mesh(mesh, device)
        params = self._stored(self._tree(nnx.state(rollout_actor), {}), device.platform)
        self.llm = LLM(LLMEngine(self._config, params, config=engine_config))

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Complete every prompt once.

        Of `rollout_config`, what is named for other engines or for the vanilla worker is not read.
        `top_p` None is 1 and `top_k` None, 0 or -1 all, as for vLLM. Of a `seed` every prompt gets
        its own, by its place; with None, each call samples anew.

        Returns:
          text: without the token that ended it. logits: none. tokens: i32, see `keep_eos`.
          left_padded_prompt_tokens: i32[B, max_prompt_length]. logprobs: f32 for each of `tokens`,
          in the distribution that it was sampled from: behind temperature, top-k and top-p (vLLM's
          "processed_logprobs", which Tunix asks for). With the last two off, that is what the
          trainer's loss computes; the vanilla worker leaves them out always.

        Raises:
          InvalidRequestError: there are keyword arguments, such as images; a prompt is longer than
            `max_prompt_length` (Tunix's workers would widen the batch instead), or with
            `max_tokens_to_generate` longer than the engine's `max_model_len`; or a value is out of
            range (see `SamplingParams`).
          ConfigError: `rollout_config` asks for what there is not, by name.
        """
        if kwargs:
            raise InvalidRequestError(f"{sorted(kwargs)} are not supported by PagedJaxRollout")
        _check_supported(rollout_config)
        token_ids = [self._tokenize(prompt) for prompt in prompts]
        self._check_lengths(token_ids, rollout_config)
        params = self._sampling_params(rollout_config, len(token_ids))
        with self._lock:
            outputs = self.llm.generate(token_ids, params)
        samples = [self._sample(index, output) for index, output in enumerate(outputs)]
        num_kept = [len(s.token_ids) - (self._ends(s) and not self._keep_eos) for s in samples]
        return RolloutOutput(
            text=[self._text(sample) for sample in samples],
            logits=[],
            tokens=[
                np.array(sample.token_ids[:n], np.int32)
                for sample, n in zip(samples, num_kept, strict=True)
            ],
            left_padded_prompt_tokens=self._left_padded(
                token_ids, rollout_config.max_prompt_length
            ),
            logprobs=[
                np.array([token.processed for token in (sample.logprobs or ())[:n]], np.float32)
                for sample, n in zip(samples, num_kept, strict=True)
            ]
            if rollout_config.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probabilities of i32[B, Lc] completions behind i32[B, Lp] prompts, without gradient.

        Computed anew with the engine's weights, at the temperature of the `rollout_config` given at
        the start (0 counts as 1), as in the trainer's loss. Tunix's vanilla worker takes 1 always.

        Returns:
          f32[B, Lc], on the engine's device; zero where a token is `pad_id`.
        """
        with self._lock:
            engine = self.llm.engine
            tokens = jax.device_put((prompt_tokens, completion_tokens), engine.device)
            return _score(
                self._config, engine.runner.params, *tokens, self.pad_id(), self._temperature or 1.0
            )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Go on with other weights, in any float dtype.

        Args:
          params: an nnx state of the actor or such a dict of arrays, whole or, of a `TunixDecoder`,
            in parts: then the others stay.
          filter_types: which kinds of variables `params` has; not read, it tells by names.

        Raises:
          ConfigError: names a parameter that is unknown or has another shape; or one that
            `to_params` left out. Then the weights stay as they were.
        """
        with self._lock:
            engine = self.llm.engine
            tree = self._tree(params, engine.runner.params)
            engine.update_params(self._stored(tree, engine.device.platform))

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> TunixDecoder | None:
        """The engine's weights as a new `TunixDecoder`; None for an actor of another kind.

        No arrays are the trainer's own objects, though they may be the same memory: Tunix sends no
        weights to a worker that has these.
        """
        if self._to_params is not None:
            return None
        return TunixDecoder(self._config, jax.tree.map(_apart, self.llm.engine.runner.params))

    def _tree(self, state: Any, old: Params) -> Params:
        """Our whole parameter tree, of `old` and the trainer's state."""
        if self._to_params is not None:
            return self._to_params(state)
        new = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state
        new = new.get("decoder", new)
        return _merge(old, new) if old else new

    def _stored(self, params: Params, platform: str) -> Params:
        check_names_and_shapes(self._config, params)
        return as_stored(self._config, params, platform)

    def _tokenize(self, prompt: str) -> list[int]:
        """With a bos in front, if there is one, and only one; 0 counts as none, as in Tunix."""
        if not isinstance(prompt, str):
            raise InvalidRequestError(f"a prompt is a {type(prompt).__name__}; it must be text")
        bos = self._tokenizer.bos_id()
        token_ids = list(self._tokenizer.encode(str(prompt)))  # numpy's strings are refused
        if bos is None or bos <= 0:
            return token_ids
        return self._tokenizer.dedup_bos_ids([bos, *token_ids])

    def _check_lengths(self, token_ids: Sequence[list[int]], config: RolloutConfig) -> None:
        num_new, limit = config.max_tokens_to_generate, self.llm.engine.limits.max_model_len
        for index, own in enumerate(token_ids):
            if len(own) > config.max_prompt_length:
                raise InvalidRequestError(
                    f"prompt {index} has {len(own)} tokens; max_prompt_length is "
                    f"{config.max_prompt_length}"
                )
            if len(own) + num_new > limit:
                raise InvalidRequestError(
                    f"prompt {index} has {len(own)} tokens, with max_tokens_to_generate {num_new} "
                    f"that is {len(own) + num_new}; max_model_len of the engine is {limit}"
                )

    def _sampling_params(self, config: RolloutConfig, count: int) -> list[SamplingParams]:
        same = SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k in (None, -1) else config.top_k,
            stop_token_ids=config.eos_tokens or [self.eos_id()],
            logprobs=0 if config.return_logprobs else None,
        )
        return [dataclasses.replace(same, seed=seed) for seed in _seeds(config.seed, count)]

    def _sample(self, index: int, output: RequestOutput) -> CompletionOutput:
        if output.error is not None:
            raise InvalidRequestError(f"prompt {index}: {output.error}") from output.error
        return output.outputs[0]

    def _ends(self, sample: CompletionOutput) -> bool:
        """Whether its last token is one that ended it."""
        return sample.finish_reason is FinishReason.STOP

    def _text(self, sample: CompletionOutput) -> str:
        num_words = len(sample.token_ids) - self._ends(sample)
        return self._tokenizer.decode(list(sample.token_ids[:num_words]))

    def _left_padded(self, token_ids: Sequence[list[int]], width: int) -> np.ndarray:
        padded = np.full((len(token_ids), width), self.pad_id(), np.int32)
        for row, own in zip(padded, token_ids, strict=True):
            row[width - len(own) :] = own
        return padded


@functools.partial(jax.jit, static_argnums=0)
def _score(
    config: DecoderConfig,
    params: Params,
    prompt_ids: jax.Array,
    completion_ids: jax.Array,
    pad_id: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    token_ids = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    found = score(config, params, token_ids, token_ids != pad_id, temperature=temperature)
    return found[:, prompt_ids.shape[1] :]


def _seeds(seed: jax.Array | int | None, count: int) -> list[int | None]:
    """Of a key, or of the number of one: a seed for each of `count` prompts."""
    if seed is None:
        return [None] * count
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    words = np.asarray(_request_seeds(key, jnp.arange(count, dtype=jnp.int32)), np.uint64)
    return [int(low | high << np.uint64(32)) & (2**63 - 1) for low, high in words]


def _merge(old: Params, new: Mapping[str, Any], name: str = "") -> Params:
    """`old` with the leaves that `new` has in their place."""
    for key in new:
        if key not in old:
            raise ConfigError(f"parameter {name}[{key!r}] is unknown; there are {sorted(old)}")
    merged = dict(old)
    for key, value in new.items():
        inner = isinstance(value, Mapping) and isinstance(old[key], Mapping)
        merged[key] = _merge(old[key], value, f"{name}[{key!r}]") if inner else value
    return merged


def _apart(x: jax.Array) -> jax.Array:
    """Another array over the same memory."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def _decoder_config(
    actor: nnx.Module,
    to_params: Callable[[Any], Params] | None,
    config: DecoderConfig | None,
    rollout_config: RolloutConfig,
) -> DecoderConfig:
    """What the engine computes."""
    if config is None and isinstance(actor, TunixDecoder):
        config = actor.config
    if config is None or (to_params is None and not isinstance(actor, TunixDecoder)):
        raise ConfigError(
            f"rollout_actor is a {type(actor).__name__}; it must be a TunixDecoder, or come with "
            "to_params and config"
        )
    if rollout_config.data_type is None:
        return config
    dtype: Any = jnp.dtype(rollout_config.data_type).name
    return dataclasses.replace(config, dtype=dtype)


def _check_mesh(mesh: jax.sharding.Mesh | None, device: Any) -> None:
    if mesh is not None and not mesh.empty and set(mesh.devices.flat) != {device}:
        raise ConfigError(
            f"mesh has the devices {mesh.devices.tolist()}; it must have the engine's one alone, "
            f"{device}"
        )


def _check_supported(config: RolloutConfig) -> None:
    for name in ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size"):
        if getattr(config, name) > 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be -1 or 1: one device")
    if config.rollout_mapping_config is not None:
        raise ConfigError("rollout_mapping_config is not None; give PagedJaxRollout a to_params")
