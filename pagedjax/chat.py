"""Chat templates: from a list of messages to the prompt string a model was trained on.

A template is a Jinja program that came with somebody's checkpoint, so it runs in Jinja's immutable
sandbox: it can read what it is given and nothing else. The environment (options, filters, globals)
is the one that published templates are written for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedjax.errors import TokenizerError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """One named Jinja chat template, compiled on first use.

    Compiling late lets a tokenizer with a broken template still serve plain prompts.
    """

    source: str
    name: str = "default"

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The prompt string for `messages`.

        Args:
          messages: mappings with at least a `role`.
          variables: every other name the template may use (`add_generation_prompt`, `tools`,
            `bos_token`, ...).

        Raises:
          TokenizerError: a message is malformed, the template does not compile, or it fails while
            it runs (which includes `raise_exception` and whatever the sandbox refuses).
        """
        _check_messages(messages)
        template = self._compiled
        try:
            return template.render({**variables, "messages": messages})
        except Exception as error:  # a template is a program: it can fail in any way a program can
            raise TokenizerError(
                f"chat template {self.name!r} failed: {type(error).__name__}: {error}; "
                "check the messages and variables against what this template expects"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"chat template {self.name!r} does not compile: {error.message} "
                f"(line {error.lineno}); fix the template that came with the tokenizer"
            ) from error


def select_template(
    templates: Mapping[str, ChatTemplate], *, name: str | None = None, has_tools: bool = False
) -> ChatTemplate:
    """The template called `name`; without a name, "tool_use" if it fits, else "default".

    Raises:
      TokenizerError: there is no such template.
    """
    if name is None:
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name in templates:
        return templates[name]
    if not templates:
        raise TokenizerError(
            "this tokenizer has no chat template (a base model?); pass a plain prompt, "
            "or add a chat_template.jinja file beside its tokenizer.json"
        )
    raise TokenizerError(
        f"no chat template is called {name!r}; this tokenizer has {sorted(templates)}"
    )


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"messages is a {type(messages).__name__}; pass a list of "
            '{"role": ..., "content": ...} mappings'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TokenizerError(
                f'message {i} is {message!r:.80}; each must be a mapping with a "role"'
            )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on: here just its body."""

    tags = {"generation"}  # noqa: RUF012 (how Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would put \u003c into prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
