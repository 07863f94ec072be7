"""Configurations of real models, in the styles they come in, and refusals by name."""

import dataclasses
import json
import re
import types
from typing import Any

import numpy as np
import pytest

from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.errors import ConfigError
from pagedjax.models.families import from_gguf, from_hf
from pagedjax.models.rope import RopeConfig
from tests.models.real_configs import (
    GEMMA3_1B,
    GEMMA3_4B,
    LLAMA_2_7B,
    LLAMA_32_1B,
    MISTRAL_7B,
    QWEN3_06B,
    QWEN25_7B,
)


def config_of(config: dict[str, Any], **changes: Any) -> DecoderConfig:
    return from_hf({**config, **changes})[0]


def test_llama_2() -> None:
    config = config_of(LLAMA_2_7B)
    assert (config.head_dim, config.num_kv_heads, config.max_position) == (128, 32, 4096)
    assert config.ropes == (RopeConfig(10_000.0),)
    assert config.windows == (NO_WINDOW,) * 32
    assert config.attn_scale == 128**-0.5
    assert (config.activation, config.dtype, config.tie_embeddings) == ("silu", "bfloat16", False)


def test_llama_3_with_stretched_rope() -> None:
    config = config_of(LLAMA_32_1B)
    assert config.ropes == (
        RopeConfig(5e5, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    )
    assert config.tie_embeddings
    assert config.max_position == 131072


def test_a_llama_without_grouped_heads_has_a_kv_head_per_head() -> None:
    assert config_of(LLAMA_2_7B, num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(("window", "expected"), [(4096, 4096), (None, NO_WINDOW)])
def test_mistral_window(window: int | None, expected: int) -> None:
    assert config_of(MISTRAL_7B, sliding_window=window).windows == (expected,) * 32


def test_qwen2_has_biases_and_qwen3_has_norms() -> None:
    qwen2, qwen3 = config_of(QWEN25_7B), config_of(QWEN3_06B)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 128)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_qwen_windows_start_at_a_layer() -> None:
    config = config_of(QWEN25_7B, use_sliding_window=True, sliding_window=64, max_window_layers=20)
    assert config.windows == (NO_WINDOW,) * 20 + (64,) * 8
    listed = ["sliding_attention"] + ["full_attention"] * 27
    config = config_of(QWEN25_7B, use_sliding_window=True, sliding_window=64, layer_types=listed)
    assert config.windows == (64,) + (NO_WINDOW,) * 27


def test_yarn_stretches_the_context() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = config_of(QWEN25_7B, rope_scaling=scaling)
    rope = config.ropes[0]
    assert (rope.scaling, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 4.0, 32.0, 1.0)
    assert rope.attention_factor == pytest.approx(1.138629436)
    assert config.max_position == 131072


def test_yarn_attention_factor_may_be_given_or_be_a_ratio() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    given = config_of(LLAMA_2_7B, rope_scaling={**scaling, "attention_factor": 1.5})
    ratio = config_of(LLAMA_2_7B, rope_scaling={**scaling, "mscale": 2.0, "mscale_all_dim": 1.0})
    assert given.ropes[0].attention_factor == 1.5
    assert ratio.ropes[0].attention_factor == pytest.approx(1.277258872 / 1.138629436)


def test_gemma_3_alternates_windows_and_ropes() -> None:
    config = config_of(GEMMA3_1B)
    assert [w == NO_WINDOW for w in config.windows] == [i % 6 == 5 for i in range(26)]
    assert set(config.windows) == {512, NO_WINDOW}
    assert config.ropes == (RopeConfig(1e6), RopeConfig(1e4))
    assert config.rope_of_layer[:6] == (1, 1, 1, 1, 1, 0)
    assert config.attn_scale == 1 / 16
    assert config.embed_scale == 1152**0.5
    assert config.tie_embeddings  # the family's default
    assert config.qk_norm
    assert config.post_norms
    assert config.activation == "gelu_tanh"


def test_the_text_part_of_a_gemma_that_sees() -> None:
    config, names = from_hf(GEMMA3_4B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262_208
    assert config.ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))
    assert config.dtype == "bfloat16"
    for stored in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert names.canonical(stored) == "model.norm.weight"


