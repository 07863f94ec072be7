"""Tokenizers from GGUF files and directories give the ids they should, or refuse by name."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from pagedjax._gguf_vocab import read_gguf_tokenizer
from pagedjax.errors import CheckpointError, TokenizerError
from pagedjax.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind it at all.",
    "def add(a, b):\n    return a + b  # 1234 + 5678\n\n\tprint(add(12, 34567))",
    "Ein Café in Köln; 中国的首都是北京 and the theatre there: isn't that the thing?",
]
SAMPLES = [
    *CORPUS,
    "",
    " leading and trailing  ",
    "IT'S 1234567890 o'clock\r\n\r\n  🍕🍕 e\u0301",
    "a<|end|>b <|turn|>c",
]


def write_gguf(path: Path, model: str, pieces: Sequence[str], **keys: Any) -> Path:
    """A GGUF file with nothing but a tokenizer; `keys` are `tokenizer.ggml.*` entries."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(pieces))
    for key, value in keys.items():
        name = key if key.startswith("chat_template") else f"ggml.{key}"
        name = f"tokenizer.{name}".replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- the demo model ---


@pytest.fixture(scope="module")
def saved_gemma(
    gemma_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tokenizer]:
    directory = tmp_path_factory.mktemp("saved")
    gemma_tokenizer.save(directory)
    return directory, Tokenizer.from_directory(directory)


@pytest.mark.parametrize("name", ["english", "code", "chinese", "emoji", "long700"])
def test_gemma_encodes_recorded_prompts_to_recorded_ids(
    name: str,
    parity_cases: dict[str, Any],
    gemma_tokenizer: Tokenizer,
    saved_gemma: tuple[Path, Tokenizer],
):
    prompt, ids = parity_cases[name]["prompt"], parity_cases[name]["prompt_ids"]
    for tokenizer in (gemma_tokenizer, saved_gemma[1]):
        assert tokenizer.encode(prompt) == ids
        assert tokenizer.encode(prompt, add_special_tokens=False) == ids[1:]
        assert tokenizer.decode(ids) == prompt
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>" + prompt


def test_gemma_special_tokens_come_from_the_file(gemma_tokenizer: Tokenizer):
    assert gemma_tokenizer.vocab_size == 262_144
    assert gemma_tokenizer.bos_token_id == 2
    assert gemma_tokenizer.eos_token_ids == (1,)
    assert {0, 1, 2, 3} <= gemma_tokenizer.special_token_ids
    assert gemma_tokenizer.chat_templates == {}


def test_gemma_round_trip_keeps_everything(
    gemma_tokenizer: Tokenizer, saved_gemma: tuple[Path, Tokenizer], tmp_path: Path
):
    directory, loaded = saved_gemma
    assert loaded.special_token_ids == gemma_tokenizer.special_token_ids
    loaded.save(tmp_path)
    for file in directory.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


