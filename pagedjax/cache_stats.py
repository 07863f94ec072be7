"""What the KV cache tells of itself."""

import dataclasses


@dataclasses.dataclass
class CacheStats:
    """Counts since the engine began.

    Attributes:
      prefix_queries, prefix_hits: prompt tokens looked up, and found in the pool or on the host.
      host_hits: those of the hits that came back from the host.
      swapped_out, swapped_in: blocks of preempted requests. offloaded: evicted prefix blocks that
        went to the host. copied: blocks copied because a sharer wrote to them.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    host_hits: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    offloaded: int = 0
    copied: int = 0


@dataclasses.dataclass(frozen=True)
class PrefixHit:
    """The longest prefix of a sequence whose blocks are all there.

    Attributes:
      num_blocks: logical blocks of the prefix.
      device, host: `(group, logical block, physical block)` of those it still needs.
      num_unowned: blocks that owning it takes from the free ones.
      is_coming: the block behind it is being computed in this very step.
    """

    num_blocks: int
    device: list[tuple[int, int, int]]
    host: list[tuple[int, int, int]]
    num_unowned: int
    is_coming: bool
