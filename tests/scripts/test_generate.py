"""Batch jobs: every line gets its answer or its error, once, however often the job is started."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedjax.engine import LLMEngine
from pagedjax.llm import LLM
from pagedjax.sampling_params import SamplingParams
from tests.engine.tiny import tiny_engine, tiny_tokenizer
from tests.scripts.load import load_script

script = load_script("generate")
CHECKPOINT = Path(__file__).parents[1] / "goldens" / "llama_tied"

LINES: list[dict[str, Any]] = [
    {"prompt": "w5 w17 w90"},
    {"prompt_token_ids": [3, 1, 4, 1, 5], "id": "pi", "max_tokens": 9},
    {"messages": [{"role": "w7", "content": "w8 w9"}], "id": 77},
    {"prompt": "", "id": "empty"},
    {"prompt": "w2", "temperature": -1, "id": "cold"},
    {"prompt": "w2", "temperature": 1.0, "seed": 5, "logprobs": 2, "id": "sampled"},
    {"prompt_token_ids": [97], "id": "beyond"},
    {"prompt": "w1 \ud800", "id": "surrogate"},
    {"messages": [{"content": "no role"}], "id": "no role"},
    {"prompt": "w3", "max_tokens": "many", "id": "type"},
    *({"prompt": f"w{i}", "temperature": 1.0, "id": f"more {i}"} for i in range(6)),
]
REFUSED = {"empty", "cold", "beyond", "surrogate", "no role", "type"}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 4}
    # An interrupted job has other batches, in which log-probabilities would round differently.
    return tiny_engine(tokenizer=tiny_tokenizer(), deterministic=True, **limits)


@pytest.fixture
def settings() -> Any:
    params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return script.Settings(seed=3, params=params)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An input with `LINES` in it, and an output that does not exist yet."""
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n", "utf-8")
    return source, tmp_path / "out.jsonl"


def read(path: Path) -> dict[Any, dict[str, Any]]:
    """The lines of an output by id, each of which must be there once."""
    results = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    by_id = {result["id"]: result for result in results}
    assert len(by_id) == len(results)
    return by_id


def never() -> LLMEngine:
    raise AssertionError("the engine is not needed")


# --- answers ---


@pytest.fixture
def answered(files: tuple[Path, Path], engine: LLMEngine, settings: Any) -> dict[Any, dict]:
    summary = script.run_job(*files, lambda: engine, settings)
    assert (summary.answered, summary.refused, summary.skipped) == (10, 6, 0)
    return read(files[1])


def test_every_line_is_answered_or_refused(answered: dict[Any, dict]) -> None:
    assert set(answered) == {line.get("id", n) for n, line in enumerate(LINES, 1)}
    assert {key for key, result in answered.items() if "error" in result} == REFUSED


def test_answers_are_those_of_the_engine(answered: dict[Any, dict], engine: LLMEngine) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    longer = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, logprobs=2)
    chat = [7, 8, 9]  # "w7 w8 w9 " by the template
    expected = LLM(engine).generate(
        ["w5 w17 w90", [3, 1, 4, 1, 5], chat, "w2"], [greedy, longer, greedy, sampled]
    )
    for key, output in zip((1, "pi", 77, "sampled"), expected, strict=True):
        completion = output.outputs[0]
        assert answered[key]["token_ids"] == list(completion.token_ids)
        assert answered[key]["text"] == completion.text != ""
        assert answered[key]["finish_reason"] == "length"
        assert ("logprobs" in answered[key]) == (key == "sampled")
    assert len(answered["pi"]["token_ids"]) == 9
    first, logprobs = answered["sampled"]["logprobs"][0], expected[3].outputs[0].logprobs
    assert logprobs is not None
    assert first == {
        "sampled": logprobs[0].sampled,
        "top": [list(entry) for entry in logprobs[0].top],
        "processed": logprobs[0].processed,
    }


def test_several_samples_and_prompt_logprobs_are_written_as_the_engine_gives_them(
    tmp_path: Path, engine: LLMEngine, settings: Any
) -> None:
    params = {"n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 5, "prompt_logprobs": 1}
    (tmp_path / "in").write_text(json.dumps({"prompt_token_ids": [3, 1, 4], **params}) + "\n")
    script.run_job(tmp_path / "in", tmp_path / "out", lambda: engine, settings)
    (result,) = read(tmp_path / "out").values()
    (expected,) = LLM(engine).generate([3, 1, 4], SamplingParams(**params, ignore_eos=True))
    assert [c["token_ids"] for c in result["completions"]] == [
        list(completion.token_ids) for completion in expected.outputs
    ]
    assert len({tuple(c["token_ids"]) for c in result["completions"]}) == 2
    assert "text" not in result
    found = [position["sampled"] for position in result["prompt_logprobs"]]
    assert expected.prompt_logprobs is not None
    assert found == pytest.approx([p.sampled for p in expected.prompt_logprobs], abs=1e-5)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("line_id", "kind", "message"),
    [
        ("empty", "InvalidRequestError", "the prompt is empty"),
        ("cold", "InvalidRequestError", "temperature is -1"),
        ("beyond", "InvalidRequestError", "token id 97"),
        ("surrogate", "InvalidRequestError", "surrogates"),
        ("no role", "TokenizerError", "message 0"),
        ("type", "InvalidRequestError", "max_tokens is 'many'"),
    ],
)
def test_refused_lines_carry_type_and_message(
    answered: dict[Any, dict], line_id: str, kind: str, message: str
) -> None:
    assert answered[line_id].keys() == {"id", "error"}
    assert answered[line_id]["error"]["type"] == kind
    assert message in answered[line_id]["error"]["message"]


