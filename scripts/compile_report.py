"""What an accelerator's compiler makes of a whole engine step, without the accelerator.

The step of a published model, of `--num-tokens` rows for `--num-seqs` sequences with contexts of up
to `--context` tokens, is compiled by the chip's own compiler, and the program is read:

  trace and lower  seconds in JAX
  compile          seconds in XLA, with nothing cached
  parameters       bytes, as stored on the chip
  pool             bytes of the KV pool
  in place         the step's state, pool included, is written where it was: bytes of outputs that
                   take their inputs' place, against the state's
  temporary        bytes beside inputs and outputs
  pool copies      instructions that write the whole pool to another place
  re-tiled         weights that every step first writes in another layout, and their bytes: memory,
                   or only traffic where they go to the chip's fast memory right away; found by
                   their axes, so something else of the same axes would count, too

and of each Pallas kernel what the compiler tells: on TPU of its use of VMEM, with the block tables
that it keeps in SMEM, of which the compiler tells nothing; on GPU the registers of a thread, and
the bytes that are spilled for want of more.

Of the TPU kernel, what attention reads, writes and multiplies in all layers is counted: when all
sequences decode at `--context`, and for one chunk of `--num-tokens` that ends there; and how many
times the least that is. A decode's head group is padded to a whole vector, which counts here and
costs the matrix unit nothing.

Unless `--num-blocks` says otherwise, the pool takes what an engine would give it on this chip: 90%
of its memory, less the parameters, and at most what all sequences can use.
"""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any, get_args

import jax
from real_models import REAL_MODELS, real_model
from rich.console import Console
from rich.table import Table

from pagedjax.batch import Batch
from pagedjax.config import KVCacheDtype
from pagedjax.device_state import choose_attention
from pagedjax.deviceless import (
    TARGETS,
    Compiled,
    abstract_step,
    compile_for,
    mesh_of,
    place_like_engine,
    platform,
)
from pagedjax.errors import CompilerNotInstalledError, ConfigError
from pagedjax.hlo_text import Kernel
from pagedjax.memory import default_num_blocks, pool_format
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params
from pagedjax.ptxas import KernelResources, kernel_resources
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.step import EngineState, step
from pallas_kernels import Implementation
from pallas_kernels.tpu_tiles import KernelShape, best_tiles, chip
from pallas_kernels.tpu_traffic import Traffic, attention_traffic

# Memory of one device (on v7x one of a chip's two cores), from the vendors' data sheets.
MEMORY_GIB = {"v5e": 16, "v5p": 95, "v6e": 32, "v7x": 96, "h200": 141}
_UTILIZATION = 0.9
_TABLE_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a step: rows, sequences, longest context in tokens, tokens a block, blocks of the pool."""

    num_tokens: int
    num_seqs: int
    context: int
    block_size: int
    kv_cache_dtype: str = "auto"
    num_blocks: int = 0

    def limits(self, model: DecoderConfig) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=self.num_tokens,
            max_model_len=self.context,
            block_size=self.block_size,
            windows=model.kv_layout.windows,
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says, in seconds and bytes; `retiled`: matrix -> bytes.

    `table_bytes`: of a KV group's block tables, which the TPU kernel keeps in SMEM.
    """

    lower_s: float
    compile_s: float
    param_bytes: int
    pool_bytes: int
    state_bytes: int
    alias_bytes: int
    temp_bytes: int
    pool_copies: list[str]
    retiled: dict[str, int]
    kernels: list[Kernel]
    resources: list[KernelResources]
    table_bytes: int

    @property
    def in_place(self) -> bool:
        return self.alias_bytes >= self.state_bytes and not self.pool_copies


def make_report(
    model: DecoderConfig,
    target: str,
    shape: Shape,
    attention: Implementation,
    default_formats: bool = False,
) -> Report:
    """Compile one step; `default_formats`: do not store weights in the formats of `models.layout`.

    Raises:
      CompilerNotInstalledError: there is no compiler for `target`.
      jax.errors.JaxRuntimeError: the compiler refuses, as it does where memory is too small.
    """
    params, state, batch = abstract_step(
        model,
        shape.limits(model),
        num_tokens=shape.num_tokens,
        num_blocks=shape.num_blocks,
        platform=platform(target),
        attention=attention,
        kv_cache_dtype=shape.kv_cache_dtype,
    )

    place = None if default_formats else place_like_engine
    run = functools.partial(step, model, ())
    with kernel_resources() as resources:
        compiled = compile_for(target, run, params, state, batch, donate=(1,), place=place)
    return _read(compiled, resources, params, state, batch)


