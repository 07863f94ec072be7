"""Our decoder as a module that Tunix trains."""

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.errors import ConfigError
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params, bind, check_same_shapes
from pagedjax.models.param_values import as_values


class TunixDecoder(nnx.Module):
    """Our decoder as a module that Tunix trains: whole sequences in, logits out.

    Its state is the parameter tree below the name "decoder", the arrays themselves, not copied.

    Args:
      params: as for `LLMEngine`; also floats of another dtype, such as a float32 copy of a bfloat16
        model. Bits become values (see `models.param_values.as_values`).

    Raises:
      ConfigError: names a parameter that is missing or has another shape.
    """

    def __init__(self, config: DecoderConfig, params: Params):
        check_names_and_shapes(config, params)
        self.config = config
        self.decoder = bind(config, as_values(config, params))

    @property
    def params(self) -> Params:
        """The parameter tree, for `LLMEngine.update_params` or `functional`."""
        return nnx.to_pure_dict(nnx.state(self.decoder))

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """i32[B, L] tokens -> (f32[B, L, V] logits behind each, None); differentiable.

        Args:
          positions: not read: they follow from which tokens are padding.
          attention_mask: bool[B, L, L], causal over one sequence a row. Its diagonal says which
            tokens are not padding; windows are the model's own. None: all are tokens.
          segment_ids: i32[B, L], 0 for padding, beside an `attention_mask`, which says the same.

        Raises:
          ConfigError: there is a cache; `attention_mask` has another shape; or `segment_ids` come
            without it, as Tunix passes packed sequences (`max_seq_token_per_tpu`).
        """
        if cache is not None:
            raise ConfigError("cache is not None; a TunixDecoder has none, PagedJaxRollout has")
        if attention_mask is None and segment_ids is not None:
            raise ConfigError(
                "segment_ids without an attention_mask mean packed sequences; a TunixDecoder takes "
                "one sequence a row: leave max_seq_token_per_tpu at None"
            )
        num_seqs, length = input_tokens.shape
        if attention_mask is None:
            mask = jnp.ones((num_seqs, length), bool)
        elif attention_mask.shape == (num_seqs, length, length):
            mask = jnp.diagonal(attention_mask, axis1=1, axis2=2).astype(bool)
        else:
            raise ConfigError(
                f"attention_mask has shape {attention_mask.shape}; it must be "
                f"{(num_seqs, length, length)}"
            )
        hidden = self.decoder.without_cache(input_tokens, mask)
        logits = self.decoder.logits(hidden.reshape(num_seqs * length, -1))
        return logits.reshape(num_seqs, length, -1), None


def check_names_and_shapes(config: DecoderConfig, params: Params) -> None:
    """Make sure that `params` can become what an engine stores, whatever floats they are.

    Raises:
      ConfigError: names a parameter that is missing or has another shape.
    """

    def shapes(tree: Params) -> Params:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), tree)

    check_same_shapes(shapes(abstract_params(config, "cpu")), shapes(params))
