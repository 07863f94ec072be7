"""Write the golden checkpoints of `tests/goldens`: tiny random models and what they compute.

Each has `config.json` and safetensors as Transformers saves them, and `golden.npz` with one prompt
(`token_ids` i32[N]) and the float32 logits Transformers computes for it (`logits` f32[N, vocab]).
Norms and biases are random too, so that a wrong one shows. Needs torch and transformers, which are
no dependencies of pagedjax; run it only to add or change a golden.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 96
PROMPT = 45  # tokens: longer than every window below
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


@dataclasses.dataclass(frozen=True)
class Golden:
    """A model to make; `options` overrides `SHARED`, `shard_size` in bytes splits the file."""

    model_type: str
    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    shard_size: int | None = None


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


GOLDENS = {
    "gemma3": Golden(
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "llama_llama3_rope": Golden(
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama_linear_rope": Golden("llama", rope("linear", factor=2.5)),
    "llama_yarn_rope": Golden(
        "llama",
        {
            "max_position_embeddings": 4096,
            **rope("yarn", factor=4.0, original_max_position_embeddings=1024),
        },
    ),
    "llama_sharded": Golden("llama", {"num_key_value_heads": 4, "head_dim": 8}, shard_size=60_000),
    "llama_tied": Golden("llama", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "mistral": Golden("mistral", {"sliding_window": 12}, dtype=torch.float16),
    "qwen2": Golden("qwen2", {"num_attention_heads": 2, "use_sliding_window": False}),
    "qwen2_windowed": Golden(
        "qwen2",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Golden("qwen3", {"tie_word_embeddings": True}, dtype=torch.bfloat16),
}


def build(golden: Golden) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(golden.model_type, **{**SHARED, **golden.options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 2:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:  # Norms stay near what they are made with, 1 (Gemma: 0); biases are near 0.
                parameter.add_(noise * (0.3 if "norm" in name else 0.7))
    return model.to(golden.dtype)


def write(name: str, golden: Golden, root: pathlib.Path) -> None:
    torch.manual_seed(sum(name.encode()))
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    build(golden).save_pretrained(directory, max_shard_size=golden.shard_size or "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)
    # Read back, not converted: `model.float()` would keep rope frequencies rounded to 16 bits.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    token_ids = torch.randint(VOCAB, (PROMPT,))
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0]
    arrays = {"token_ids": token_ids.numpy().astype(np.int32), "logits": logits.numpy()}
    np.savez_compressed(directory / "golden.npz", allow_pickle=False, **arrays)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: {size / 1000:.0f} kB, logits up to {logits.abs().max():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write tiny random checkpoints with the logits that Transformers computes."
    )
    parser.add_argument("names", nargs="*", help=f"which; all by default: {', '.join(GOLDENS)}")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parents[1] / "tests" / "goldens",
        help="folder to write to; default: %(default)s",
    )
    arguments = parser.parse_args()
    for name in arguments.names or GOLDENS:
        if name not in GOLDENS:
            parser.error(f"no golden {name!r}; there are {', '.join(GOLDENS)}")
        write(name, GOLDENS[name], arguments.out)


if __name__ == "__main__":
    main()
