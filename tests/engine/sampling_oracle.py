"""What the sampler should do, in float64 numpy, by sorting. It shares no code with it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Options:
    """What a request may ask, and what it has been given so far."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    stops: Sequence[int] = ()
    is_too_early: bool = False
    processor: Callable[[np.ndarray], np.ndarray] | None = None
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


def adjust(logits: np.ndarray, options: Options) -> np.ndarray:
    """f64[V], minus infinity for what is excluded."""
    x = logits.astype(np.float64)
    if options.processor is not None:
        x = options.processor(x)
    for token, bias in options.bias.items():
        x[token] += bias
    for token in {*options.prompt, *options.output}:
        factor = options.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in options.output:
        x[token] -= options.frequency_penalty
    for token in set(options.output):
        x[token] -= options.presence_penalty
    if options.allowed is not None:
        x = np.array([v if i in options.allowed else -np.inf for i, v in enumerate(x)])
    now = x.copy()
    if options.is_too_early:
        now[list(options.stops)] = -np.inf
    for *begun, last in options.bad_words:
        if not begun or list(options.output[-len(begun) :]) == begun:
            now[last] = -np.inf
    return now if np.isfinite(now).any() else x


def kept(
    x: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """bool[V]: min-p, then top-k and then top-p. Who equals the last one kept is kept as well."""
    scaled, p = scale(x, temperature), softmax(x, temperature)
    keep = np.isfinite(scaled)
    if min_p:
        keep &= scaled >= np.log(float(min_p))  # p >= min_p * p.max(), but not rounded
    if top_k:
        keep &= scaled >= np.sort(scaled[keep])[::-1][:top_k][-1]
    if top_p < 1:
        order = np.flatnonzero(keep)[np.argsort(-scaled[keep])]
        mass = np.cumsum(p[order]) / p[order].sum()
        last = order[min(np.count_nonzero(mass < top_p), len(order) - 1)]
        keep &= scaled >= scaled[last]
    return keep


def scale(x: np.ndarray, temperature: float) -> np.ndarray:
    """f64[V], at most 0. Logits that float32 cannot tell apart once they are scaled are equal."""
    scaled = (x.astype(np.float32) - x.max().astype(np.float32)) / np.float32(temperature)
    return scaled.astype(np.float64)


def softmax(x: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """f64[V]."""
    p = np.exp(scale(x, temperature))
    return p / p.sum()


def probabilities(logits: np.ndarray, options: Options) -> np.ndarray:
    """f64[V], the distribution to be sampled."""
    x = adjust(logits, options)
    keep = kept(x, options.temperature, options.top_k, options.top_p, options.min_p)
    p = np.where(keep, softmax(x, options.temperature), 0.0)
    return p / p.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64[..., V]."""
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
