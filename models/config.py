"""The one description of a decoder-only transformer that `Decoder` can run."""

import collections
import dataclasses
from typing import Any, Literal, get_args

from pagedjax.models.errors import ConfigError
from pagedjax.models.rope import RopeConfig
from pallas_kernels import NO_WINDOW as NO_WINDOW  # part of this configuration's vocabulary

Activation = Literal["silu", "gelu_tanh"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of a decoder. One class for every family; see `models.families`.

    Attributes:
      windows: per layer, how many last positions a token sees; `NO_WINDOW` for all.
      ropes: the distinct rotary embeddings of the model.
      rope_of_layer: per layer, an index into `ropes`.
      qkv_bias: Qwen2. qk_norm: RMS norm over the head size of q and k (Qwen3, Gemma 3).
      post_norms: RMS norms behind attention and MLP, before the residual sum (Gemma).
      embed_scale: factor on the embedded tokens. attn_scale: factor on q . k.
      dtype: of weights and matrix-product operands; norms, biases and sums are float32.
      max_position: longest context the model was made for, in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    windows: tuple[int, ...]
    ropes: tuple[RopeConfig, ...]
    rope_of_layer: tuple[int, ...]
    attn_scale: float
    norm_eps: float
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    dtype: Dtype = "bfloat16"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        for name in ("windows", "rope_of_layer"):
            if len(getattr(self, name)) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers"
                )
        if min(self.windows) < 1:
            raise ConfigError(f"a window of {min(self.windows)}; it must be at least 1")
        if not set(self.rope_of_layer) <= set(range(len(self.ropes))):
            raise ConfigError(f"rope_of_layer {self.rope_of_layer} names one of {len(self.ropes)}")
        for name, kinds in (("activation", Activation), ("dtype", Dtype)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(f"{name} {getattr(self, name)!r}; one of {get_args(kinds)}")

    @property
    def kv_layout(self) -> "KVLayout":
        return KVLayout.of_windows(self.windows)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "DecoderConfig":
        data = dict(data)
        data["ropes"] = tuple(RopeConfig.from_json(r) for r in data["ropes"])
        for name in ("windows", "rope_of_layer"):
            data[name] = tuple(data[name])
        return cls(**data)


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How layers share the pool: groups of `layers_per_group` layers with one window each.

    Every group draws blocks from the same pool and has its own block table per request, so a
    sliding-window group can give back the blocks that left its window. The group size is the
    number of layers of the rarest window; the last group of a window may have unused places.

    Attributes:
      windows: window of each group.
      group, index: per layer, its group and its index in the group.
    """

    layers_per_group: int
    windows: tuple[int, ...]
    group: tuple[int, ...]
    index: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @classmethod
    def of_windows(cls, layer_windows: tuple[int, ...]) -> "KVLayout":
        size = min(collections.Counter(layer_windows).values())
        windows: list[int] = []
        open_group: dict[int, tuple[int, int]] = {}  # window -> (group, layers in it)
        group, index = [], []
        for window in layer_windows:
            g, used = open_group.get(window, (-1, size))
            if used == size:
                g, used = len(windows), 0
                windows.append(window)
            open_group[window] = (g, used + 1)
            group.append(g)
            index.append(used)
        return cls(size, tuple(windows), tuple(group), tuple(index))
