"""Write `tests/data/beam_search.json`: what Transformers' beam search finds on golden checkpoints.

Run it only to change the cases, after `make_goldens.py`; like that it needs torch and transformers,
which are no dependencies of pagedjax. Each case holds a prompt of random ids, the settings, and all
hypotheses, best first: `token_ids` as generated, the stop token included, and `scores`.

The tokens of `STOPS` end a beam. Which they are is chosen per model among the commonest of its
beams without any, so that many do end. Cases that noise of size `NOISE` in the log-probabilities
changes are left out: there another order of additions could decide.
"""

import argparse
import collections
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers

MODELS = ["gemma3", "llama_tied", "qwen2"]
PROMPT_LENGTHS = [1, 5, 16, 30]
NOISE = 1e-4
NOISY_RUNS = 4

# Every pair of the first two; the others take turns, in numbers without a common factor.
LENGTH_PENALTIES = [1.0, 0.0, 2.0, -1.0]
EARLY_STOPPING = [False, True, "never"]
BEAM_WIDTHS = [4, 2, 5, 4, 5]
MAX_TOKENS = [14, 11, 12, 6, 13, 9, 14]
STOPS = [1, 2, 3, 1, 2, 1, 0, 2, 1, 3, 2]  # how many stop tokens

Case = dict[str, Any]


class Noise(transformers.LogitsProcessor):
    """Adds uniform noise to the log-probabilities."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self.random) - 1)


def search(
    model: transformers.PreTrainedModel, case: Case, noise: Sequence[transformers.LogitsProcessor]
) -> tuple[list[list[int]], list[float]]:
    """Generated tokens, without padding, and score of every hypothesis."""
    config = transformers.GenerationConfig(
        num_beams=case["beam_width"],
        num_return_sequences=case["beam_width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=case["stop_token_ids"] or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt = torch.tensor([case["prompt_ids"]])
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=config,
        logits_processor=transformers.LogitsProcessorList(noise),
    )
    rows = found.sequences[:, prompt.shape[1] :].tolist()
    scores = [round(score, 5) for score in found.sequences_scores.tolist()]
    return [cut(row, case["stop_token_ids"]) for row in rows], scores


def cut(row: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Up to the first stop token; what is behind it is padding."""
    ends = [i + 1 for i, token_id in enumerate(row) if token_id in stop_token_ids]
    return row[: ends[0]] if ends else row


def common_tokens(model: transformers.PreTrainedModel, prompts: Sequence[list[int]]) -> list[int]:
    """The commonest tokens of beams that nothing ends, the first of a beam left out."""
    settings = {"beam_width": 5, "max_tokens": 14, "length_penalty": 1.0, "early_stopping": False}
    counts = collections.Counter()
    for prompt in prompts:
        rows, _ = search(model, {"prompt_ids": prompt, "stop_token_ids": [], **settings}, [])
        counts.update(token_id for row in rows for token_id in row[1:])
    return [token_id for token_id, _ in counts.most_common(max(STOPS))]


def settings_of(turns: Iterator[tuple[int, int, int]], common: Sequence[int]) -> Iterator[Case]:
    for length_penalty in LENGTH_PENALTIES:
        beam_width, max_tokens, stops = next(turns)
        for early_stopping in EARLY_STOPPING:
            yield {
                "beam_width": beam_width,
                "max_tokens": max_tokens,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
                "stop_token_ids": list(common[:stops]),
            }


def cases_of(
    name: str, directory: pathlib.Path, turns: Iterator[tuple[int, int, int]]
) -> list[Case]:
    """The cases of one checkpoint; says how its beams end."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config = transformers.GenerationConfig()  # no tokens of the model's own
    torch.manual_seed(sum(name.encode()))
    prompts = [torch.randint(model.config.vocab_size, (n,)).tolist() for n in PROMPT_LENGTHS]
    cases, unstable, ends = [], 0, collections.Counter()
    for settings in settings_of(turns, common_tokens(model, prompts)):
        for prompt in prompts:
            case = {"model": name, **settings, "prompt_ids": prompt}
            rows, scores = search(model, case, [])
            noisy = [search(model, case, [Noise(seed)])[0] for seed in range(NOISY_RUNS)]
            if any(other != rows for other in noisy):
                unstable += 1
                continue
            cases.append({**case, "token_ids": rows, "scores": scores})
            ends.update("stop" if r[-1] in case["stop_token_ids"] else "length" for r in rows)
    print(f"{name}: {len(cases)} cases, {unstable} near ties left out, beams end by {dict(ends)}")
    return cases


def main() -> None:
    tests = pathlib.Path(__file__).parents[1] / "tests"
    parser = argparse.ArgumentParser(description="Write the goldens of beam search.")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=tests / "data" / "beam_search.json",
        help="file to write; default: %(default)s",
    )
    out = parser.parse_args().out
    # Never exhausted; goes on from model to model, so that these do not get the same settings.
    turns = zip(*map(itertools.cycle, (BEAM_WIDTHS, MAX_TOKENS, STOPS)), strict=False)
    cases = [case for name in MODELS for case in cases_of(name, tests / "goldens", turns)]
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, CPU"
    lines = ",\n  ".join(json.dumps(case, separators=(",", ":")) for case in cases)
    out.write_text(f'{{\n "engine": "{engine}",\n "cases": [\n  {lines}\n ]\n}}\n')
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
