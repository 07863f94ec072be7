"""Text to token ids and back, for tokenizers from a Hugging Face directory or a GGUF file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagedjax._gguf_vocab import read_gguf_tokenizer, set_bos_eos_template
from pagedjax.chat import ChatTemplate, Message, select_template
from pagedjax.detokenizer import IncrementalDetokenizer
from pagedjax.errors import TokenizerError
from pagedjax.token_bytes import TokenBytes

_MODEL_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_GENERATION_FILE = "generation_config.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """A tokenizer with what an engine needs around it: special tokens, chat templates, bytes.

    Args:
      core: the tokenizer proper.
      special_tokens: text of each special token by role ("bos_token", "eos_token", ...); chat
        templates see them under these names.
      eos_token_ids: every id that ends an answer.
      chat_templates: Jinja source by name; "default" is the one used without a name.

    Attributes:
      token_bytes: `token_bytes[id]` is the bytes that a token stands for.
      special_token_ids: ids that `skip_special_tokens` leaves out of decoded text.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ):
        # Fine-tuning settings that would cut or pad prompts without a word.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_templates = {
            name: ChatTemplate(source, name) for name, source in (chat_templates or {}).items()
        }
        self.token_bytes = TokenBytes(core)
        added = core.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Load a directory in Hugging Face layout; only tokenizer.json is required.

        Raises:
          TokenizerError: a file is missing or malformed, or names a token that the vocabulary does
            not have.
        """
        directory = Path(path)
        core = _load_core(directory / _MODEL_FILE)
        config = _read_json(directory / _CONFIG_FILE)
        special_tokens = {
            **_named_tokens(_read_json(directory / _SPECIAL_TOKENS_FILE)),
            **_named_tokens(config),
        }
        bos_id = _mark_special(core, special_tokens, "bos_token")
        eos_id = _mark_special(core, special_tokens, "eos_token")
        _apply_add_bos(core, bos_id, config.get("add_bos_token"))
        eos_ids = [] if eos_id is None else [eos_id]
        eos_ids += _generation_eos_ids(directory / _GENERATION_FILE)
        return cls(
            core,
            special_tokens=special_tokens,
            eos_token_ids=dict.fromkeys(eos_ids),
            chat_templates=_read_templates(directory, config),
        )

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """Build the tokenizer stored inside a GGUF file.

        A vocabulary of 262,144 tokens takes over a second: `save` it and load the directory next
        time.

        Raises:
          CheckpointError: the file is not GGUF, or truncated.
          TokenizerError: its tokenizer is missing, inconsistent, or of a kind not supported.
        """
        stored = read_gguf_tokenizer(path)
        return cls(
            stored.core,
            special_tokens=stored.special_tokens,
            eos_token_ids=stored.eos_token_ids,
            chat_templates=stored.chat_templates,
        )

    def save(self, directory: str | Path) -> None:
        """Write files from which `from_directory` gives an equal tokenizer.

        Other keys of a generation_config.json that is already there are kept.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._core.save(str(directory / _MODEL_FILE), pretty=False)
        config: dict[str, Any] = dict(self.special_tokens)
        if self.chat_templates:
            config["chat_template"] = _stored_templates(self.chat_templates.values())
        _write_json(directory / _CONFIG_FILE, config)
        generation = _read_json(directory / _GENERATION_FILE)
        generation["eos_token_id"] = list(self.eos_token_ids)
        _write_json(directory / _GENERATION_FILE, generation)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's output may be padded beyond it)."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the tokenizer has one."""
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self._core.token_to_id(bos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with what the tokenizer puts around a text (bos)."""
        try:
            return self._core.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise TokenizerError(
                f"cannot encode {text!r:.80} of type {type(text).__name__}: {error}; pass a str "
                "without lone surrogates"
            ) from error

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
    ) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        stream = self.detokenizer((), skip_special_tokens, spaces_between_special_tokens)
        return "".join([*map(stream.append, token_ids), stream.flush()])

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
    ) -> IncrementalDetokenizer:
        """Text of the tokens that come behind a prompt, one at a time.

        Args:
          skip_special_tokens: leave special tokens out.
          spaces_between_special_tokens: if they are not left out, put a space between each of them
            and the text next to it, and decode what stands between two of them by itself, as
            Transformers' Python tokenizers do. Otherwise the text is exactly that of the bytes.
        """
        special = self.special_token_ids
        return IncrementalDetokenizer(
            self.token_bytes,
            prompt_token_ids,
            skipped=special if skip_special_tokens else (),
            set_off=special if spaces_between_special_tokens else (),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        template_name: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt string for a conversation.

        It already holds every special token: encode it with `add_special_tokens=False`, or call
        `encode_chat`.

        Args:
          messages: mappings with "role" and "content".
          add_generation_prompt: end with the opening of the assistant's turn.
          template_name: which named template; by default "tool_use" if `tools` are given and
            there is one, else "default".
          variables: further names for the template, such as `tools`.

        Raises:
          TokenizerError: there is no such template, or it is malformed or fails.
        """
        variables = {"tools": None, "documents": None, **self.special_tokens, **variables}
        variables["add_generation_prompt"] = add_generation_prompt
        template = select_template(
            self.chat_templates, name=template_name, has_tools=bool(variables["tools"])
        )
        return template.render(messages, variables)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        template_name: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of the prompt that `apply_chat_template` gives, its bos not doubled."""
        prompt = self.apply_chat_template(
            messages, add_generation_prompt, template_name=template_name, **variables
        )
        return self.encode(prompt, add_special_tokens=False)


def _load_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path} does not exist; a tokenizer directory needs a {_MODEL_FILE} (other formats "
            "must be converted to it first)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions here
        raise TokenizerError(
            f"{path} is not a tokenizer that can be read: {error}; download or export it again"
        ) from error


def _mark_special(
    core: tokenizers.Tokenizer, special_tokens: Mapping[str, str], role: str
) -> int | None:
    """Make sure the token of this role is a special one; its id, or None without such a role."""
    text = special_tokens.get(role)
    if text is None:
        return None
    token_id = core.token_to_id(text)
    if token_id is None:
        raise TokenizerError(
            f"{role} is {text!r}, which is not among the {core.get_vocab_size()} tokens of "
            f"{_MODEL_FILE}; correct it in {_CONFIG_FILE} or {_SPECIAL_TOKENS_FILE}"
        )
    added = core.get_added_tokens_decoder().get(token_id)
    if added is None or not added.special:
        core.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    return token_id


def _apply_add_bos(core: tokenizers.Tokenizer, bos_id: int | None, wanted: bool | None) -> None:
    """Lets an explicit `add_bos_token` overrule what tokenizer.json puts before a text."""
    if wanted is None or bos_id is None:
        return
    around = core.encode("").ids
    if around[:1] == [bos_id] and not wanted:
        set_bos_eos_template(core, None, around[1] if len(around) > 1 else None)
    elif around[:1] != [bos_id] and wanted:
        set_bos_eos_template(core, bos_id, around[0] if around else None)


def _generation_eos_ids(path: Path) -> list[int]:
    eos = _read_json(path).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise TokenizerError(f"eos_token_id in {path} is {eos!r}; it must be an int or a list")
    return ids


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; the separate file is newer than the config and wins."""
    stored = config.get("chat_template") or {}
    try:
        if isinstance(stored, str):
            stored = {"default": stored}
        elif isinstance(stored, list):
            stored = {entry["name"]: entry["template"] for entry in stored}
        templates = {str(name): str(source) for name, source in stored.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise TokenizerError(
            f"chat_template in {directory / _CONFIG_FILE} is {stored!r:.80}; it must be a string "
            'or a list of {"name": ..., "template": ...}'
        ) from error
    file = directory / _TEMPLATE_FILE
    return {**templates, "default": file.read_text("utf-8")} if file.is_file() else templates


def _stored_templates(templates: Iterable[ChatTemplate]) -> str | list[dict[str, str]]:
    """Chat templates as tokenizer_config.json holds them: a lone default one is a string."""
    stored = [{"name": template.name, "template": template.source} for template in templates]
    names = [entry["name"] for entry in stored]
    return stored[0]["template"] if names == ["default"] else stored


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The "..._token" entries of a config whose value is a token: a string or its description."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a JSON {type(content).__name__}; it must be an object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", "utf-8")
