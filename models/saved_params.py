"""Parameters in the decoder's own form on disk, so that a second start loads without converting.

A saved directory holds `decoder.json` (configuration and platform) and `params/` (an Orbax
checkpoint of the parameters as stored on that platform).
"""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params
from pagedjax.models.errors import CheckpointError, ConfigError

_FORMAT = 1


def save_params(
    directory: str | Path, config: DecoderConfig, params: Params, platform: str | None = None
) -> None:
    """Save parameters; `directory` must not hold any yet.

    Args:
      platform: backend `params` are stored for (see `abstract_params`); None: JAX's default.

    Raises:
      CheckpointError: `params` do not fit `config`, or something is there already.
    """
    directory = Path(directory).absolute()
    platform = platform or jax.default_backend()
    _check(_described(params), config, platform, f"parameters for {directory}")
    if (directory / "decoder.json").exists() or (directory / "params").exists():
        raise CheckpointError(f"{directory} already holds saved parameters; remove them first")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "params", params)
    # Written last: its presence says that the rest is complete.
    described = {"format": _FORMAT, "platform": platform, "config": config.to_json()}
    (directory / "decoder.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


def restore_params(
    directory: str | Path, platform: str | None = None
) -> tuple[DecoderConfig, Params]:
    """Restore what `save_params` wrote.

    Args:
      platform: backend the parameters are wanted for; None: JAX's default. Platforms differ in how
        they store 16-bit weights; those of another kind are refused rather than misread.

    Raises:
      CheckpointError: missing, damaged, or saved for another storage.
    """
    directory = Path(directory).absolute()
    platform = platform or jax.default_backend()
    config, saved_for = _read_description(directory / "decoder.json")
    where = f"{directory}, saved for {saved_for!r}"
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        abstract_params(config, platform),
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            saved = checkpointer.metadata(directory / "params").item_metadata.tree
            _check(_described(saved), config, platform, where)
            return config, checkpointer.restore(directory / "params", target)
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises all kinds for damaged files
        raise CheckpointError(f"{where}: cannot be restored: {error}") from error


def _read_description(path: Path) -> tuple[DecoderConfig, str]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        if described["format"] != _FORMAT:
            raise CheckpointError(f"{path}: format {described['format']!r}; known is {_FORMAT}")
        return DecoderConfig.from_json(described["config"]), described["platform"]
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a description of a decoder: {error!r}") from error


def _described(tree: Any) -> dict[str, str]:
    """Name -> dtype and shape of every array, or of anything that has these."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        ".".join(str(getattr(key, "key", key)) for key in path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in flat
    }


def _check(found: dict[str, str], config: DecoderConfig, platform: str, where: str) -> None:
    expected = _described(abstract_params(config, platform))
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{where}: {name!r} is {found.get(name, 'missing')}; the configuration on platform "
                f"{platform!r} wants {expected.get(name, 'no such array')}"
            )
