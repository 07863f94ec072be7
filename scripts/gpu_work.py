"""Pieces of attention work that are timed: decodes and chunks of prompts, and their least cost."""

import dataclasses
from typing import Any

from gpu_counts import causal_flops, decode_bytes, kv_token_bytes
from gpu_timing import Limits

from pallas_kernels.kv_format import FORMATS

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Heads:
    """Of a model, and how many seconds a chain of timed calls should take at least."""

    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    chain_s: float = 0.02

    @classmethod
    def of(cls, toy: bool) -> "Heads":
        return cls(4, 2, 64, chain_s=0.0) if toy else cls()

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class Decode:
    """One row each of `batch` sequences, all with contexts of `context` tokens.

    `kv`: of the pool, a name of `FORMATS`.
    """

    batch: int
    context: int
    kv: str = "bfloat16"
    block_size: int = BLOCK_SIZE
    rows = 1  # of each sequence

    @property
    def name(self) -> str:
        return f"decode {self.batch} x {self.context}, {self.kv}, T {self.block_size}"

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that hold its contexts."""
        return self.batch * -(-self.context // self.block_size)

    def num_bytes(self, heads: Heads) -> int:
        """K and V of all contexts, bfloat16 queries and results, all once."""
        token = kv_token_bytes(heads.kv_heads, heads.head_dim, FORMATS[self.kv])
        contexts = [self.context] * self.batch
        return decode_bytes(contexts, token, heads.num_heads, heads.head_dim, q_itemsize=2)

    def floor_s(self, heads: Heads, limits: Limits) -> float:
        """Seconds that it takes at least."""
        return self.num_bytes(heads) / limits.copy_bytes_per_s

    def record(self, heads: Heads, limits: Limits, seconds: float) -> dict[str, Any]:
        rate = self.num_bytes(heads) / seconds
        return {
            "seconds": seconds,
            "bytes_per_s": rate,
            "of_copy": rate / limits.copy_bytes_per_s,
        }


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`new` tokens of one prompt, behind `behind` tokens that are in the pool already."""

    new: int
    behind: int
    kv = "bfloat16"
    block_size = BLOCK_SIZE
    batch = 1

    @property
    def name(self) -> str:
        return f"chunk of {self.new} behind {self.behind}"

    @property
    def rows(self) -> int:
        return self.new

    @property
    def context(self) -> int:
        return self.behind + self.new

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that hold its context."""
        return -(-self.context // self.block_size)

    def flops(self, heads: Heads) -> int:
        """Of both products, for the pairs that the causal mask leaves."""
        return causal_flops(self.new, self.context, heads.num_heads, heads.head_dim)

    def floor_s(self, heads: Heads, limits: Limits) -> float:
        """Seconds that it takes at least."""
        return self.flops(heads) / limits.product_flops_per_s

    def record(self, heads: Heads, limits: Limits, seconds: float) -> dict[str, Any]:
        rate = self.flops(heads) / seconds
        return {
            "seconds": seconds,
            "flops_per_s": rate,
            "of_product": rate / limits.product_flops_per_s,
        }


Piece = Decode | Chunk


def facts(piece: Piece) -> dict[str, Any]:
    """What a record says of a piece of work, besides its speed."""
    kind = "decode" if isinstance(piece, Decode) else "chunk"
    return {"kind": kind, **dataclasses.asdict(piece)}