def test_messages_without_a_tokenizer_are_refused(settings: Any) -> None:
    line = script.Line(1, 1, "messages", [{"role": "user", "content": "w1"}], {})
    (result,) = script.results(tiny_engine(), [line], settings, window=1)
    assert result["error"]["message"] == "messages need a tokenizer; give prompt_token_ids"


def test_lines_without_a_seed_sample_by_the_seed_of_the_job_and_their_number() -> None:
    def seed(job_seed: int | None, number: int, **params: Any) -> int | None:
        line = script.Line(number, number, "prompt", "w1", params)
        return script.Settings(job_seed).params_of(line).seed

    assert seed(0, 1) == seed(0, 1)
    assert len({seed(0, 1), seed(0, 2), seed(1, 1), seed(1, 2)}) == 4
    assert seed(0, 1, seed=8) == seed(1, 2, seed=8) == 8
    assert seed(0, 1, seed=None) == seed(0, 1)


# --- bounded memory ---


def test_no_more_lines_are_read_than_the_window_holds(engine: LLMEngine, settings: Any) -> None:
    taken = 0

    def many() -> Iterator[Any]:
        nonlocal taken
        for number in range(1, 100):
            taken = number
            yield script.Line(number, number, "prompt", f"w{number % 90}", {"max_tokens": 2})

    results = script.results(engine, many(), settings, window=5)
    for done, _ in enumerate(itertools.islice(results, 40)):
        assert taken - done <= 5
        assert len(engine.scheduler) <= 5
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(request.request_id)


# --- resume ---


def test_an_interrupted_job_goes_on_and_ends_with_the_same_answers(
    files: tuple[Path, Path], engine: LLMEngine, settings: Any, answered: dict[Any, dict]
) -> None:
    output = files[1]
    lines = output.read_bytes().splitlines(keepends=True)
    for kept, fragment in ((0, b""), (0, b'{"i'), (5, lines[5][:40]), (15, lines[15][:-1])):
        output.write_bytes(b"".join(lines[:kept]) + fragment)
        summary = script.run_job(*files, lambda: engine, settings)
        assert summary.skipped == kept
        assert summary.answered + summary.refused == 16 - kept
        assert output.read_bytes().startswith(b"".join(lines[:kept]))
        assert read(output) == answered


