"""Small tokenizers of every family, in which bytes and borders inside characters are tokens."""

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pagedjax.token_bytes import byte_level_alphabet
from pagedjax.tokenizer import Tokenizer

PIZZA = "🍕".encode()

# Pieces beyond the 256 bytes: whole words, whole and partial characters, borders inside characters.
WORDS = [
    b" the",
    b"a",
    b" ",
    "é".encode(),
    "中国".encode(),
    PIZZA,
    PIZZA[:2],
    PIZZA[2:],
    b"!" + PIZZA[:3],
]


def build_byte_level() -> tuple[tokenizers.Tokenizer, list[bytes]]:
    """A byte-level vocabulary: ids 0-255 are the bytes, then `WORDS`, then a special token."""
    alphabet = byte_level_alphabet()
    data = [bytes([b]) for b in range(256)] + [w for w in WORDS if len(w) > 1]
    vocab = {"".join(alphabet[b] for b in piece): i for i, piece in enumerate(data)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return core, [*data, b"<eos>"]


def build_sentencepiece(strip: bool) -> tuple[tokenizers.Tokenizer, list[bytes]]:
    """A SentencePiece vocabulary: ids 0-255 are byte tokens, then words, then a special token."""
    words = ["▁", "▁the", "▁▁a", "a", "é", "中国"]
    pieces = [*(f"<0x{b:02X}>" for b in range(256)), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    core.add_special_tokens([AddedToken("<eos>", normalized=False)])
    data = [bytes([b]) for b in range(256)]
    return core, [*data, *(w.replace("▁", " ").encode() for w in words), b"<eos>"]


CORES = {
    "byte-level": build_byte_level(),
    "sentencepiece": build_sentencepiece(strip=False),
    "sentencepiece-strip": build_sentencepiece(strip=True),
}
TOKENIZERS = {name: Tokenizer(core) for name, (core, _) in CORES.items()}

ids = st.lists(
    st.one_of(
        st.integers(0, 261),  # every byte and the first words
        st.integers(250, 263),  # mostly words and the special token
        st.sampled_from([*PIZZA, *"é中".encode(), 0x20, 0x41]),  # bytes that often fit together
    ),
    max_size=12,
)
