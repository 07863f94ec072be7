"""The check of a GPU, without one: its counts by hand, the faults it finds, and all of it small."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.kv_format import FORMATS
from tests.engine.tiny import SLIDING, UNIFORM, tiny_params
from tests.scripts.load import SCRIPTS, load_script

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script


# --- counts ---


def test_a_decode_reads_all_keys_and_values_and_moves_its_queries_and_results(load: Load) -> None:
    counts = load("gpu_counts")
    want = {"bfloat16": 4096, "fp8": 8 * 260, "int8": 8 * 260, "int4": 8 * 132, "k8v4": 8 * 196}
    assert {kv: counts.kv_token_bytes(8, 128, FORMATS[kv]) for kv in want} == want
    got = counts.decode_bytes([3, 5], 4096, num_heads=32, head_dim=128, q_itemsize=2)
    assert got == 8 * 4096 + 2 * 2 * 32 * 128 * 2


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 9), (4, 4), (3, 10)])
def test_causal_flops_count_the_pairs_that_are_not_masked(
    load: Load, rows: int, context: int
) -> None:
    counts = load("gpu_counts")
    pairs = sum(key <= query for query in range(context - rows, context) for key in range(context))
    assert counts.causal_pairs(rows, context) == pairs
    assert counts.causal_flops(rows, context, num_heads=3, head_dim=8) == 4 * 8 * 3 * pairs


def test_shares_are_of_the_measured_limits(load: Load) -> None:
    load("gpu_timing")
    work = load("gpu_work")
    limits, heads = sys.modules["gpu_timing"].Limits(1e6, 2e6, 1e9), work.Heads(4, 2, 64)
    decode = work.Decode(2, 10, "int8")
    num_bytes = 20 * 2 * (128 + 4) + 2 * 2 * 4 * 64 * 2
    assert decode.floor_s(heads, limits) == pytest.approx(num_bytes / 1e6)
    assert decode.record(heads, limits, 0.5)["of_copy"] == pytest.approx(num_bytes / 0.5e6)
    chunk = work.Chunk(3, 5)
    flops = 4 * 64 * 4 * (6 + 7 + 8)
    assert chunk.floor_s(heads, limits) == pytest.approx(flops / 1e9)
    assert chunk.record(heads, limits, 0.5)["of_product"] == pytest.approx(flops / 0.5e9)
    assert (decode.num_blocks, chunk.num_blocks) == (2, 1)


@pytest.mark.parametrize(("model", "embeds"), [(UNIFORM, 97 * 32 * 4), (SLIDING, 0)])
def test_a_decode_step_reads_an_embedding_only_where_it_is_the_head(
    load: Load, model: Any, embeds: int
) -> None:
    engine, params = load("gpu_engine"), tiny_params(model)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - embeds
    row = 2 * 2 * 8 * 4
    keys = sum(min(context, window) for context in (3, 30) for window in model.windows)
    assert engine.decode_step_bytes(model, params, [3, 30]) == weights + keys * row


@pytest.mark.parametrize("floor_s", [1e-9, 1e-6, 1e-3, 0.3, 10.0])
def test_chains_have_an_even_number_of_calls_and_a_bound(load: Load, floor_s: float) -> None:
    calls = load("gpu_timing").num_calls(floor_s, 0.02)
    assert calls % 2 == 0
    assert 2 <= calls <= 512
    assert calls == 512 or calls * floor_s >= 0.02


def test_a_chain_passes_each_result_on(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    timing, results = load("gpu_timing"), []
    monkeypatch.setattr(timing, "median_seconds", lambda run: results.append(run()) or 6.0)
    step = lambda q, x: q * 2 + x  # noqa: E731
    assert timing.chain_seconds(step, jax.numpy.float32(1), jax.numpy.float32(1), calls=6) == 1.0
    assert results == [2**7 - 1]


# --- numerics ---


def test_every_pool_meets_every_head_size_and_group(load: Load) -> None:
    numerics = load("gpu_numerics")
    rounds = [list(numerics.one_round(turn, toy=False)) for turn in range(len(numerics.GROUPS))]
    for programs in rounds:
        assert len({(p.pool, p.head_dim) for p in programs}) == 28
        assert {p.group for p in programs} == set(numerics.GROUPS)
    programs = list(itertools.chain.from_iterable(rounds))
    assert len({(p.pool, p.head_dim, p.group) for p in programs}) == 28 * 6
    for what in ("pool", "head_dim", "group", "block_size"):
        for value in {getattr(p, what) for p in programs}:
            own = [p for p in programs if getattr(p, what) == value]
            assert {p.block_size for p in own} == set(numerics.BLOCK_SIZES) or what == "block_size"
            assert {p.soft_cap is None for p in own} == {False, True}, (what, value)
            assert {p.with_sinks for p in own} == {False, True}, (what, value)
            assert len({p.q_dtype for p in own}) >= 2, (what, value)
    names = [name for name, _ in numerics.checks("xla", toy=False)]
    assert len(names) == len(set(names))


def spoil(attention: Callable, fault: str) -> Callable:
    """`paged_attention` with a fault."""
    calls = []

    def spoiled(q: jax.Array, *args: Any, **options: Any) -> jax.Array:
        out = attention(q, *args, **options)
        batch = args[3]
        if fault == "off by little":
            return out.at[0, 0, 0].add(0.1)
        if fault == "NaN in padding":
            return out.at[-1].set(np.nan)
        if fault == "other bits when run again":
            noise = jax.pure_callback(
                lambda: calls.append(0) or np.float32(1e-3 * len(calls)),
                jax.ShapeDtypeStruct((), np.float32),
            )
            return out + noise.astype(out.dtype)
        seqs = (batch.context_lens > 0).sum()
        return out + seqs.astype(out.dtype) * 1e-2  # depends on the batch

    return spoiled


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("off by little", "off by"),
        ("NaN in padding", "not finite"),
        ("other bits when run again", "differs when run again"),
        ("other bits in a batch", "differ alone"),
    ],
)
def test_faults_are_found(
    load: Load, monkeypatch: pytest.MonkeyPatch, fault: str, found: str
) -> None:
    numerics = load("gpu_numerics")
    program = next(numerics.one_round(0, toy=True))
    check = numerics.check_batches
    if fault == "other bits in a batch":
        program, check = (
            dataclasses.replace(program, batch_invariant=True),
            numerics.check_invariance,
        )
    assert check(program, "xla")["ok"]
    monkeypatch.setattr(numerics, "paged_attention", spoil(numerics.paged_attention, fault))
    record = check(program, "xla")
    assert not record["ok"]
    assert found in " ".join(record["faults"])
    assert load("gpu_report").numerics_failed([record])


# --- workers and their records ---


def test_a_recorder_goes_on_behind_what_was_recorded(load: Load, tmp_path: Path) -> None:
    records, path, done = load("gpu_records"), tmp_path / "records", []

    def fail() -> dict:
        raise ValueError("bad\nworse")

    recorder = records.Recorder(path, 100)
    recorder.run("good", lambda: done.append("good") or {"seconds": 1})
    recorder.run("bad", fail)
    recorder = records.Recorder(path, 100)
    recorder.run("good", lambda: done.append("again") or {})
    records.Recorder(path, -1).run("late", dict)
    found, begun = records.read_records(path)
    assert done == ["good"]
    assert begun is None
    assert [record["name"] for record in found] == ["good", "bad", "late"]
    assert found[0]["seconds"] == 1
    assert found[1]["error"] == "ValueError: bad"
    assert found[2]["skipped"] == "no time left"


WORKER = """
import json, os, sys, time
path = json.loads(sys.argv[1])["records"]
text = open(path).read() if os.path.exists(path) else ""
file = open(path, "a")
def write(**line):
    file.write(json.dumps(line) + "\\n")
    file.flush()
