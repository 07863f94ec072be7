"""pagedjax: LLM inference in JAX from a paged KV cache."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.async_llm import AsyncLLM
    from pagedjax.beam_search import BeamSearchParams
    from pagedjax.config import EngineConfig
    from pagedjax.engine import LLMEngine
    from pagedjax.errors import (
        CheckpointError,
        ConfigError,
        EngineAsleepError,
        EngineDeadError,
        InvalidRequestError,
        KernelCheckError,
        ModelNotFoundError,
        PagedJaxError,
        TokenizerError,
    )
    from pagedjax.finish_code import FinishCode
    from pagedjax.llm import LLM
    from pagedjax.logits import LogitsContext, LogitsProcessor
    from pagedjax.metrics import EngineMetrics
    from pagedjax.options import RequestOptions
    from pagedjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from pagedjax.request import FinishReason, TokenLogprobs
    from pagedjax.rollout import Rollout
    from pagedjax.sampling_params import SamplingParams
    from pagedjax.scoring import Score
    from pagedjax.tokenizer import Tokenizer

__version__ = "0.1.0"

# Resolved on first use, so that `import pagedjax.models` does not import the engine above it.
_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "beam_search",
    "CheckpointError": "errors",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EngineAsleepError": "errors",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineMetrics": "metrics",
    "FinishCode": "finish_code",
    "FinishReason": "request",
    "InvalidRequestError": "errors",
    "KernelCheckError": "errors",
    "LLMEngine": "engine",
    "LogitsContext": "logits",
    "LogitsProcessor": "logits",
    "ModelNotFoundError": "errors",
    "PagedJaxError": "errors",
    "RequestMetrics": "outputs",
    "RequestOptions": "options",
    "RequestOutput": "outputs",
    "Rollout": "rollout",
    "SamplingParams": "sampling_params",
    "Score": "scoring",
    "TokenLogprobs": "request",
    "Tokenizer": "tokenizer",
    "TokenizerError": "errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineAsleepError",
    "EngineConfig",
    "EngineDeadError",
    "EngineMetrics",
    "FinishCode",
    "FinishReason",
    "InvalidRequestError",
    "KernelCheckError",
    "LLMEngine",
    "LogitsContext",
    "LogitsProcessor",
    "ModelNotFoundError",
    "PagedJaxError",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "Rollout",
    "SamplingParams",
    "Score",
    "TokenLogprobs",
    "Tokenizer",
    "TokenizerError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
