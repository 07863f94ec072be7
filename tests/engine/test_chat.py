"""Chat templates render as published templates expect, in a sandbox, with typed errors."""

import re
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from pagedjax.chat import ChatTemplate, select_template
from pagedjax.errors import TokenizerError
from pagedjax.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]

# In the manner of Gemma's: roles alternate, a system message is folded into the user's turn.
TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate user/assistant') }}
    {%- endif -%}
    {{ '<t>' + message['role'] + '\\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim }}{{ '</t>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<t>assistant\\n' }}
{%- endif -%}
"""


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, variables)


def chat_tokenizer(**templates: str) -> Tokenizer:
    """A tokenizer over a few characters that puts "<s>" before every text."""
    letters = "Hi <>/trueasonm"
    vocab = {"<s>": 0} | {letter: i + 1 for i, letter in enumerate(dict.fromkeys(letters))}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    return Tokenizer(core, special_tokens={"bos_token": "<s>"}, chat_templates=templates)


def test_conversation_renders_turn_by_turn():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<s><t>user\nBe brief.\n\nHi</t>\n<t>assistant\nHello</t>\n<t>user\nBye</t>\n<t>assistant\n"
    )
    assert render(TURNS, messages, bos_token="<s>", add_generation_prompt=True) == expected


def test_blocks_leave_no_blank_lines_or_indent():
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "Hi\n"


def test_tojson_keeps_unicode_and_html_characters():
    assert render("{{ x | tojson }}", x={"b": "<é>", "a": 1}) == '{"b": "<é>", "a": 1}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"


def test_loop_controls_dates_and_generation_blocks_work():
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert int(render("{{ strftime_now('%Y') }}")) - datetime.now().year in (-1, 0)
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


@pytest.mark.parametrize(
    "trick",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ''['__cla' + 'ss__'].__name__ }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'system'}) %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_sandbox_refuses_tricks(trick: str):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(TokenizerError, match="'default' failed"):
        render(trick, messages)
    assert messages == USER


def test_template_that_raises_names_its_reason():
    with pytest.raises(TokenizerError, match="failed: TemplateError: roles must alternate"):
        render(TURNS, [*USER, *USER], bos_token="")
    with pytest.raises(TokenizerError, match="failed: ZeroDivisionError"):
        render("{{ 1 // 0 }}")
    with pytest.raises(TokenizerError, match=r"failed: UndefinedError: .*nothing"):
        render("{{ nothing.at_all }}")


def test_malformed_template_names_the_line():
    with pytest.raises(TokenizerError, match=r"does not compile: .*\(line 2\)"):
        render("fine\n{% if %}")


def test_malformed_template_does_not_stop_plain_prompts():
    tokenizer = chat_tokenizer(default="{% if %}")
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages is a str; pass a list"),
        ({"role": "user"}, "messages is a dict; pass a list"),
        (["Hi"], "message 0 is 'Hi'"),
        ([*USER, {"content": "Hi"}], 'message 1 is .* a mapping with a "role"'),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str):
    with pytest.raises(TokenizerError, match=message):
        render("{{ messages }}", messages)


def test_missing_template_says_what_to_do():
    with pytest.raises(TokenizerError, match="has no chat template"):
        chat_tokenizer().apply_chat_template(USER)


def test_templates_are_chosen_by_name_or_by_tools():
    templates = {name: ChatTemplate(name, name) for name in ("default", "tool_use", "rag")}
    assert select_template(templates).name == "default"
    assert select_template(templates, has_tools=True).name == "tool_use"
    assert select_template(templates, name="rag", has_tools=True).name == "rag"
    with pytest.raises(
        TokenizerError, match=re.escape("'x'; this tokenizer has ['default', 'rag'")
    ):
        select_template(templates, name="x")
    only_rag = {"rag": templates["rag"]}
    with pytest.raises(TokenizerError, match="no chat template is called 'default'"):
        select_template(only_rag)


def test_tokenizer_passes_its_tokens_and_the_callers_variables():
    tokenizer = chat_tokenizer(
        default="{{ bos_token }}|{{ tools is none }}|{{ add_generation_prompt }}|{{ thinking }}",
        tool_use="{{ tools | length }}",
    )
    assert tokenizer.apply_chat_template(USER, thinking=3) == "<s>|True|True|3"
    assert tokenizer.apply_chat_template(USER, False) == "<s>|True|False|"
    assert tokenizer.apply_chat_template(USER, tools=[{}, {}]) == "2"


def test_encoded_chat_has_one_bos():
    tokenizer = chat_tokenizer(default=TURNS.replace("\\n", " "))
    ids = tokenizer.encode_chat(USER)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "<t>user Hi</t> <t>assistant "
    assert len(tokenizer.encode_chat(USER, add_generation_prompt=False)) < len(ids)