# --- byte-level vocabularies ("gpt2") ---


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """A byte-level tokenizer built without the code under test."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|end|>"],
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([AddedToken("<|turn|>", normalized=False)])
    return core


def byte_level_gguf(path: Path, core: tokenizers.Tokenizer, **keys: Any) -> Path:
    vocab = core.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    types = {"<|end|>": CONTROL, "<|turn|>": USER_DEFINED}
    merges = json.loads(core.to_str())["model"]["merges"]
    return write_gguf(
        path,
        "gpt2",
        pieces,
        **{
            "merges": [f"{left} {right}" for left, right in merges],
            "token_type": [types.get(piece, NORMAL) for piece in pieces],
            "eos_token_id": core.token_to_id("<|end|>"),
            **keys,
        },
    )


GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@pytest.mark.parametrize(
    ("keys", "pre_tokenizer"),
    [
        ({}, GPT2_WORDS),
        ({"pre": "default"}, GPT2_WORDS),
        ({"pre": "gpt-2"}, GPT2_WORDS),
        (
            {"pre": "smollm"},
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_WORDS]),
        ),
    ],
)
def test_byte_level_gguf_equals_an_independent_tokenizer(
    keys: dict[str, str], pre_tokenizer: pre_tokenizers.PreTokenizer, tmp_path: Path
):
    core = train_byte_level(pre_tokenizer)
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(tmp_path / "t.gguf", core, **keys))
    assert tokenizer.vocab_size == core.get_vocab_size()
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert ids == core.encode(text).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == core.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'", "S", " 12345", "\n ", " (", "café", ")?!", "\n\n"]),
        ("smollm", ["It", "'", "S", " ", *"12345", "\n ", " (", "café", ")?!", "\n\n"]),
        ("llama-bpe", ["It", "'S", " ", "123", "45", "\n", " ", " (", "café", ")?!\n\n"]),
        ("qwen2", ["It", "'S", " ", *"12345", "\n", " ", " (", "café", ")?!\n\n"]),
    ],
)
def test_pre_tokenizer_cuts_words_as_its_family_does(pre: str, words: list[str], tmp_path: Path):
    core = train_byte_level(GPT2_WORDS)
    built = read_gguf_tokenizer(byte_level_gguf(tmp_path / "t.gguf", core, pre=pre)).core
    assert built.pre_tokenizer is not None
    cut = [word for word, _ in built.pre_tokenizer.pre_tokenize_str("".join(words))]
    assert [decoders.ByteLevel().decode([word]) for word in cut] == words


def test_llama_bpe_takes_a_whole_word_that_merges_cannot_reach(tmp_path: Path):
    pieces = ["a", "b", "c", "ab", "abc"]
    keys = {"merges": ["b c", "a b"]}  # "abc" becomes "a", "bc": no such token to merge on
    path = write_gguf(tmp_path / "l.gguf", "gpt2", [*pieces, "bc"], pre="llama-bpe", **keys)
    assert Tokenizer.from_gguf(path).encode("abc") == [4]
    path = write_gguf(tmp_path / "q.gguf", "gpt2", [*pieces, "bc"], pre="qwen2", **keys)
    assert Tokenizer.from_gguf(path).encode("abc") == [0, 5]


def test_qwen2_composes_accents(tmp_path: Path):
    core = train_byte_level(GPT2_WORDS)
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(tmp_path / "t.gguf", core, pre="qwen2"))
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


# --- SentencePiece vocabularies ("llama") ---

WORDS = [*"▁thenrigé", "▁t", "▁th", "▁the", "th", "he", "the", "in", "ing", "▁in", "er", "her"]
WORDS += ["the▁", "re", "▁▁", "n▁"]
SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<box>", *WORDS]
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(WORDS)]
# Scores are no function of length or position, so that only the score decides what merges first.
SPM_SCORES = [0.0] * 260 + [-float(7 * i % len(WORDS)) for i in range(len(WORDS))]
SPM_KEYS = {
    "scores": SPM_SCORES,
    "token_type": SPM_TYPES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def spm_encode(text: str, prefix: bool) -> list[int]:
    """SentencePiece's definition: join the neighbours that make the best-scored piece, repeat."""
    ids = {piece: i for i, piece in enumerate(SPM_PIECES) if SPM_TYPES[i] == NORMAL}
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        joined = [
            (SPM_SCORES[ids[a + b]], -i)
            for i, (a, b) in enumerate(pairwise(symbols))
            if a + b in ids
        ]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    first_byte = SPM_PIECES.index("<0x00>")
    return [
        token
        for symbol in symbols
        for token in (
            [ids[symbol]] if symbol in ids else [first_byte + byte for byte in symbol.encode()]
        )
    ]