if "first" not in text:
    write(begin="first")
    {first}
write(begin="second")
write(name="second", seconds=2)
"""


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ("time.sleep(60)", "stopped, as nothing came for 1 s"),
        ("os._exit(7)", "ended with status 7"),
        ("write(name='first', error='CUDA_ERROR'); sys.exit(3)", "CUDA_ERROR"),
    ],
)
def test_what_breaks_a_worker_does_not_stop_the_next_piece(
    load: Load, tmp_path: Path, first: str, error: str
) -> None:
    runner = load("check_gpu").Runner("xla", True, 60, 1, tmp_path)
    runner.worker = tmp_path / "worker.py"
    runner.worker.write_text(WORKER.replace("{first}", first))
    assert runner.run("speed", []) == [
        {"name": "first", "error": error},
        {"name": "second", "seconds": 2},
    ]


def test_a_worker_that_does_not_start_is_reported_once(load: Load, tmp_path: Path) -> None:
    runner = load("check_gpu").Runner("xla", True, 60, 1, tmp_path)
    runner.worker = tmp_path / "worker.py"
    runner.worker.write_text("raise SystemExit(9)")
    error = {"name": "speed: the process", "error": "ended with status 9"}
    assert runner.run("speed", []) == [error]


def test_parts_leave_time_for_those_behind_them(load: Load, tmp_path: Path) -> None:
    script = load("check_gpu")
    runner = script.Runner("xla", True, 480, 1, tmp_path)
    runner.worker = tmp_path / "worker.py"
    runner.worker.write_text(
        "import json, sys\n"
        "task = json.loads(sys.argv[1])\n"
        "line = json.dumps({'name': 'it', 'seconds': task['seconds']})\n"
        "open(task['records'], 'w').write(line)"
    )
    later = ["speed", "references", "engine"]
    (record,) = runner.run("numerics", later)
    assert record["seconds"] == pytest.approx(480 - 310, abs=5)
    late = script.Runner("xla", True, 0, 1, tmp_path)
    assert late.run("engine", []) == [{"name": "engine", "skipped": "no time left"}]


# --- the report ---


def test_nothing_checked_is_a_failure(load: Load) -> None:
    failed = load("gpu_report").numerics_failed
    assert failed([])
    assert failed([{"name": "numerics", "skipped": "no time left"}])
    assert failed([{"name": "a", "ok": True}, {"name": "b", "error": "x"}])
    assert not failed([{"name": "a", "ok": True}, {"name": "b", "skipped": "no time left"}])


def test_problems_are_told_by_name(load: Load) -> None:
    records = [
        {"name": "a", "ok": False, "faults": ["off by 1", "differs"]},
        {"name": "b", "error": "ValueError: bad"},
        {"name": "c", "does not run": "RuntimeError: no"},
        {"name": "d", "skipped": "no time left"},
        {"name": "e", "skipped": "no time left"},
    ]
    assert load("gpu_report").problems(records) == [
        "  a: off by 1; differs",
        "  b: ValueError: bad",
        "  c: does not run: RuntimeError: no",
        "  skipped: 2 from d on, no time left",
    ]


def test_lines_of_the_plot_are_by_batch_and_sorted_by_context(load: Load) -> None:
    def decode(batch: int, context: int, share: float, **more: Any) -> dict:
        shape = {"kv": "bfloat16", "block_size": 16, "batch": batch, "context": context}
        return {"name": "x", "kind": "decode", **shape, "of_copy": share, **more}

    data = {
        "speed": [
            decode(1, 64, 0.5),
            decode(1, 8, 0.25),
            decode(4, 8, 0.75),
            decode(4, 64, 0.1, kv="int8"),
            {"name": "y", "kind": "chunk", "of_product": 0.5},
        ],
        "references": [decode(1, 8, 0.2, by="xla")],
    }
    assert load("gpu_report").plot_lines(data) == [
        ("kernel, batch 1", False, [8, 64], [0.25, 0.5]),
        ("kernel, batch 4", False, [8], [0.75]),
        ("xla, batch 1", True, [8], [0.2]),
    ]


# --- the command ---


def test_without_a_gpu_it_says_so(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit) as caught:
        load("check_gpu").main([])
    assert caught.value.code == 2
    assert "needs an NVIDIA GPU, found: cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_a_toy_runs_every_part(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert load("check_gpu").main(["--toy", "--json", str(file)]) == 0
    found = json.loads(file.read_text("utf-8"))
    assert found["machine"]["platform"] == "cpu"
    assert all(record["ok"] for record in found["numerics"])
    assert all(record["seconds"] > 0 for record in found["speed"])
    assert {record["by"] for record in found["references"]} == {"triton", "cudnn", "xla"}
    measured = [record for record in found["engine"] if "of_floor" in record]
    assert [record["kind"] for record in measured] == ["prefill", "decode"]
    assert all(record["compiled_meanwhile"] == 0 for record in measured)
    printed = capsys.readouterr().out
    for title in ("numerics", "speed", "references", "engine", "total"):
        assert title in printed
