"""Limits that the scheduler keeps."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits that the scheduler keeps; see `EngineConfig`. `windows`: of the model's KV groups."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    windows: tuple[int, ...]
    offload_evicted: bool = False
    num_decode_steps: int = 1

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.block_size)