@pytest.fixture(scope="module", params=[True, False], ids=["space-prefix", "no-prefix"])
def spm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, bool]:
    path = write_gguf(
        tmp_path_factory.mktemp("spm") / "t.gguf",
        "llama",
        SPM_PIECES,
        add_space_prefix=request.param,
        **SPM_KEYS,
    )
    return Tokenizer.from_gguf(path), request.param


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="then rigé🍕z\n", max_size=30))
def test_sentencepiece_gguf_merges_by_score(text: str, spm: tuple[Tokenizer, bool]):
    tokenizer, prefix = spm
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == spm_encode(text, prefix)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_matches_added_tokens_in_the_raw_text(spm: tuple[Tokenizer, bool]):
    tokenizer, prefix = spm
    box, eos = SPM_PIECES.index("<box>"), 2
    ids = tokenizer.encode("the<box></s>", add_special_tokens=False)
    assert ids == [*spm_encode("the", prefix), box, eos]
    assert tokenizer.decode(ids) == "the<box>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<box></s>"


def test_user_defined_runs_of_spaces_are_one_token(tmp_path: Path):
    pieces = ["<unk>", "a", "▁", "▁▁▁"]
    types = [UNKNOWN, NORMAL, NORMAL, USER_DEFINED]
    path = write_gguf(
        tmp_path / "t.gguf",
        "llama",
        pieces,
        scores=[0.0, -1.0, -2.0, 0.0],
        token_type=types,
        unknown_token_id=0,
        add_space_prefix=False,
    )
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.encode("a   a a") == [1, 3, 1, 2, 1]
    assert tokenizer.decode([1, 3, 1, 2, 1]) == "a   a a"


# --- special tokens of GGUF files ---


def test_add_bos_and_add_eos_follow_the_file(tmp_path: Path):
    plain = spm_encode("the", prefix=True)
    for name, keys, expected in [
        ("silent", {}, [1, *plain]),
        ("bos", {"add_bos_token": True}, [1, *plain]),
        ("none", {"add_bos_token": False}, plain),
        ("both", {"add_bos_token": True, "add_eos_token": True}, [1, *plain, 2]),
    ]:
        path = write_gguf(tmp_path / f"{name}.gguf", "llama", SPM_PIECES, **SPM_KEYS, **keys)
        tokenizer = Tokenizer.from_gguf(path)
        assert tokenizer.encode("the") == expected, name
        assert tokenizer.encode("the", add_special_tokens=False) == plain


def test_byte_level_adds_bos_only_for_families_that_do(tmp_path: Path):
    core = train_byte_level(GPT2_WORDS)
    for pre, count in [("llama-bpe", 1), ("gpt-2", 0)]:
        path = byte_level_gguf(tmp_path / f"{pre}.gguf", core, pre=pre, bos_token_id=0)
        assert Tokenizer.from_gguf(path).encode("") == [0] * count


def test_every_declared_end_token_ends_an_answer(tmp_path: Path):
    path = write_gguf(tmp_path / "t.gguf", "llama", SPM_PIECES, **SPM_KEYS, eot_token_id=1)
    assert Tokenizer.from_gguf(path).eos_token_ids == (2, 1)


def test_end_of_turn_of_the_chat_template_ends_an_answer(tmp_path: Path):
    pieces = ["<unk>", "<eos>", "<end_of_turn>", "<|im_end|>", "a"]
    keys: dict[str, Any] = {
        "token_type": [UNKNOWN, CONTROL, CONTROL, CONTROL, NORMAL],
        "scores": [0.0] * 5,
        "eos_token_id": 1,
    }
    template = "{{ messages[0].content }}<end_of_turn>"
    with_template = write_gguf(tmp_path / "a.gguf", "llama", pieces, **keys, chat_template=template)
    without = write_gguf(tmp_path / "b.gguf", "llama", pieces, **keys)
    assert Tokenizer.from_gguf(with_template).eos_token_ids == (1, 2)
    assert Tokenizer.from_gguf(without).eos_token_ids == (1,)