NEW_STYLE = {
    "llama 2": (LLAMA_2_7B, {"rope_type": "default", "rope_theta": 10000.0}),
    "llama 3": (LLAMA_32_1B, {**LLAMA_32_1B["rope_scaling"], "rope_theta": 500000.0}),
    "qwen": (QWEN25_7B, {"rope_type": "default", "rope_theta": 1000000.0}),
    "gemma 3": (
        GEMMA3_1B,
        {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
    ),
}


@pytest.mark.parametrize("name", NEW_STYLE)
def test_old_and_new_style_describe_the_same_decoder(name: str) -> None:
    old, parameters = NEW_STYLE[name]
    gone = ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype")
    new = {key: value for key, value in old.items() if key not in gone}
    assert config_of(new, rope_parameters=parameters, dtype="bfloat16") == config_of(old)


def test_dtype_is_the_argument_else_the_configurations_else_float32() -> None:
    silent = {key: value for key, value in LLAMA_2_7B.items() if key != "torch_dtype"}
    assert from_hf(LLAMA_2_7B, "float16")[0].dtype == "float16"
    assert from_hf(LLAMA_2_7B)[0].dtype == "bfloat16"
    assert from_hf(silent)[0].dtype == "float32"


ROPE = {"rope_type": "linear", "factor": 2.0}
REFUSED = [
    (LLAMA_2_7B, {"model_type": "mamba"}, "'mamba' is not supported; supported are gemma3_text"),
    (LLAMA_2_7B, {"model_type": None}, "model_type None"),
    (LLAMA_2_7B, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceCl"),
    (LLAMA_2_7B, {"attention_bias": True}, "'attention_bias' is True"),
    (LLAMA_2_7B, {"mlp_bias": True}, "'mlp_bias' is True"),
    (LLAMA_2_7B, {"hidden_act": "relu"}, "'hidden_act' is 'relu'; supported are silu"),
    (LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    (LLAMA_2_7B, {"is_causal": False}, "'is_causal' is False"),
    (LLAMA_2_7B, {"residual_multiplier": 0.2}, "'residual_multiplier' is 0.2"),
    (LLAMA_2_7B, {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
    (LLAMA_2_7B, {"torch_dtype": "float64"}, "dtype 'float64'; supported are float32"),
    (LLAMA_2_7B, {"hidden_size": None}, "'hidden_size' is missing"),
    (LLAMA_2_7B, {"hidden_size": "big"}, "'hidden_size' is 'big'"),
    (LLAMA_2_7B, {"num_hidden_layers": 2.5}, "'num_hidden_layers' is 2.5"),
    (LLAMA_2_7B, {"num_attention_heads": 0}, "'num_attention_heads' is 0"),
    (LLAMA_2_7B, {"num_key_value_heads": 5}, "32 is not a multiple of num_kv_heads 5"),
    (LLAMA_2_7B, {"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
    (LLAMA_2_7B, {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
    (LLAMA_2_7B, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
    (LLAMA_2_7B, {"rope_scaling": {"type": "longrope"}}, "type 'longrope'; supported are default"),
    (LLAMA_2_7B, {"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
    (LLAMA_2_7B, {"rope_scaling": "linear"}, "'rope_scaling' is 'linear'"),
    (LLAMA_2_7B, {"rope_scaling": {**ROPE, "mrope_section": [16, 24]}}, "'mrope_section'"),
    (LLAMA_2_7B, {"rope_scaling": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    (MISTRAL_7B, {"sliding_window": -1}, "'sliding_window' is -1"),
    (QWEN25_7B, {"layer_types": ["full_attention"]}, "windows has 1 entries for 28 layers"),
    (QWEN25_7B, {"layer_types": ["chunked_attention"] * 28}, "'chunked_attention'"),
    (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "there is no window"),
    (GEMMA3_1B, {"use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
    (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
    (GEMMA3_1B, {"rope_parameters": {"rope_type": "default"}}, "'rope_type' is 'default'"),
    (GEMMA3_4B, {"text_config": None}, "'text_config' is None"),
    (GEMMA3_4B, {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
]


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_would_change_the_computation_is_refused(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(base, **changes)


def fake_tensor(*shape: int, values: list[float] | None = None) -> Any:
    read = lambda start, stop: np.array(values, np.float32)[start:stop]  # noqa: E731
    return types.SimpleNamespace(shape=shape, read=read)


GGUF_SIZES = {
    "context_length": 8192,
    "embedding_length": 64,
    "block_count": 7,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
TIED = {"token_embd.weight": fake_tensor(100, 64)}
UNTIED = {**TIED, "output.weight": fake_tensor(100, 64)}


def gguf(arch: str, tensors: dict[str, Any] = UNTIED, **extra: Any) -> DecoderConfig:
    own = {**GGUF_SIZES, **{key.replace("__", "."): value for key, value in extra.items()}}
    metadata = {f"{arch}.{key}": value for key, value in own.items()}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.tokens": ["a", "b"]}
    return from_gguf(metadata, tensors)[0]


def test_gguf_llama() -> None:
    config = gguf("llama", vocab_size=100, rope__dimension_count=16, rope__freq_base=5e5)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (100, 64, 16)
    assert (config.num_layers, config.num_kv_heads, config.max_position) == (7, 2, 8192)
    assert config.ropes == (RopeConfig(5e5),)
    assert (config.tie_embeddings, config.dtype) == (False, "bfloat16")
    assert gguf("llama", TIED).tie_embeddings


def test_gguf_family_switches() -> None:
    assert gguf("qwen2").qkv_bias
    assert gguf("qwen3").qk_norm
    assert gguf("llama", attention__sliding_window=12).windows == (12,) * 7


def test_gguf_gemma_3() -> None:
    local = {"attention__sliding_window": 512, "rope__freq_base": 1e6}
    config = gguf("gemma3", TIED, attention__key_length=32, attention__value_length=32, **local)
    assert [w == NO_WINDOW for w in config.windows] == [False] * 5 + [True, False]
    assert config.ropes == (RopeConfig(1e6), RopeConfig(1e4))
    assert config.attn_scale == 32**-0.5
    scaled = gguf("gemma3", TIED, rope__scaling__type="linear", rope__scaling__factor=8.0, **local)
    assert scaled.ropes[0] == RopeConfig(1e6, "linear", 8.0)
    pattern = np.array([True, False, True, True, True, True, False])
    listed = gguf("gemma3", TIED, attention__sliding_window_pattern=pattern, **local)
    assert [w == 512 for w in listed.windows] == pattern.tolist()


def test_gguf_gemma_3_27b_scales_attention_by_its_width() -> None:
    config = gguf("gemma3", TIED, block_count=62, attention__key_length=128,
                  attention__value_length=128, attention__sliding_window=512)  # fmt: skip
    assert config.attn_scale == (64 / 4) ** -0.5


def test_gguf_rope_scaling() -> None:
    assert gguf("qwen2", rope__scaling__factor=2.0).ropes[0].scaling == "linear"
    assert gguf("llama", rope__scale_linear=2.0).ropes[0].factor == 2.0
    assert gguf("llama", rope__scaling__type="none").ropes == (RopeConfig(1e4),)
    yarn = gguf(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=4096,
    )
    assert yarn.ropes[0].attention_factor == pytest.approx(1.138629436)
    assert yarn.ropes[0].original_max_position == 4096
    assert yarn.max_position == 4 * 4096


def test_gguf_rope_frequency_factors() -> None:
    divisors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    tensors = {**UNTIED, "rope_freqs.weight": fake_tensor(8, values=divisors)}
    rope = gguf("llama", tensors).ropes[0]
    plain = RopeConfig(1e4).inverse_frequencies(16)
    np.testing.assert_allclose(rope.inverse_frequencies(16), plain / divisors)


GGUF_REFUSED = [
    ("phi3", {}, "GGUF architecture 'phi3' is not supported; supported are gemma3, llama"),
    ("llama", {"expert_count": 8}, "'expert_count' is 8"),
    ("llama", {"rope__dimension_count": 8}, "'rope.dimension_count' is 8; only 16"),
    ("llama", {"attention__value_length": 8}, "'attention.value_length' is 8"),
    ("llama", {"attention__causal": False}, "'attention.causal' is False"),
    ("llama", {"attention__head_count": np.array([4, 2])}, "'attention.head_count' is"),
    ("llama", {"rope__scaling__type": "longrope"}, "type 'longrope'"),
    ("llama", {"logit_scale": 0.5}, "'logit_scale' is 0.5"),
    (
        "llama",
        {"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 0.8},
        "'rope.scaling.attn_factor' is 0.8",
    ),
    ("gemma3", {}, "'attention.sliding_window' is missing"),
    ("qwen2", {"attention__sliding_window": 4096}, "'attention.sliding_window' is 4096"),
]


@pytest.mark.parametrize(("arch", "extra", "message"), GGUF_REFUSED, ids=lambda x: str(x)[:40])
def test_gguf_metadata_that_is_not_understood_is_refused(
    arch: str, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        gguf(arch, **extra)


def test_gguf_frequency_factors_beside_another_scaling_are_refused() -> None:
    tensors = {**UNTIED, "rope_freqs.weight": fake_tensor(8, values=[1.0] * 8)}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        gguf("llama", tensors, rope__scaling__factor=2.0)


def test_gguf_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="'adapter'"):
        from_gguf({"general.architecture": "llama", "general.type": "adapter"}, UNTIED)


@pytest.mark.parametrize("base", [LLAMA_32_1B, QWEN25_7B, QWEN3_06B, GEMMA3_1B, GEMMA3_4B])
def test_a_config_survives_json(base: dict[str, Any]) -> None:
    config = config_of(base)
    assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_divisors_survive_json() -> None:
    rope = RopeConfig(1e4).divided((1.0, 2.0))
    assert RopeConfig.from_json(dataclasses.asdict(rope)) == rope
