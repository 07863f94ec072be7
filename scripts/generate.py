"""Answers a file of prompts: JSON lines in, JSON lines out, resumable.

Every input line is an object with one of

  {"prompt": "text"}
  {"prompt_token_ids": [1, 2, 3]}
  {"messages": [{"role": "user", "content": "text"}]}      by the model's chat template

and, where wanted, an "id" (a string or an integer, unique; by default the number of the line) and
sampling parameters of its own, by the names of SamplingParams, whose documentation explains them:

  "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "best_of",
  "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias" (with token ids as
  text for keys), "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "ignore_eos",
  "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens",
  "spaces_between_special_tokens", "include_stop_str_in_output"

Blank lines are skipped.

Every line gets one output line, written as soon as it is done and so not in the order of the input:

  {"id": ..., "text": ..., "token_ids": [...], "finish_reason": "stop" | "length"}
  {"id": ..., "error": {"type": "InvalidRequestError", "message": ...}}     a request was refused

with "logprobs" if the line asked for them: for each token {"sampled": x, "top": [[id, x], ...],
"processed": x}, as TokenLogprobs says;
and "prompt_logprobs" for each prompt token but the first. A line with "n" above 1 gets, in place of
one text, "completions": [{"text", "token_ids", "finish_reason"}, ...].

The output file is appended to. Lines whose id it holds already are skipped, refused ones too, and a
last line that an earlier run left half written is dropped: after an interruption, run the same
command again. Requests without a seed draw from --seed and the number of their line, so a resumed
job samples what an uninterrupted one would have.

The input is checked first, and read again while it is worked on; memory holds the ids and the
requests in flight, at most twice --max-num-seqs. A malformed line is reported with its number
before anything is computed.

Exit status: 0 when every line has its output line, 1 for an error, 2 for wrong arguments, 130 when
interrupted.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from pagedjax import (
    LLM,
    CompletionOutput,
    EngineConfig,
    InvalidRequestError,
    LLMEngine,
    PagedJaxError,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from pagedjax.config import Dtype
from pagedjax.demo import GEMMA_3_270M
from pagedjax.host_memory import keep_freed_memory

LineId = str | int
Result = dict[str, Any]

_PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")
_PARAMS = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name != "logits_processor"
)
_RESULT_START = b'{"id": '  # of every output line


class JobError(Exception):
    """The input or output file cannot be used; the message says which line and why."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the input; `kind` is the member of `_PROMPT_KINDS` that it has."""

    number: int
    id: LineId
    kind: str
    prompt: Any
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What lines that do not say otherwise are sampled with; `seed` is that of the whole job."""

    seed: int = 0
    params: dict[str, Any] = dataclasses.field(default_factory=dict)

    def params_of(self, line: Line) -> SamplingParams:
        params = {**self.params, **line.params}
        if params.get("seed") is None:
            words = np.random.SeedSequence([self.seed, line.number]).generate_state(1, np.uint64)
            params["seed"] = int(words[0] >> 1)
        if isinstance(bias := params.get("logit_bias"), dict):  # JSON's keys are text
            params["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
        return SamplingParams(**params)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise InvalidRequestError(
            f"logit_bias has the key {key!r}; it must be a token id"
        ) from error


@dataclasses.dataclass
class Summary:
    answered: int = 0
    refused: int = 0
    skipped: int = 0

    def count(self, result: Result) -> None:
        if "error" in result:
            self.refused += 1
        else:
            self.answered += 1

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.refused} refused, {self.skipped} done before"


# --- input ---


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of the input that are not blank.

    Raises:
      JobError: one of them is malformed.
    """
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    yield parse_line(text, number)
                except ValueError as error:
                    raise JobError(f"{path}, line {number}: {error}") from error


