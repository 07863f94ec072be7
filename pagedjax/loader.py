"""From the name of a model to its configuration, parameters and tokenizer."""

import contextlib
import dataclasses
import hashlib
import tempfile
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from pagedjax.config import EngineConfig
from pagedjax.demo import GEMMA_3_270M, demo_model_path
from pagedjax.errors import ModelNotFoundError
from pagedjax.models.checkpoint import load_gguf, load_hf
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.models.layout import place_params
from pagedjax.models.saved_params import restore_params, save_params
from pagedjax.tokenizer import Tokenizer

_FORMAT = "1"  # of converted checkpoints in the cache; raise it when the parameters change shape
_PARAMS, _TOKENIZER = "params", "tokenizer"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What an engine needs; `tokenizer` is None for a directory without a tokenizer.json."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer | None


def load_model(model: str | Path, config: EngineConfig) -> LoadedModel:
    """Load a Hugging Face directory, a GGUF file, or a packaged model by its name.

    With `config.cache_dir`, the converted parameters and tokenizer are kept there and found again
    as long as the source does not change.

    Raises:
      ModelNotFoundError: there is no such model.
      CheckpointError, ConfigError, TokenizerError: it cannot be loaded.
    """
    path = demo_model_path() if str(model) == GEMMA_3_270M else Path(model)
    if not path.exists():
        raise ModelNotFoundError(
            f"model {str(model)!r} is no directory, no GGUF file, and not {GEMMA_3_270M!r}"
        )
    loaded = _load(path, config, jax.default_backend())
    here = SingleDeviceSharding(jax.devices()[0])
    # Before anybody else holds the parameters, so that the two forms are there one by one only.
    return dataclasses.replace(loaded, params=place_params(loaded.params, here, donate=True))


def _load(path: Path, config: EngineConfig, platform: str) -> LoadedModel:
    """From the source, or what was kept of it."""
    dtype = None if config.dtype == "auto" else config.dtype
    if config.cache_dir is None:
        return _convert(path, dtype, platform)
    kept = Path(config.cache_dir) / _fingerprint(path, dtype, platform)
    if kept.exists():
        return _restore(kept, platform)
    loaded = _convert(path, dtype, platform)
    _keep(loaded, kept, platform)
    return loaded


def _restore(kept: Path, platform: str) -> LoadedModel:
    decoder, params = restore_params(kept / _PARAMS, platform)
    return LoadedModel(decoder, params, _directory_tokenizer(kept / _TOKENIZER))


def _keep(loaded: LoadedModel, kept: Path, platform: str) -> None:
    """Save under a name of our own, then rename: what is found under `kept` is always whole."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as partial:
        whole = Path(partial) / kept.name
        if loaded.tokenizer is not None:
            loaded.tokenizer.save(whole / _TOKENIZER)
        save_params(whole / _PARAMS, loaded.config, loaded.params, platform)
        with contextlib.suppress(OSError):  # another process was faster
            whole.rename(kept)


def _convert(path: Path, dtype: str | None, platform: str) -> LoadedModel:
    if path.is_dir():
        tokenizer = _directory_tokenizer(path)
        decoder, params = load_hf(path, dtype=dtype, platform=platform)
    else:
        decoder, params = load_gguf(path, dtype=dtype, platform=platform)
        tokenizer = Tokenizer.from_gguf(path)
    return LoadedModel(decoder, params, tokenizer)


def _directory_tokenizer(path: Path) -> Tokenizer | None:
    return Tokenizer.from_directory(path) if (path / "tokenizer.json").exists() else None


def _fingerprint(path: Path, dtype: str | None, platform: str) -> str:
    """Name of a conversion: changes when a file of the source does, or what is made of it."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = hashlib.sha256(repr((_FORMAT, dtype, platform, stats)).encode()).hexdigest()
    return f"{path.stem}-{digest[:16]}"
