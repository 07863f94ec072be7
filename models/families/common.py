"""What the families share: the plain decoder, and lists of harmless configuration fields."""

from collections.abc import Iterable

from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.errors import ConfigError
from pagedjax.models.families.fields import Fields
from pagedjax.models.rope import RopeConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

HARMLESS = (
    # Where the file comes from.
    r"_.*|architectures|model_type|model_name|transformers_version|unsloth_.*|tokenizer_class",
    # Tokens, and defaults for sampling: the tokenizer's and the caller's business.
    r".*_token_ids?|.*_token_index|max_length|min_length|max_new_tokens|model_max_length|do_sample",
    r"early_stopping|num_beams|num_beam_groups|num_return_sequences|temperature|top_k|top_p",
    r"typical_p|.*_penalty|.*no_repeat_ngram_size|bad_words_ids|(begin_)?suppress_tokens|prefix",
    r"remove_invalid_values|task_specific_params|problem_type|finetuning_task|id2label|label2id",
    # Training, and how transformers runs a model.
    r"(.*_)?dropout|initializer_range|neftune_noise_alpha|gradient_checkpointing|pretraining_tp",
    r"use_cache|cache_implementation|return_dict.*|output_.*|torchscript|use_bfloat16",
    r"tf_legacy_loss|is_decoder|dtype|torch_dtype",
)


def plain(
    fields: Fields, rope: RopeConfig, max_position: int, *, act: str = "hidden_act"
) -> DecoderConfig:
    """A decoder without family switches: full attention, one rope, pre-norms.

    YaRN stretches a context that the configuration states unstretched.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", hidden // max(heads, 1))
    fields.only("partial_rotary_factor", 1.0)
    fields.only("is_causal", True)
    if rope.scaling == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position=max_position,
        windows=(NO_WINDOW,) * layers,
        ropes=(rope,),
        rope_of_layer=(0,) * layers,
        attn_scale=head_dim**-0.5,
        norm_eps=fields.number("rms_norm_eps"),
        activation=fields.choice(act, _ACTIVATIONS),
        tie_embeddings=fields.switch("tie_word_embeddings"),
    )


def layer_windows(
    fields: Fields, layer_types: Iterable[str], window: int | None
) -> tuple[int, ...]:
    """The window of each layer; `window` None: the model has none."""
    windows = {"full_attention": NO_WINDOW, "sliding_attention": window}
    chosen = []
    for kind in layer_types:
        if kind not in windows:
            raise ConfigError(
                f"{fields.where}: 'layer_types' has {kind!r}; supported are {', '.join(windows)}"
            )
        if windows[kind] is None:
            raise ConfigError(f"{fields.where}: 'layer_types' has {kind!r} but there is no window")
        chosen.append(windows[kind])
    return tuple(chosen)
