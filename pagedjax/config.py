"""Settings of an engine."""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from pagedjax.errors import ConfigError
from pagedjax.logits import LogitsProcessor
from pagedjax.preemption import PreemptionMode
from pallas_kernels import Implementation

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4", "k8v4"]
"""Of the KV pool. All but the floats of 16 and 32 bits have a scale for each token and KV head."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; names follow vLLM where the meaning is the same.

    Attributes:
      dtype: of weights and matrix products; "auto" takes the checkpoint's.
      kv_cache_dtype: of the pool; "auto" takes `dtype`. "fp8" (e4m3) and "int8" take about half of
        bfloat16's memory, "k8v4" (int8 keys, int4 values) three eighths, "int4" a quarter, which
        costs quality: see `scripts/report_kv_quality.py`.
      block_size: tokens a block; None takes 16, and on TPU at least 64, or 128 for a quantized pool
        (see `default_block_size`).
      num_blocks: physical blocks of the pool, the null block included; None sizes the pool from
        free memory (`memory_utilization` of an accelerator's memory, at most 4 GiB on CPU).
      max_model_len: most tokens of a request, prompt and output; None takes the model's maximum.
      max_num_seqs: most requests in one step.
      max_num_batched_tokens: token budget of one step; longer prompts are computed in chunks.
      memory_utilization: share of an accelerator's memory for weights and pool.
      enable_prefix_caching: keep computed blocks findable by their tokens, also when their request
        has ended, until their place is needed.
      preemption_mode: what happens to the blocks of a request that has to give way: "swap" moves
        them to the host (and computes them again if there is no room), "recompute" drops them,
        "auto" takes what is faster by measurement.
      swap_space_bytes: host memory for blocks of preempted requests.
      host_cache_bytes: host memory for prefix blocks that the device evicted, on top; 0 keeps none.
        Both are one pool: prefix blocks use what swapping leaves free, and give way to it.
      async_scheduling: dispatch a step before the tokens of the one before are on the host, so that
        the host's work hides behind the device's. Outputs come one step later, and are the same.
      num_decode_steps: while all running requests decode and nobody can join them, let the device
        run so many steps in one go. Outputs come as many tokens at a time, and are the same. For
        accelerators: on CPU with 16-bit weights it is slower.
      deterministic: tokens and log-probabilities of a request are the same bit by bit, whatever
        else is served, in which order and chunks, from which cache, and however often it is
        preempted. Every step has the largest shape, `max_num_batched_tokens` tokens, so keep that
        small; it excludes `num_decode_steps`. Another configuration, jax version or kind of machine
        may round differently.
      logits_processors: those that requests may bring, if `LLMEngine.warmup` is to compile them.
      compilation_cache: keep compiled programs on disk, in the user's cache directory, unless JAX
        has been given another place (`jax_compilation_cache_dir`). A setting of the whole process.
      check_invariants: verify the block pool after every step and raise AssertionError when it is
        inconsistent; slow, for debugging.
      seed: of requests that bring none.
      attention: kernel to use; None picks the best for the backend. On GPU it is compared with
        plain XLA when the engine starts: where it is wrong, a named one raises KernelCheckError,
        and instead of a picked one plain XLA is used, with a warning.
      cache_dir: where converted checkpoints are kept, so that the next start skips the conversion;
        None keeps none.

    Raises:
      ConfigError: a field is out of its range.
    """

    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionMode = "auto"
    swap_space_bytes: int = 1 << 30
    host_cache_bytes: int = 0
    async_scheduling: bool = True
    num_decode_steps: int = 1
    deterministic: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    compilation_cache: bool = True
    check_invariants: bool = False
    seed: int = 0
    attention: Implementation | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        sizes = self.block_size is None or 1 <= self.block_size <= 1024
        self._require("block_size", sizes, "None or in [1, 1024]")
        few = self.num_blocks is not None and self.num_blocks < 2
        self._require("num_blocks", not few, "at least 2 (block 0 is the null block)")
        short = self.max_model_len is not None and self.max_model_len < 2
        self._require("max_model_len", not short, "at least 2 (one prompt token, one new)")
        self._require("max_num_seqs", self.max_num_seqs >= 1, "at least 1")
        enough = self.max_num_batched_tokens >= self.max_num_seqs
        self._require(
            "max_num_batched_tokens",
            enough,
            f"at least max_num_seqs, {self.max_num_seqs}, so that every request can decode",
        )
        self._require("num_decode_steps", self.num_decode_steps >= 1, "at least 1")
        ahead = self.deterministic and self.num_decode_steps > 1
        self._require("num_decode_steps", not ahead, "1 with deterministic")
        known = isinstance(self.logits_processors, tuple)
        self._require("logits_processors", known, "a tuple of functions")
        self._require("seed", self.seed >= 0, "at least 0")
        self._require("memory_utilization", 0 < self.memory_utilization <= 1, "in (0, 1]")
        for name, names in (("dtype", get_args(Dtype)), ("kv_cache_dtype", get_args(KVCacheDtype))):
            self._require(name, getattr(self, name) in names, f"one of {names}")
        for name in ("swap_space_bytes", "host_cache_bytes"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        modes = get_args(PreemptionMode)
        self._require("preemption_mode", self.preemption_mode in modes, f"one of {modes}")
        known = self.attention in (None, *get_args(Implementation))
        self._require("attention", known, f"None or one of {get_args(Implementation)}")

    def _require(self, name: str, ok: bool, limit: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {limit}")