def test_chat_templates_of_a_gguf_file_are_read_by_name(tmp_path: Path):
    path = write_gguf(
        tmp_path / "t.gguf",
        "llama",
        SPM_PIECES,
        **SPM_KEYS,
        chat_template="{{ bos_token }}plain",
        chat_template__tool_use="{{ bos_token }}tools",
    )
    tokenizer = Tokenizer.from_gguf(path)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "<s>plain"
    assert tokenizer.apply_chat_template(messages, template_name="tool_use") == "<s>tools"


# --- GGUF files that are refused ---


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("bert", {}, r"model 'bert'; supported are \['gpt2', 'llama'\]"),
        ("gpt2", {"pre": "tekken", "merges": ["a b"]}, "tokenizer.ggml.pre is 'tekken'"),
        ("gpt2", {}, "no 'tokenizer.ggml.merges'"),
        ("gpt2", {"merges": ["a x"]}, "merges does not fit the vocabulary"),
        ("llama", {}, "no 'tokenizer.ggml.scores'"),
        ("llama", {"scores": [0.0]}, "scores has 1 entries for 3 tokens"),
        ("llama", {"scores": [0.0] * 3, "token_type": [1]}, "token_type has 1 entries"),
        ("llama", {"scores": [0.0] * 3, "eos_token_id": 3}, "eos_token_id is 3, .* has 3 tokens"),
    ],
)
def test_unsupported_or_damaged_gguf_is_refused_by_name(
    model: str, keys: dict[str, Any], message: str, tmp_path: Path
):
    path = write_gguf(tmp_path / "t.gguf", model, ["a", "b", "ab"], **keys)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(path)


@pytest.mark.parametrize(
    ("model", "keys"), [("llama", {"scores": [0.0] * 3}), ("gpt2", {"merges": ["a b"]})]
)
def test_repeated_token_is_refused(model: str, keys: dict[str, Any], tmp_path: Path):
    path = write_gguf(tmp_path / "t.gguf", model, ["a", "b", "a"], **keys)
    with pytest.raises(TokenizerError, match="lists 'a' twice"):
        Tokenizer.from_gguf(path)


def test_file_that_is_not_gguf_is_refused(tmp_path: Path):
    (tmp_path / "t.gguf").write_bytes(b"PK" + bytes(60))
    with pytest.raises(CheckpointError, match=r"t\.gguf"):
        Tokenizer.from_gguf(tmp_path / "t.gguf")


# --- directories ---


