"""The recipes of the documentation run as they stand."""

import re
from pathlib import Path

import jax

DOCS = Path(__file__).parents[1] / "docs"


def test_the_recipes_for_pipelines() -> None:
    text = (DOCS / "pipelines.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names: dict = {}
    # As in a program of its own, without the strictness of this suite.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, block in enumerate(blocks):
            exec(compile(block, f"block {number} of pipelines.md", "exec"), names)
