"""The `pagedjax` command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pagedjax.compile_log import Compilation
from pagedjax.config import Dtype, EngineConfig, KVCacheDtype
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.errors import PagedJaxError
from pagedjax.host_memory import keep_freed_memory
from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

_NOTICEABLE_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    args = _parser().parse_args(argv)
    keep_freed_memory()
    try:
        return _generate(args)
    except PagedJaxError as error:
        print(f"pagedjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagedjax", description="LLM inference in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue one or more prompts and stream the text to the terminal.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = generate.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help="text to continue")
    add("--model", default=GEMMA_3_270M, help="Hugging Face directory, GGUF file, or that name")
    add("--max-tokens", type=int, default=64, help="most tokens to generate for a prompt")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this total mass")
    add("--seed", type=int, default=None, help="of the random stream; none: drawn per prompt")
    add("--ignore-eos", action="store_true", help="go on behind an end-of-sequence token")
    add("--dtype", choices=get_args(Dtype), default="auto", help="of weights and products")
    add(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="of the KV pool; auto is that of the weights",
    )
    add("--max-model-len", type=int, default=4096, help="most tokens, prompt and output")
    add("--cache-dir", type=Path, default=user_cache_dir() / "models", help="converted checkpoints")
    add("--no-cache", action="store_true", help="do not keep the converted checkpoint")
    return parser


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    config = EngineConfig(
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=min(32, len(args.prompts)),
        cache_dir=None if args.no_cache else args.cache_dir,
    )
    llm = LLM(args.model, config)
    print(f"[KV cache: {llm.engine.pool_size}]", file=sys.stderr)
    llm.engine.compiles.on_compile = _print_compilation
    outputs = _stream(llm, args.prompts, params)
    for output in outputs:
        if output.error is not None:
            print(f"pagedjax: {output.error}", file=sys.stderr)
    _print_speed([output for output in outputs if output.error is None])
    return int(any(output.error is not None for output in outputs))


def _stream(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Print each continuation behind its prompt: one prompt live, several as they finish."""
    final: dict[int, RequestOutput] = {}
    live = len(prompts) == 1
    shown = 0
    if live:
        print(prompts[0], end="", flush=True)
    for index, output in llm.stream(prompts, params):
        text = output.completions[0].text if output.completions else ""
        if live:
            print(text[shown:], end="", flush=True)
            shown = len(text)
        elif output.finished and output.error is None:
            print(f"[{index}] {prompts[index]}{text}", flush=True)
        if output.finished:
            final[index] = output
    if live:
        print()
    return [final[index] for index in sorted(final)]


def _print_compilation(compilation: Compilation) -> None:
    if compilation.seconds >= _NOTICEABLE_S:
        print(f"[{compilation.what}: compiled in {compilation.seconds:.1f} s]", file=sys.stderr)


def _print_speed(outputs: list[RequestOutput]) -> None:
    """Time to first token and tokens/s, to stderr."""
    if not outputs:
        return
    first = min(o.metrics.first_token or 0.0 for o in outputs)
    start = min(o.metrics.arrival for o in outputs)
    end = max(o.metrics.finished or 0.0 for o in outputs)
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    line = (
        f"{prompt_tokens} prompt tokens, first token after {first - start:.2f} s (compile included)"
    )
    if tokens > len(outputs):
        line += f", {tokens} new tokens, {(tokens - len(outputs)) / (end - first):.1f} tokens/s"
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