def test_an_interruption_leaves_whole_lines_of_finished_requests(
    files: tuple[Path, Path],
    engine: LLMEngine,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, step = itertools.count(), engine.step

    def interrupted() -> Any:
        if next(steps) == 12:
            # What is done is in the file by now: a kill would not close it.
            assert 0 < files[1].read_bytes().count(b"\n") < 16
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.run_job(*files, lambda: engine, settings)
    monkeypatch.undo()
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(request.request_id)
    assert 0 < len(read(files[1])) < 16
    script.run_job(*files, lambda: engine, settings)
    assert len(read(files[1])) == 16


def test_a_finished_job_needs_no_model(
    files: tuple[Path, Path], answered: dict[Any, dict], settings: Any
) -> None:
    before = files[1].read_bytes()
    assert script.run_job(*files, never, settings).skipped == 16
    assert files[1].read_bytes() == before


def test_lines_that_were_added_to_the_input_are_answered(
    files: tuple[Path, Path], answered: dict[Any, dict], engine: LLMEngine, settings: Any
) -> None:
    with files[0].open("a") as file:
        file.write('{"prompt": "w1", "id": "late"}')  # without a line end
    summary = script.run_job(*files, lambda: engine, settings)
    assert (summary.answered, summary.skipped) == (1, 16)
    assert set(read(files[1])) == {*answered, "late"}


def test_answers_to_lines_of_another_input_do_not_count(
    files: tuple[Path, Path], engine: LLMEngine, settings: Any
) -> None:
    files[0].write_text('{"prompt": "w1", "id": "own"}\n')
    files[1].write_text('{"id": "other", "text": ""}\n')
    summary = script.run_job(*files, lambda: engine, settings)
    assert (summary.answered, summary.skipped) == (1, 0)
    assert set(read(files[1])) == {"other", "own"}


@pytest.mark.parametrize(
    "content", [b"notes\n", b"notes", b'{"id": 1}\nnotes\n', b'{"id": [1]}\n', b'{"id": 1\n']
)
def test_an_output_file_of_something_else_is_refused_and_left_alone(
    content: bytes, files: tuple[Path, Path], settings: Any
) -> None:
    files[1].write_bytes(content)
    with pytest.raises(script.JobError, match=r"out\.jsonl, line \d is not from an earlier run"):
        script.run_job(*files, never, settings)
    assert files[1].read_bytes() == content


def test_the_input_is_not_taken_for_the_output(files: tuple[Path, Path], settings: Any) -> None:
    before = files[0].read_bytes()
    with pytest.raises(script.JobError, match="is the input"):
        script.run_job(files[0], files[0], never, settings)
    assert files[0].read_bytes() == before


# --- malformed input ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        pytest.param(b"[" * 100_000, "not valid JSON", id="nested too deep"),
        (b"[1]", "a JSON list; it must be an object"),
        (b"{}", "it has no prompt"),
        (b'{"prompt": "a", "messages": []}', r"it has \['prompt', 'messages'\]"),
        (b'{"prompt": ["a"]}', r"prompt is \['a'\]; it must be a string"),
        (b'{"prompt_token_ids": [1, "2"]}', "it must be a list of integers"),
        (b'{"prompt_token_ids": [true]}', "it must be a list of integers"),
        (b'{"prompt_token_ids": 5}', "it must be a list of integers"),
        (b'{"messages": ["hi"]}', "it must be a list of objects"),
        (b'{"prompt": "a", "id": 1.5}', r"the id is 1\.5"),
        (b'{"prompt": "a", "id": true}', "the id is True"),
        (b'{"prompt": "a", "temprature": 1}', r"unknown keys \['temprature'\]"),
        (b'{"prompt": "a", "id": "x"}', "the id 'x' is that of another line"),
        (b'{"prompt": "a", "id": 1}', "the id 1 is that of another line"),
    ],
)
def test_a_malformed_line_stops_the_job_before_it_starts_and_is_named(
    line: bytes, message: str, files: tuple[Path, Path], settings: Any
) -> None:
    start = b'{"prompt": "a"}\n\n{"prompt": "b", "id": "x"}\n'
    files[0].write_bytes(start + line + b'\n{"prompt": "c"}\n')
    with pytest.raises(script.JobError, match=rf"in\.jsonl, line 4: .*{message}"):
        script.run_job(*files, never, settings)
    assert not files[1].exists()


# --- the command ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    shutil.copytree(CHECKPOINT, directory, dirs_exist_ok=True)
    tiny_tokenizer().save(directory)
    return directory


def test_the_command_answers_a_file_and_goes_on_when_called_again(
    files: tuple[Path, Path], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*map(str, files), "--model", str(checkpoint), "--max-tokens", "4", "--top-k", "50"]
    args += ["--max-num-seqs", "2", "--max-model-len", "32", "--temperature", "0.5"]
    assert script.main(args) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "10 answered, 6 refused, 0 done before" in captured.err
    assert all(
        len(r["token_ids"]) <= 4 for k, r in read(files[1]).items() if k not in REFUSED | {"pi"}
    )
    assert script.main(args) == 0
    assert "0 answered, 0 refused, 16 done before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prepare", "args", "status", "message"),
    [
        (None, ["--model", "no/such/model"], 1, "'no/such/model'"),
        (Path.unlink, [], 1, "No such file"),
        (lambda path: path.write_text("{"), [], 1, "line 1: not valid JSON"),
        (None, ["--temperature", "-1"], 2, "temperature is -1.0"),
        (None, ["--seed", "-1"], 2, "seed is -1"),
        (None, ["--max-num-seqs", "0"], 2, "max_num_seqs is 0"),
    ],
)
def test_errors_are_one_line_and_a_status(
    prepare: Callable[[Path], object] | None,
    args: list[str],
    status: int,
    message: str,
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if prepare is not None:
        prepare(files[0])
    assert script.main([*map(str, files), *args]) == status
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_an_interrupted_command_says_how_to_go_on(
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "run_job", interrupt)
    assert script.main([*map(str, files)]) == 130
    assert "goes on where this one stopped" in capsys.readouterr().err


def test_help_states_the_defaults_and_the_line_formats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for kind in script._PROMPT_KINDS:
        assert f'{{"{kind}": ' in text
    for param in script._PARAMS:
        assert f'"{param}"' in text
    defaults = vars(script.parse_args(["in", "out"]))
    for name, default in defaults.items():
        if name not in ("input", "output"):
            assert f"--{name.replace('_', '-')}" in text
            assert f"(default: {default})" in " ".join(text.split())
