"""How much of a decode step the device waits for the host, with steps overlapped and without.

A small random model, so that the host shows, decodes for 1, 32 and 256 requests. Three loops take
turns, so that all see the same moods of the machine:

  device      the compiled step alone, a batch of the same contexts on the device already: what a
              step takes at least
  overlapped  `LLMEngine.step`, which dispatches a step before the last one's tokens are there
  in turn     the same with `async_scheduling` off

Milliseconds a step, medians of the turns. "idle" is the share of a step in which the device has
nothing to do: 1 - device / step. "host" is what the engine's thread works in a step: all of it but
the waiting for results. Outputs are asked for at the end only, as `LLM.generate` does.

Overlapping hides the host's work where the device takes longer than it; where the host takes
longer, a step takes as long as the host. On a CPU the two share the cores and hinder each other.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import Params, random_params
from pagedjax.models.rope import RopeConfig
from pagedjax.options import RequestOptions
from pagedjax.plan import StepPlan
from pagedjax.runner import Runner
from pagedjax.sampling_params import SamplingParams

_PROMPT_LEN = 16
_WARM_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """Milliseconds a step, and shares of it."""

    requests: int
    device: float
    overlapped: float
    in_turn: float
    overlapped_over_device: float
    overlapped_idle: float
    in_turn_idle: float
    overlapped_host: float
    in_turn_host: float


def small_model(num_layers: int, hidden_size: int) -> DecoderConfig:
    """A decoder in the manner of Llama, with a small vocabulary."""
    heads = max(1, hidden_size // 64)
    return DecoderConfig(
        vocab_size=4096,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 2),
        head_dim=64,
        max_position=4096,
        windows=(NO_WINDOW,) * num_layers,
        ropes=(RopeConfig(1e4),),
        rope_of_layer=(0,) * num_layers,
        attn_scale=64**-0.5,
        norm_eps=1e-6,
        dtype="float32",
    )


class Decoding:
    """An engine in which all requests decode.

    Attributes:
      waited: seconds that the engine's thread has waited for results.
    """

    def __init__(self, model: DecoderConfig, params: Params, requests: int, steps: int, **config):
        self.engine = LLMEngine(
            model,
            params,
            config=EngineConfig(
                max_num_seqs=requests,
                max_num_batched_tokens=max(256, requests),
                max_model_len=_PROMPT_LEN + steps + 1,
                swap_space_bytes=0,
                enable_prefix_caching=False,
                **config,
            ),
        )
        self.waited = 0.0
        self.plan: StepPlan | None = None
        rng = np.random.default_rng(0)
        asked = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        final = RequestOptions(output_kind="final")
        for _ in range(requests):
            prompt = rng.integers(0, model.vocab_size, _PROMPT_LEN).tolist()
            self.engine.add_request(prompt, asked, options=final)
        self._watch()
        while self.plan is None or len(self.plan.samplers) < requests:
            self.engine.step()
        self.run(_WARM_STEPS)

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds a step, and those of them that the host worked."""
        self.waited, start = 0.0, time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        whole = time.perf_counter() - start
        return whole / steps, (whole - self.waited) / steps

    def _watch(self) -> None:
        """Note the plans, and the time that `jax.device_get` takes in the engine."""
        runner, dispatch = self.engine.runner, self.engine.runner.dispatch
        processor, take = self.engine._processor, self.engine._processor.take

        def watched_dispatch(plan: StepPlan) -> Any:
            self.plan = plan
            return dispatch(plan)

        def watched_take(plan: StepPlan, output: Any) -> Any:
            start = time.perf_counter()
            jax.block_until_ready(output.sampled)
            self.waited += time.perf_counter() - start
            return take(plan, output)

        runner.dispatch = watched_dispatch  # type: ignore[method-assign]
        processor.take = watched_take  # type: ignore[method-assign]


def device_seconds(runner: Runner, decoding: Decoding, steps: int) -> float:
    """Seconds of the compiled step on its own, with contexts as long as those of `decoding`."""
    plan = decoding.plan
    assert plan is not None
    size = len(plan.chunks)
    batch = jax.device_put(runner._batch(plan, *runner.buckets.pick(size, size)))
    jax.block_until_ready(runner.run_batch(batch))
    start = time.perf_counter()
    for _ in range(steps):
        output = runner.run_batch(batch)
    jax.block_until_ready(output)
    return (time.perf_counter() - start) / steps


def measure(model: DecoderConfig, requests: int, turns: int, steps: int) -> Row:
    """Let the three loops take turns of `steps` steps."""
    params = random_params(model, jax.default_backend())
    total = (turns + 1) * steps + 4 * _WARM_STEPS
    alone = Decoding(model, params, requests, total).engine.runner
    overlapped = Decoding(model, params, requests, total)
    in_turn = Decoding(model, params, requests, total, async_scheduling=False)
    found = [
        (device_seconds(alone, overlapped, steps), overlapped.run(steps), in_turn.run(steps))
        for _ in range(turns)
    ]
    device = statistics.median(turn[0] for turn in found)
    both = [[statistics.median(turn[i][part] for turn in found) for part in (0, 1)] for i in (1, 2)]
    (wall, host), (wall_in_turn, host_in_turn) = both
    return Row(
        requests,
        1e3 * device,
        1e3 * wall,
        1e3 * wall_in_turn,
        wall / device,
        max(0.0, 1 - device / wall),
        max(0.0, 1 - device / wall_in_turn),
        1e3 * host,
        1e3 * host_in_turn,
    )


def make_table(rows: list[Row]) -> Table:
    table = Table(title="milliseconds a decode step", title_justify="left")
    names = ("requests", "device", "overlapped", "in turn", "overlapped / device")
    for name in (*names, "idle", "idle in turn", "host", "host in turn"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.requests),
            *(f"{value:.2f}" for value in (row.device, row.overlapped, row.in_turn)),
            f"{row.overlapped_over_device:.2f}",
            *(f"{share:.0%}" for share in (row.overlapped_idle, row.in_turn_idle)),
            *(f"{value:.2f}" for value in (row.overlapped_host, row.in_turn_host)),
        )
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--turns", type=int, default=9, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=30, help="steps a turn")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    args = parser.parse_args(argv)
    model = small_model(args.layers, args.hidden)
    rows = [measure(model, requests, args.turns, args.steps) for requests in args.requests]
    Console(width=110).print(make_table(rows))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
