"""The tokenizer inside a GGUF file, rebuilt as a `tokenizers.Tokenizer`.

GGUF stores a vocabulary as flat arrays (pieces, scores, types, merges) and a handful of settings.
Two kinds are understood: "llama" (SentencePiece BPE: merges follow from the scores) and "gpt2"
(byte-level BPE: merges are listed, the pre-tokenizer is named). Others are refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagedjax.errors import TokenizerError
from pagedjax.models.gguf_file import read_gguf

Metadata = Mapping[str, Any]

# Token types, as llama.cpp numbers them.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# End-of-turn tokens that older files use in their chat template but do not declare.
_END_OF_TURN = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>")


class GgufTokenizer(NamedTuple):
    """What a GGUF file says about its tokenizer.

    Attributes:
      core: the tokenizer proper.
      special_tokens: text of each special token by role ("bos_token", "eos_token", ...).
      eos_token_ids: every id that ends an answer, the "eos_token" first.
      chat_templates: Jinja source by name.
    """

    core: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]


def read_gguf_tokenizer(path: str | Path) -> GgufTokenizer:
    """Build the tokenizer stored in the GGUF file at `path`.

    Raises:
      CheckpointError: the file is not GGUF, or truncated.
      TokenizerError: its tokenizer is missing, inconsistent, or of a kind that is not supported.
    """
    metadata = read_gguf(path).metadata
    if "tokenizer.ggml.model" not in metadata:
        raise TokenizerError(
            f"{path} has no tokenizer (no key 'tokenizer.ggml.model'); convert the model again "
            "with its vocabulary, or load the tokenizer from a directory"
        )
    model = metadata["tokenizer.ggml.model"]
    if model not in _BUILDERS:
        raise TokenizerError(
            f"{path} has a tokenizer of model {model!r}; supported are {sorted(_BUILDERS)}; "
            "load the tokenizer from a directory with a tokenizer.json instead"
        )
    vocabulary = _Vocabulary.from_metadata(metadata)
    core = _BUILDERS[model](vocabulary, metadata)
    _add_added_tokens(core, vocabulary)
    _set_template(core, vocabulary, metadata)
    templates = _chat_templates(metadata)
    return GgufTokenizer(
        core, _special_tokens(vocabulary), _eos_ids(vocabulary, templates), templates
    )


class _Vocabulary(NamedTuple):
    """Pieces by id, their types (i32[V]), and the ids with a role ("bos", "eos", ...)."""

    pieces: list[str]
    types: np.ndarray
    roles: dict[str, int]

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> "_Vocabulary":
        pieces = list(_require(metadata, "tokenizer.ggml.tokens"))
        types = np.asarray(metadata.get("tokenizer.ggml.token_type", np.ones(len(pieces), int)))
        if len(types) != len(pieces):
            raise TokenizerError(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(pieces)} tokens; "
                "the file is damaged: convert the model again"
            )
        roles = {}
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
            if token_id is None:
                continue
            if not 0 <= token_id < len(pieces):
                raise TokenizerError(
                    f"tokenizer.ggml.{role}_token_id is {token_id}, but the vocabulary has "
                    f"{len(pieces)} tokens; correct the key or convert the model again"
                )
            roles[role] = token_id
        return cls(pieces, types, roles)

    def ids_by_piece(self) -> dict[str, int]:
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        if len(ids) < len(self.pieces):
            twice = next(piece for i, piece in enumerate(self.pieces) if ids[piece] != i)
            raise TokenizerError(
                f"the vocabulary lists {twice!r} twice; token texts must be unique: convert the "
                "model again"
            )
        return ids

    def text(self, role: str) -> str | None:
        return self.pieces[self.roles[role]] if role in self.roles else None


def _build_sentencepiece(vocabulary: _Vocabulary, metadata: Metadata) -> tokenizers.Tokenizer:
    scores = np.asarray(_require(metadata, "tokenizer.ggml.scores"), np.float32)
    if len(scores) != len(vocabulary.pieces):
        raise TokenizerError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.pieces)} tokens; "
            "the file is damaged: convert the model again"
        )
    for i in np.flatnonzero(vocabulary.types == _USER_DEFINED):
        # These are matched in the raw text, where a space is still a space.
        vocabulary.pieces[i] = vocabulary.pieces[i].replace("▁", " ")
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids_by_piece(),
            merges=_merges_from_scores(vocabulary, scores),
            unk_token=vocabulary.text("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = [normalizers.Prepend("▁"), *spaces]
        plain = [*plain, decoders.Strip(" ", 1, 0)]
    core.normalizer = normalizers.Sequence(spaces)
    core.decoder = decoders.Sequence(plain)
    return core


def _merges_from_scores(vocabulary: _Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best-scored piece first.

    SentencePiece joins whichever two neighbours make the piece with the best score; a list of
    merges in that order makes BPE by rank do the same.
    """
    merged = ~np.isin(vocabulary.types, (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE))
    candidates = np.flatnonzero(merged)
    known = {vocabulary.pieces[i] for i in candidates}
    merges = []
    for i in candidates[np.argsort(-scores[candidates], kind="stable")].tolist():
        piece = vocabulary.pieces[i]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