def parse_line(text: bytes, number: int) -> Line:
    """Raises ValueError where `text` is malformed; a parameter out of range is found later."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"a JSON {type(data).__name__}; it must be an object")
    kinds = [kind for kind in _PROMPT_KINDS if kind in data]
    if len(kinds) != 1:
        raise ValueError(f"it has {kinds or 'no prompt'}; it must have one of {_PROMPT_KINDS}")
    kind, line_id = kinds[0], data.get("id", number)
    if isinstance(line_id, bool) or not isinstance(line_id, LineId):
        raise ValueError(f"the id is {line_id!r}; it must be a string or an integer")
    _check_prompt(kind, data[kind])
    params = {key: value for key, value in data.items() if key not in (kind, "id")}
    unknown = sorted(params.keys() - set(_PARAMS))
    if unknown:
        raise ValueError(f"unknown keys {unknown}; known are 'id', {kind!r} and {_PARAMS}")
    return Line(number, line_id, kind, data[kind], params)


def _check_prompt(kind: str, prompt: Any) -> None:
    if kind == "prompt":
        ok, wanted = isinstance(prompt, str), "a string"
    elif kind == "prompt_token_ids":
        ok, wanted = _is_list_of(prompt, int), "a list of integers"
    else:
        ok, wanted = _is_list_of(prompt, dict), "a list of objects"
    if not ok:
        raise ValueError(f"{kind} is {prompt!r:.80}; it must be {wanted}")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )


def input_ids(path: Path) -> set[LineId]:
    """The ids of all lines, each of which is checked.

    Raises:
      JobError: a line is malformed, or has the id of another.
    """
    seen: set[LineId] = set()
    for line in read_lines(path):
        if line.id in seen:
            raise JobError(
                f"{path}, line {line.number}: the id {line.id!r} is that of another line"
            )
        seen.add(line.id)
    return seen


# --- output ---


def finished_ids(path: Path) -> set[LineId]:
    """The ids in the output of earlier runs; a last line without its end is cut off the file.

    Raises:
      JobError: the file holds something else.
    """
    ids: set[LineId] = set()
    if not path.exists():
        return ids
    size = 0
    with open(path, "rb+") as file:
        for number, text in enumerate(file, 1):
            if not _may_be_result(text):
                raise JobError(
                    f"{path}, line {number} is not from an earlier run; name another output file"
                )
            if text.endswith(b"\n"):
                ids.add(json.loads(text)["id"])
                size += len(text)
        file.truncate(size)
    return ids


def _may_be_result(text: bytes) -> bool:
    """Whether `text` is an output line, or the beginning of one without a line end."""
    if not text.endswith(b"\n"):
        return text.startswith(_RESULT_START) or _RESULT_START.startswith(text)
    try:
        return text.startswith(_RESULT_START) and isinstance(json.loads(text)["id"], LineId)
    except ValueError:
        return False


def answer(line_id: LineId, output: RequestOutput) -> Result:
    completions = [_completion(completion) for completion in output.outputs]
    several = {"completions": completions} if len(completions) > 1 else completions[0]
    result: Result = {"id": line_id, **several}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return result


def _completion(completion: CompletionOutput) -> Result:
    result: Result = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        result["logprobs"] = _logprobs(completion.logprobs)
    return result


def _logprobs(positions: tuple[TokenLogprobs, ...]) -> list[Result]:
    return [dataclasses.asdict(position) for position in positions]


def refusal(line_id: LineId, error: PagedJaxError) -> Result:
    return {"id": line_id, "error": {"type": type(error).__name__, "message": str(error)}}


# --- the job ---


def results(
    engine: LLMEngine, lines: Iterable[Line], settings: Settings, window: int
) -> Iterator[Result]:
    """One result a line, as they come; at most `window` lines are in flight."""
    remaining = iter(lines)
    in_flight: dict[str, LineId] = {}
    while True:
        while len(in_flight) < window and (line := next(remaining, None)) is not None:
            try:
                in_flight[_submit(engine, line, settings)] = line.id
            except PagedJaxError as error:
                yield refusal(line.id, error)
        if not in_flight:
            return
        for output in engine.step():
            if output.finished:
                yield answer(in_flight.pop(output.request_id), output)


def _submit(engine: LLMEngine, line: Line, settings: Settings) -> str:
    prompt = line.prompt
    if line.kind == "messages":
        if engine.tokenizer is None:
            raise InvalidRequestError("messages need a tokenizer; give prompt_token_ids")
        prompt = engine.tokenizer.encode_chat(prompt)
    return engine.add_request(prompt, settings.params_of(line))


def run_job(
    source: Path, target: Path, make_engine: Callable[[], LLMEngine], settings: Settings
) -> Summary:
    """Answer what is not answered yet; the engine is made only if there is something to do.

    Raises:
      JobError: a file cannot be used. OSError: it cannot be read or written.
    """
    ids = input_ids(source)
    if target.exists() and target.samefile(source):
        raise JobError(f"{target} is the input; name another output file")
    done = finished_ids(target) & ids
    summary = Summary(skipped=len(done))
    # Line by line, so that an interruption costs at most the line that is being written.
    with open(target, "a", encoding="utf-8", buffering=1) as file, _progress_bar() as progress:
        if len(done) == len(ids):
            return summary
        engine = make_engine()
        task = progress.add_task("lines", total=len(ids), completed=len(done))
        lines = (line for line in read_lines(source) if line.id not in done)
        for result in results(engine, lines, settings, window=2 * engine.config.max_num_seqs):
            file.write(json.dumps(result) + "\n")
            summary.count(result)
            progress.advance(task)
    return summary


def _progress_bar() -> Progress:
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


# --- the command ---


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The module's text as it is written, and the default of every flag."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_HelpFormatter)
    add = parser.add_argument
    add("input", type=Path, help="file of prompts")
    add("output", type=Path, help="file of answers, created or appended to")
    add("--model", default=GEMMA_3_270M, help="Hugging Face directory, GGUF file or packaged name")
    add("--dtype", choices=get_args(Dtype), default="auto", help="of weights and products")
    add("--max-tokens", type=int, default=256, help="most tokens to generate for a line")
    add("--temperature", type=float, default=1.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this probability")
    add("--top-k", type=int, default=0, help="keep this many of the likeliest tokens; 0: all")
    add("--seed", type=int, default=0, help="of lines that bring none")
    add("--max-model-len", type=int, help="most tokens of prompt and answer; None: the model's")
    add("--max-num-seqs", type=int, default=32, help="most requests in one step")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    keep_freed_memory()
    try:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        settings = Settings(args.seed, {name: getattr(args, name) for name in names})
        SamplingParams(**settings.params, seed=args.seed)  # refuses them once and not line by line
        config = EngineConfig(
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, args.max_num_seqs),
        )
    except PagedJaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        summary = run_job(args.input, args.output, lambda: LLM(args.model, config).engine, settings)
    except (JobError, PagedJaxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    print(summary, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