def word_tokenizer() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(
        models.BPE(vocab={"<s>": 0, "</s>": 1, "<e>": 2, "a": 3, "b": 4}, merges=[])
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    return core


def with_bos(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    core.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    return core


def write_directory(path: Path, core: tokenizers.Tokenizer | None, **files: Any) -> Path:
    """A tokenizer directory; keyword `name` becomes `name.json`."""
    path.mkdir(exist_ok=True)
    if core is not None:
        core.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_directory_without_tokenizer_json_is_refused(tmp_path: Path):
    write_directory(tmp_path, None, tokenizer_config={})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_directory(tmp_path)


def test_malformed_files_are_refused_by_name(tmp_path: Path):
    write_directory(tmp_path, word_tokenizer())
    for name, content in [
        ("generation_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "{}"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
            Tokenizer.from_directory(tmp_path)


def test_bare_tokenizer_json_is_enough(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, word_tokenizer()))
    assert tokenizer.encode("ab") == [3, 4]
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.vocab_size == 5


@pytest.mark.parametrize(
    ("generation", "expected"), [({}, (1,)), ({"eos_token_id": 2}, (1, 2)), (None, (1,))]
)
def test_eos_ids_come_from_both_configs(
    generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
):
    files: dict[str, Any] = {"tokenizer_config": {"eos_token": {"content": "</s>"}}}
    if generation is not None:
        files["generation_config"] = generation
    write_directory(tmp_path, word_tokenizer(), **files)
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == expected


def test_eos_list_keeps_order_without_repeats(tmp_path: Path):
    write_directory(
        tmp_path,
        word_tokenizer(),
        special_tokens_map={"eos_token": "</s>", "bos_token": "<s>"},
        tokenizer_config={"bos_token": None},
        generation_config={"eos_token_id": [2, 1, 4]},
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_ids == (1, 2, 4)
    assert tokenizer.bos_token_id == 0


def test_eos_ids_of_another_kind_are_refused(tmp_path: Path):
    write_directory(tmp_path, word_tokenizer(), generation_config={"eos_token_id": "</s>"})
    with pytest.raises(TokenizerError, match=r"eos_token_id in .* is '</s>'"):
        Tokenizer.from_directory(tmp_path)


def test_special_token_outside_the_vocabulary_is_refused(tmp_path: Path):
    write_directory(tmp_path, word_tokenizer(), tokenizer_config={"eos_token": "<nope>"})
    with pytest.raises(TokenizerError, match="eos_token is '<nope>'"):
        Tokenizer.from_directory(tmp_path)


def test_named_eos_is_special_even_if_the_vocabulary_does_not_say_so(tmp_path: Path):
    write_directory(tmp_path, word_tokenizer(), tokenizer_config={"eos_token": "<e>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a<e>") == [3, 2]
    assert tokenizer.decode([3, 2]) == "a"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_explicit_add_bos_overrules_the_post_processor(
    stored: bool, wanted: bool | None, tmp_path: Path
):
    core = with_bos(word_tokenizer()) if stored else word_tokenizer()
    config = {"bos_token": "<s>"} | ({} if wanted is None else {"add_bos_token": wanted})
    write_directory(tmp_path, core, tokenizer_config=config)
    adds = stored if wanted is None else wanted
    assert Tokenizer.from_directory(tmp_path).encode("a") == ([0, 3] if adds else [3])


def test_stored_truncation_and_padding_do_not_touch_prompts(tmp_path: Path):
    core = word_tokenizer()
    core.enable_truncation(2)
    core.enable_padding(length=8)
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, core))
    assert tokenizer.encode("aaaa") == [3] * 4


def test_chat_template_file_wins_over_the_config(tmp_path: Path):
    templates = [{"name": "default", "template": "old"}, {"name": "rag", "template": "rag"}]
    write_directory(tmp_path, word_tokenizer(), tokenizer_config={"chat_template": templates})
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert {name: t.source for name, t in tokenizer.chat_templates.items()} == {
        "default": "new",
        "rag": "rag",
    }


def test_chat_template_of_another_kind_is_refused(tmp_path: Path):
    write_directory(tmp_path, word_tokenizer(), tokenizer_config={"chat_template": [{"name": "x"}]})
    with pytest.raises(TokenizerError, match=r"chat_template in .* must be a string or a list"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("named", [False, True])
def test_save_and_load_keeps_every_setting(named: bool, tmp_path: Path):
    templates = {"default": "{{ messages }}"} | ({"tool_use": "{{ tools }}"} if named else {})
    tokenizer = Tokenizer(
        with_bos(word_tokenizer()),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        eos_token_ids=(1, 2),
        chat_templates=templates,
    )
    write_directory(tmp_path, None, generation_config={"temperature": 0.5, "eos_token_id": 9})
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded.encode("ab") == tokenizer.encode("ab") == [0, 3, 4]
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.special_token_ids == tokenizer.special_token_ids == {0, 1}
    assert loaded.eos_token_ids == (1, 2)
    assert loaded.chat_templates == tokenizer.chat_templates
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.5


# --- the rest of the interface ---


def test_text_that_is_no_text_is_refused():
    tokenizer = Tokenizer(word_tokenizer())
    for text in ("\ud83c", 3):
        with pytest.raises(TokenizerError, match="pass a str without lone surrogates"):
            tokenizer.encode(text)  # pyright: ignore[reportArgumentType]


def test_ids_outside_the_vocabulary_decode_to_nothing():
    assert Tokenizer(word_tokenizer()).decode([3, 99, 4]) == "ab"