def _read(
    compiled: Compiled,
    resources: list[KernelResources],
    params: Params,
    state: EngineState,
    batch: Batch,
) -> Report:
    return Report(
        lower_s=compiled.lower_s,
        compile_s=compiled.compile_s,
        param_bytes=_nbytes(params),
        pool_bytes=_nbytes(state.cache),
        state_bytes=_nbytes(state),
        alias_bytes=compiled.alias_bytes,
        temp_bytes=compiled.temp_bytes,
        pool_copies=compiled.copies_of(state.cache.pool.shape),
        retiled=_retiled(compiled, params),
        kernels=compiled.program.kernels(),
        resources=resources,
        table_bytes=_nbytes(batch.step.block_tables[0]),
    )


def _retiled(compiled: Compiled, params: Params) -> dict[str, int]:
    """Bytes of each matrix times how often it is brought into another layout, if it is.

    Matrices of one shape cannot be told apart and share an entry.
    """
    names: dict[tuple[int, ...], list[str]] = {}
    nbytes: dict[tuple[int, ...], int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if leaf.ndim > (2 if name.startswith("layers") else 1):  # those of layers are stacked
            names.setdefault(leaf.shape, []).append(name)
            nbytes[leaf.shape] = len(compiled.program.relaid(leaf.shape)) * _nbytes(leaf)
    return {" or ".join(names[shape]): total for shape, total in nbytes.items() if total}


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kernel_traffic(model: DecoderConfig, shape: Shape, target: str) -> dict[str, float]:
    """What the TPU kernel moves and multiplies in all layers, against the least there is.

    Of two batches: all sequences decode at the longest context; and one chunk of as many tokens as
    a step has ends there.
    """
    form = pool_format(shape.kv_cache_dtype, model)
    row = form.row(model.head_dim, "tpu")
    heads = KernelShape(
        kv_heads=model.num_kv_heads,
        group=model.num_heads // model.num_kv_heads,
        head_dim=row.head_dim(form.k),
        block_size=shape.block_size,
        num_keys=shape.limits(model).table_width * shape.block_size,
        kv=form,
        row=row,
    )
    with jax.set_mesh(mesh_of(target)):
        tiles = best_tiles(heads, chip())
    chunk = min(shape.num_tokens, shape.context)
    batches = {
        "decode": ([1] * shape.num_seqs, [shape.context] * shape.num_seqs),
        f"chunk of {chunk}": ([chunk], [shape.context]),
    }
    numbers = {}
    for name, (queries, contexts) in batches.items():
        total = Traffic()
        for window in model.windows:
            seen = None if window >= shape.context else window
            total += attention_traffic(queries, contexts, shape=heads, tiles=tiles, window=seen)
        flops = 4 * model.head_dim * model.num_kv_heads
        numbers |= {
            f"{name}: MB read": total.bytes_read / 1e6,
            f"{name}: read / least": total.read_ratio,
            f"{name}: MB written": total.bytes_written / 1e6,
            f"{name}: GFLOP": total.products * flops / 1e9,
            f"{name}: GFLOP / least": total.padding,
        }
    return numbers


def blocks_that_fit(model: DecoderConfig, target: str, shape: Shape) -> int:
    """Blocks of the pool that an engine would have beside the parameters.

    Raises:
      ConfigError: there is no room for any.
    """
    backend = platform(target)
    return default_num_blocks(
        model,
        shape.limits(model),
        pool_format(shape.kv_cache_dtype, model),
        {
            "bytes_limit": MEMORY_GIB[target] << 30,
            "bytes_in_use": _nbytes(abstract_params(model, backend)),
        },
        _UTILIZATION,
        backend,
    )


def make_table(title: str, report: Report, traffic: dict[str, float]) -> Table:
    table = Table("what", title=title)
    table.add_column("value", justify="right")
    table.add_row("trace and lower", f"{report.lower_s:.1f} s")
    table.add_row("compile", f"{report.compile_s:.1f} s")
    table.add_row("parameters", _size(report.param_bytes))
    table.add_row("pool", _size(report.pool_bytes))
    aliased = f"{report.alias_bytes:,} of {report.state_bytes:,}"
    table.add_row("in place", f"{'yes' if report.in_place else 'NO'}, {aliased} bytes")
    table.add_row("temporary", _size(report.temp_bytes))
    table.add_row("pool copies", ", ".join(report.pool_copies) or "none")
    table.add_row("re-tiled", _size(sum(report.retiled.values())) if report.retiled else "none")
    for name, nbytes in report.retiled.items():
        table.add_row(f"  {name}", _size(nbytes))
    for kernel in report.resources:
        used = f"{kernel.registers}, {kernel.spill_bytes:,} bytes spilled"
        table.add_row(f"kernel {kernel.name}: registers", used)
    for kernel in (kernel for kernel in report.kernels if kernel.backend == "tpu_custom_call"):
        limit = kernel.vmem_limit_bytes
        of_limit = "" if limit is None else f" of {_size(limit)}"
        used = None if kernel.vmem_bytes is None else _size(kernel.vmem_bytes)
        table.add_row(f"kernel {kernel.name}: VMEM", f"{used or 'not told'}{of_limit}")
        table.add_row(f"kernel {kernel.name}: SMEM", f"{_size(report.table_bytes)} of block tables")
    for name, value in traffic.items():
        table.add_row(name, f"{value:,.2f}")
    return table


def _size(nbytes: int) -> str:
    """In MiB, with the bytes where these are few."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes:,} bytes"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--model", required=True, choices=REAL_MODELS)
    parser.add_argument("--num-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--num-seqs", type=int, default=64, help="default: 64")
    parser.add_argument("--context", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--block-size", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    parser.add_argument("--num-blocks", type=int, help="default: what fits in the chip's memory")
    parser.add_argument(
        "--attention", choices=get_args(Implementation), help="default: the chip's best"
    )
    parser.add_argument(
        "--default-formats",
        action="store_true",
        help="store weights as arrays lie by default, to see what the formats save",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    if min(args.num_seqs, args.block_size, args.context) < 1 or args.num_tokens < args.num_seqs:
        parser.error(
            "--num-seqs, --block-size and --context must be at least 1, and --num-tokens at least "
            "--num-seqs"
        )
    if args.num_blocks is not None and args.num_blocks < 2:
        parser.error("--num-blocks must be at least 2 (block 0 is the null block)")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # whatever is here, nothing is run on it
    model = real_model(args.model)
    shape = Shape(
        args.num_tokens, args.num_seqs, args.context, args.block_size, args.kv_cache_dtype
    )
    try:
        num_blocks = args.num_blocks or blocks_that_fit(model, args.target, shape)
        shape = dataclasses.replace(shape, num_blocks=num_blocks)
        limits, form = shape.limits(model), pool_format(shape.kv_cache_dtype, model)
        attention = choose_attention(args.attention, model, limits, form, platform(args.target))
        report = make_report(model, args.target, shape, attention, args.default_formats)
    except (CompilerNotInstalledError, ConfigError, NotImplementedError) as error:
        sys.exit(f"{args.model} on {args.target}: {error}")
    except jax.errors.JaxRuntimeError as error:
        sys.exit(f"{args.model} on {args.target}: the compiler refuses: {error}")
    has_kernel = attention == "mosaic_tpu"
    traffic = kernel_traffic(model, shape, args.target) if has_kernel else {}
    title = (
        f"{args.model} on {args.target}, {attention} attention, {form} KV, jax {jax.__version__}"
    )
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(make_table(title, report, traffic))
    if args.json is not None:
        data = {
            "target": args.target,
            "model": args.model,
            "jax": jax.__version__,
            "attention": attention,
            **dataclasses.asdict(shape),
            **dataclasses.asdict(report),
            "in_place": report.in_place,
            "traffic": traffic,
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
