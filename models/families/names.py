"""How the tensors of a checkpoint map to the decoder's parts."""

import dataclasses
from collections.abc import Mapping

# A part is what one checkpoint tensor holds. Most are a parameter of their own; these are fused.
FUSED_PARTS = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
}


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Names and conventions of a family's checkpoint.

    Attributes:
      templates: part -> name; `{layer}` stands for the layer's number.
      norm_offset: added to every norm weight (Gemma stores `weight - 1` in Hugging Face files).
      interleaved: q and k rows lie pair by pair (a, b, a, b ...) instead of half by half.
      prefixes: beginnings of tensor names and what to read instead.
      ignored: regular expressions of tensor names that the decoder does not need.
    """

    templates: Mapping[str, str]
    norm_offset: float = 0.0
    interleaved: bool = False
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def of(self, part: str, layer: int) -> str:
        return self.templates[part].format(layer=layer)

    def canonical(self, name: str) -> str:
        for prefix, replacement in self.prefixes:
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name


def _in_layers(prefix: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {part: prefix + ".{layer}." + name for part, name in parts.items()}


HF_NAMES = TensorNames(
    templates={
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
        **_in_layers(
            "model.layers",
            {
                "attn_norm": "input_layernorm.weight",
                "q": "self_attn.q_proj.weight",
                "k": "self_attn.k_proj.weight",
                "v": "self_attn.v_proj.weight",
                "q_bias": "self_attn.q_proj.bias",
                "k_bias": "self_attn.k_proj.bias",
                "v_bias": "self_attn.v_proj.bias",
                "q_norm": "self_attn.q_norm.weight",
                "k_norm": "self_attn.k_norm.weight",
                "out": "self_attn.o_proj.weight",
                "mlp_norm": "post_attention_layernorm.weight",
                "gate": "mlp.gate_proj.weight",
                "up": "mlp.up_proj.weight",
                "down": "mlp.down_proj.weight",
            },
        ),
    },
    ignored=(r".*rotary_emb\.inv_freq",),
)

# Gemma has norms behind attention and MLP as well; the one name that both use means another norm.
HF_GEMMA_NAMES = dataclasses.replace(
    HF_NAMES,
    templates={
        **HF_NAMES.templates,
        **_in_layers(
            "model.layers",
            {
                "post_attn_norm": "post_attention_layernorm.weight",
                "mlp_norm": "pre_feedforward_layernorm.weight",
                "post_mlp_norm": "post_feedforward_layernorm.weight",
            },
        ),
    },
    norm_offset=1.0,
)

GGUF_NAMES = TensorNames(
    templates={
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
        **_in_layers(
            "blk",
            {
                "attn_norm": "attn_norm.weight",
                "q": "attn_q.weight",
                "k": "attn_k.weight",
                "v": "attn_v.weight",
                "q_bias": "attn_q.bias",
                "k_bias": "attn_k.bias",
                "v_bias": "attn_v.bias",
                "q_norm": "attn_q_norm.weight",
                "k_norm": "attn_k_norm.weight",
                "out": "attn_output.weight",
                "post_attn_norm": "post_attention_norm.weight",
                "mlp_norm": "ffn_norm.weight",
                "gate": "ffn_gate.weight",
                "up": "ffn_up.weight",
                "down": "ffn_down.weight",
                "post_mlp_norm": "post_ffw_norm.weight",
            },
        ),
    },
)
