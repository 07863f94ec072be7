"""Tiny random models, engines over them, and a slow oracle for greedy generation.

The oracle runs the whole sequence from scratch for every new token, in dense float64 numpy. It
shares no code with the kernels, the decoder or the engine; it only reads their parameters.
"""

import functools
from typing import Any

import jax
import numpy as np
import tokenizers

from pagedjax.buckets import Buckets
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import Params, random_params
from pagedjax.models.rope import RopeConfig
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import Tokenizer

VOCAB = 97
EOS = 96
MAX_POSITION = 64

_SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": MAX_POSITION,
    "attn_scale": 0.35,
    "norm_eps": 1e-6,
    "dtype": "float32",
}

UNIFORM = DecoderConfig(
    **_SHAPES,
    num_layers=2,
    windows=(NO_WINDOW,) * 2,
    ropes=(RopeConfig(theta=10_000.0),),
    rope_of_layer=(0,) * 2,
    qkv_bias=True,
)
"""One KV group; in the manner of Llama and Qwen 2."""

SLIDING = DecoderConfig(
    **_SHAPES,
    num_layers=4,
    windows=(5, NO_WINDOW, 5, NO_WINDOW),
    ropes=(RopeConfig(theta=100.0), RopeConfig(theta=10_000.0)),
    rope_of_layer=(0, 1, 0, 1),
    activation="gelu_tanh",
    tie_embeddings=True,
    qk_norm=True,
    post_norms=True,
    embed_scale=32**0.5,
    attn_soft_cap=20.0,
    final_soft_cap=10.0,
)
"""Two KV groups, of sliding-window and of full layers; in the manner of Gemma."""


@functools.cache
def tiny_params(config: DecoderConfig) -> Params:
    """Random parameters, with norms and biases that are not the identity."""
    rng = np.random.default_rng(7)

    def shake(path: tuple, value: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return value * rng.uniform(0.5, 1.5, value.shape).astype(np.float32)
        if name.endswith("bias"):
            return value + rng.normal(0.0, 0.5, value.shape).astype(np.float32)
        return value

    return jax.tree_util.tree_map_with_path(shake, random_params(config, "cpu", 0))


def tiny_engine(
    model: DecoderConfig = UNIFORM, tokenizer: Tokenizer | None = None, **overrides: Any
) -> LLMEngine:
    """An engine for at most 4 requests a step, with few shapes to compile."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, **overrides}
    return LLMEngine(model, tiny_params(model), tokenizer, EngineConfig(**settings))


class _OneShape(Buckets):
    """Every step is as large as the largest."""

    def pick(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        return self.max_num_batched_tokens, self.max_num_seqs


def in_one_shape(engine: LLMEngine) -> LLMEngine:
    """Compile one shape of step alone, where the choice of shapes does not matter."""
    limits = engine.limits
    engine.runner.buckets = _OneShape(limits.max_num_seqs, limits.max_num_batched_tokens)
    return engine


def tiny_tokenizer() -> Tokenizer:
    """Words "w0" to "w95" and the end-of-sequence token "<eos>"; no bos."""
    vocab = {f"w{i}": i for i in range(VOCAB - 1)} | {"<eos>": EOS}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<eos>"])
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    return Tokenizer(
        core,
        special_tokens={"eos_token": "<eos>"},
        eos_token_ids=[EOS],
        chat_templates={"default": template},
    )


def run_all(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until the engine is idle; the finished outputs by request id."""
    finished = {}
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            return finished
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    raise AssertionError("the engine does not come to an end")


def generate(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """The finished output of every prompt, in order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add_request(p, own) for p, own in zip(prompts, each, strict=True)]
    finished = run_all(engine)
    return [finished[request_id] for request_id in ids]


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


# --- the oracle ---


def oracle_logprobs(config: DecoderConfig, token_ids: list[int]) -> np.ndarray:
    """f64[N, vocab]: log-probabilities of the token behind each of N tokens."""
    weights = _float64_params(config)
    x = weights["embed"][token_ids] * config.embed_scale
    layers = weights["layers"]
    for i in range(config.num_layers):
        x = _layer(config, {name: stack[i] for name, stack in layers.items()}, x, i)
    head = weights["embed"] if config.tie_embeddings else weights["head"]
    logits = _rms_norm(config, x, weights["final_norm"]) @ head.T
    if config.final_soft_cap is not None:
        logits = config.final_soft_cap * np.tanh(logits / config.final_soft_cap)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def oracle_greedy(
    config: DecoderConfig, prompt: list[int], max_tokens: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Tokens of a greedy continuation, and f64[max_tokens, vocab] their log-probabilities."""
    tokens, rows = list(prompt), []
    for _ in range(max_tokens):
        rows.append(oracle_logprobs(config, tokens)[-1])
        tokens.append(int(rows[-1].argmax()))
    return tuple(tokens[len(prompt) :]), np.stack(rows)


@functools.cache
def _float64_params(config: DecoderConfig) -> Params:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tiny_params(config))


def _layer(config: DecoderConfig, w: Params, x: np.ndarray, index: int) -> np.ndarray:
    attended = _attention(config, w, _rms_norm(config, x, w["attn_norm"]), index)
    attended = attended @ w["out"].T
    if config.post_norms:
        attended = _rms_norm(config, attended, w["post_attn_norm"])
    x = x + attended
    gate, up = _rms_norm(config, x, w["mlp_norm"]) @ w["gate_up"].mT
    hidden = _activation(config, gate) * up @ w["down"].T
    if config.post_norms:
        hidden = _rms_norm(config, hidden, w["post_mlp_norm"])
    return x + hidden


def _attention(config: DecoderConfig, w: Params, x: np.ndarray, index: int) -> np.ndarray:
    """f64[N, heads * D]; rows of `qkv` are, per KV head, its queries, its key, its value."""
    n, kv_heads, dim = len(x), config.num_kv_heads, config.head_dim
    qkv = x @ w["qkv"].T
    if config.qkv_bias:
        qkv = qkv + w["qkv_bias"]
    qkv = qkv.reshape(n, kv_heads, -1, dim)
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
    if config.qk_norm:
        q, k = _rms_norm(config, q, w["q_norm"]), _rms_norm(config, k, w["k_norm"])
    theta = config.ropes[config.rope_of_layer[index]].theta
    q, k = _rotate(q, theta), _rotate(k, theta)[:, :, 0]
    scores = np.einsum("nkgd,mkd->kgnm", q, k) * config.attn_scale
    if config.attn_soft_cap is not None:
        scores = config.attn_soft_cap * np.tanh(scores / config.attn_soft_cap)
    distance = np.arange(n)[:, None] - np.arange(n)
    scores[:, :, (distance < 0) | (distance >= config.windows[index])] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgnm,mkd->nkgd", weights, v).reshape(n, -1)


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Complex rotation of f64[N, heads, G, D]; dimension i is paired with i + D / 2."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _activation(config: DecoderConfig, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _rms_norm(config: DecoderConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight
