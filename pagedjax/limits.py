"""The limits of an engine's scheduler, from its settings and its model."""

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.memory import default_block_size
from pagedjax.models.config import DecoderConfig
from pagedjax.scheduler_config import SchedulerConfig
from pallas_kernels import KVFormat


def engine_limits(
    model: DecoderConfig, config: EngineConfig, kv_format: KVFormat, platform: str
) -> SchedulerConfig:
    """What steps of a model may have.

    Raises:
      ConfigError: `max_model_len` is more than the model was made for.
    """
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model was made for {model.max_position} tokens"
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size
        or default_block_size(platform, kv_format, config.max_num_seqs, max_model_len),
        windows=model.kv_layout.windows,
        offload_evicted=config.host_cache_bytes > 0,
        num_decode_steps=config.num_decode_steps,
    )
