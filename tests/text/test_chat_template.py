"""Chat templates render as they do in `transformers`."""

from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.text.chat.chat_template import ChatTemplate

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}
    {%- endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' -}}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + ns.system }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles have to alternate') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
"""

TALK = [
    {"role": "user", "content": "Hi <b>& 'you'</b>"},
    {"role": "assistant", "content": "  Hello ☃  "},
    {"role": "user", "content": "More"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template([messages], chat_template=source, bos_token="<s>", eos_token="</s>", **options)
    return text


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_as_transformers(source: str, add_generation_prompt: bool) -> None:
    ours = ChatTemplate(source, "<s>", "</s>")
    assert ours.render(TALK, add_generation_prompt) == theirs(source, TALK, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
def test_a_message_is_continued_as_transformers_does(source: str) -> None:
    ours = ChatTemplate(source, "<s>", "</s>").render(TALK[:2], False, continue_final_message=True)
    assert ours == theirs(source, TALK[:2], continue_final_message=True)
    assert ours.rstrip().endswith("Hello ☃")


def test_tools_and_loop_controls() -> None:
    talk = [{"role": "system", "content": " Be "}, {"role": "skip", "content": ""}, *TALK]
    assert ChatTemplate(LLAMA3, "<s>", "</s>").render(talk, tools=TOOLS) == theirs(
        LLAMA3, talk, tools=TOOLS, add_generation_prompt=True
    )


def test_variables_are_passed_on() -> None:
    template = ChatTemplate("{{ mood }}{{ strftime_now('%Y') | length }}{{ bos_token }}|")
    assert template.render(TALK, mood="good") == "good4|"
    with pytest.raises(BadRequest, match="which the server sets"):
        template.render(TALK, bos_token="x")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (MISTRAL, "roles have to alternate"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{% if %}", "does not compile"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_an_exception_of_a_template_is_a_bad_request(source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as error:
        ChatTemplate(source).render([{"role": "assistant", "content": "x"}])
    assert error.value.param == "messages"


def test_a_message_that_is_not_rendered_cannot_be_continued() -> None:
    with pytest.raises(BadRequest, match="does not show"):
        ChatTemplate("nothing").render(TALK, False, continue_final_message=True)
    with pytest.raises(BadRequest, match="both true"):
        ChatTemplate(CHATML).render(TALK, True, continue_final_message=True)


def test_messages_are_not_changed() -> None:
    talk = [dict(message) for message in TALK]
    ChatTemplate(CHATML).render(talk, False, continue_final_message=True)
    assert talk == TALK


def test_importing_it_does_not_import_jinja() -> None:
    import subprocess
    import sys

    check = "import sys, quire.text.chat.chat_template; assert 'jinja2' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
