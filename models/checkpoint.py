"""Loading checkpoints: Hugging Face directories and GGUF files."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedjax.models.assemble import Checkpoint, assemble
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.models.errors import CheckpointError
from pagedjax.models.families import TensorNames, from_gguf, from_hf
from pagedjax.models.gguf_file import read_gguf
from pagedjax.models.safetensors_file import read_safetensors
from pagedjax.models.tensor_file import TensorRef

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_hf(
    directory: str | Path, dtype: str | None = None, platform: str | None = None
) -> tuple[DecoderConfig, Params]:
    """Load a Hugging Face checkpoint: `config.json` and one or several safetensors files.

    Args:
      dtype: of the weights in memory; None: the configuration's.
      platform: backend the weights are for; None: JAX's default.

    Raises:
      ConfigError: the configuration asks for something that is not supported.
      CheckpointError: a file or tensor is missing, damaged, or does not fit the configuration.
    """
    directory = Path(directory)
    config, names = from_hf(_read_json(directory / "config.json"), dtype)
    tensors = {names.canonical(n): ref for n, ref in _hf_tensors(directory).items()}
    if config.tie_embeddings:
        _drop_tied_head(tensors, names)
    checkpoint = Checkpoint(str(directory), tensors, names)
    return config, assemble(config, checkpoint, platform or jax.default_backend())


def load_gguf(
    file: str | Path, dtype: str | None = None, platform: str | None = None
) -> tuple[DecoderConfig, Params]:
    """Load a GGUF file, dequantizing its weights.

    Args:
      dtype: of the weights in memory; None: bfloat16.
      platform: backend the weights are for; None: JAX's default.

    Raises:
      ConfigError: the metadata asks for something that is not supported.
      CheckpointError: the file is missing or damaged, or a tensor does not fit the metadata.
    """
    gguf = read_gguf(file)
    splits = gguf.metadata.get("split.count", 1)
    if splits not in (0, 1):
        raise CheckpointError(f"{file}: one of {splits} parts; merge them into one file first")
    config, names = from_gguf(gguf.metadata, gguf.tensors, dtype)
    checkpoint = Checkpoint(str(file), gguf.tensors, names)
    return config, assemble(config, checkpoint, platform or jax.default_backend())


def _hf_tensors(directory: Path) -> dict[str, TensorRef]:
    index = directory / _INDEX
    if (directory / _SINGLE).is_file() or not index.is_file():
        return read_safetensors(directory / _SINGLE)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is {weight_map!r}")
    tensors: dict[str, TensorRef] = {}
    for shard in sorted({str(name) for name in weight_map.values()}):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: shard {shard!r} is not a file name")
        for name, ref in read_safetensors(directory / shard).items():
            if weight_map.get(name) == shard:
                tensors[name] = ref
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / shard}: tensor {name!r} is missing; see {_INDEX}")
    return tensors


def _drop_tied_head(tensors: dict[str, TensorRef], names: TensorNames) -> None:
    """A tied head may be stored beside the embedding, but then it must be the same."""
    head = tensors.pop(names.of("head", 0), None)
    embed = tensors.get(names.of("embed", 0))
    if head is None or embed is None:
        return
    same = head.shape == embed.shape
    rows = head.shape[0] if same else 0
    step = max(1, 2**20 * rows // max(head.size, 1))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        same = same and np.array_equal(head.read(start, stop), embed.read(start, stop))
    if not same:
        raise CheckpointError(
            f"{head.file}: the configuration ties the embeddings, but {head.name!r} differs from "
            f"{embed.name!r}; set tie_word_embeddings to false"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return data
