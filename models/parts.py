"""Parts: what one checkpoint tensor holds, and where it is in the decoder's parameters."""

from typing import Any

from pagedjax.models.config import DecoderConfig
from pagedjax.models.families import FUSED_PARTS

ParamPath = tuple[str, ...]  # of a parameter in the tree


def parts_of(path: ParamPath) -> tuple[str, ...]:
    """The parts that a parameter is made of, in their order."""
    return FUSED_PARTS.get(path[-1], (path[-1],))


def is_stacked(path: ParamPath) -> bool:
    """Whether a parameter has a leading axis of layers."""
    return path[0] == "layers"


def part_shape(config: DecoderConfig, part: str) -> tuple[int, ...]:
    """Shape of the checkpoint tensor of a part."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if part in ("q_norm", "k_norm"):
        return (c.head_dim,)
    if part.endswith("norm"):
        return (c.hidden_size,)
    return {
        "embed": (c.vocab_size, c.hidden_size),
        "head": (c.vocab_size, c.hidden_size),
        "q": (queries, c.hidden_size),
        "k": (keys, c.hidden_size),
        "v": (keys, c.hidden_size),
        "q_bias": (queries,),
        "k_bias": (keys,),
        "v_bias": (keys,),
        "out": (c.hidden_size, queries),
        "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }[part]


def place_of(
    config: DecoderConfig, part: str, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], Any]:
    """Where a part goes in its layer's parameter, which has `shape`.

    Returns:
      `(split, index)`: the part, row by row, is `parameter.reshape(split)[index]`.
    """
    if part in ("gate", "up"):
        return shape, ("gate", "up").index(part)
    if part.removesuffix("_bias") in ("q", "k", "v"):
        group = config.num_heads // config.num_kv_heads
        first = {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, None)}
        heads = (config.num_kv_heads, group + 2, config.head_dim, *shape[1:])
        return heads, (slice(None), first[part[0]])
    return shape, slice(None)