class _PreTokenizer(NamedTuple):
    """How text is cut into words before byte-level BPE, and what goes with that family."""

    pattern: str
    split_digits: bool = False
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    nfc: bool = False
    adds_bos: bool = False  # the default where the file does not say


# Contractions, words, numbers, symbols, spaces.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same idea with line breaks of their own; %s is how many digits make a number.
_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _PreTokenizer(_GPT4_WORDS % "{1,3}", whole_words=True, adds_bos=True)
_QWEN2 = _PreTokenizer(_GPT4_WORDS % "", nfc=True)

_PRE_TOKENIZERS = {
    "default": _PreTokenizer(_GPT2_WORDS),
    "gpt-2": _PreTokenizer(_GPT2_WORDS),
    "smollm": _PreTokenizer(_GPT2_WORDS, split_digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def _build_byte_level(vocabulary: _Vocabulary, metadata: Metadata) -> tokenizers.Tokenizer:
    words = _pre_tokenizer(metadata)
    merges = [tuple(merge.split(" ")) for merge in _require(metadata, "tokenizer.ggml.merges")]
    ids = vocabulary.ids_by_piece()
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=words.whole_words)
    except Exception as error:  # the library raises bare exceptions here
        raise TokenizerError(
            f"tokenizer.ggml.merges does not fit the vocabulary: {error}; the file is damaged: "
            "convert the model again"
        ) from error
    core = tokenizers.Tokenizer(model)
    if words.nfc:
        core.normalizer = normalizers.NFC()
    steps = [
        pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if words.split_digits:
        steps = [pre_tokenizers.Digits(individual_digits=True), *steps]
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    return core


def _pre_tokenizer(metadata: Metadata) -> _PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}; supported are {sorted(_PRE_TOKENIZERS)}; load the "
            "tokenizer from a directory with a tokenizer.json instead"
        )
    return _PRE_TOKENIZERS[name]


_BUILDERS = {"llama": _build_sentencepiece, "gpt2": _build_byte_level}


def _add_added_tokens(core: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are matched in the raw text, before anything is cut or merged.

    Text after such a token gets a space prefix of its own where the vocabulary has one, as in
    llama.cpp.
    """

    def of_types(*types: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(vocabulary.pieces[i], special=special, normalized=False)
            for i in np.flatnonzero(np.isin(vocabulary.types, types))
        ]

    core.add_special_tokens(of_types(_UNKNOWN, _CONTROL, special=True))
    core.add_tokens(of_types(_USER_DEFINED, special=False))


def _set_template(core: tokenizers.Tokenizer, vocabulary: _Vocabulary, metadata: Metadata) -> None:
    if metadata["tokenizer.ggml.model"] == "gpt2":
        adds_bos = _pre_tokenizer(metadata).adds_bos
    else:
        adds_bos = True
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    set_bos_eos_template(
        core,
        vocabulary.roles.get("bos") if adds_bos else None,
        vocabulary.roles.get("eos") if adds_eos else None,
    )


def set_bos_eos_template(
    core: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None
) -> None:
    """Make `core` put these tokens around every text it encodes with special tokens."""
    names = {i: core.id_to_token(i) for i in (bos_id, eos_id) if i is not None}
    before = [names[bos_id]] if bos_id is not None else []
    after = [names[eos_id]] if eos_id is not None else []
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(name, i) for i, name in names.items()],
    )


def _special_tokens(vocabulary: _Vocabulary) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {name: text for role, name in names.items() if (text := vocabulary.text(role))}


def _eos_ids(vocabulary: _Vocabulary, templates: Mapping[str, str]) -> tuple[int, ...]:
    """Ids that end an answer: the declared ones, else also the end of a turn the template uses."""
    ids = [vocabulary.roles[role] for role in ("eos", "eot", "eom") if role in vocabulary.roles]
    if "eot" not in vocabulary.roles:
        controls = np.flatnonzero(vocabulary.types == _CONTROL).tolist()
        used = "".join(templates.values())
        ids += [i for i in controls if (t := vocabulary.pieces[i]) in _END_OF_TURN and t in used]
    return tuple(dict.fromkeys(ids))


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {k.removeprefix(key + "."): v for k, v in metadata.items() if k.startswith(key + ".")}
    return {"default": metadata[key], **named} if key in metadata else named


def _require(metadata: Metadata, key: str) -> Any:
    if key not in metadata:
        raise TokenizerError(
            f"the GGUF file has no {key!r}, which its tokenizer model "
            f"{metadata['tokenizer.ggml.model']!r} needs; convert the model again"
        )
    return metadata[key]
