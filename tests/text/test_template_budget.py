"""Chat templates that take all they can get: a budget ends them, and ordinary ones do not notice it."""

import time
import tracemalloc

import pytest

from quire.core.errors import BadRequest
from quire.text.chat.chat_template import MAX_SOURCE, ChatTemplate
from quire.text.chat.render_budget import RenderBudget, RenderTooLong, render_budget

MESSAGES = [{"role": "user", "content": "Hello"}]
SMALL_BUDGET = {"seconds": 0.05, "characters": 1 << 22}

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|map('string')|join|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% set ns = namespace(n=7) %}{% for a in range(99999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ 9 ** 999999999 }}",
    "{{ 1.5|round(999999999) }}{{ 15|round(-999999999) }}",
]

LONG = [
    "{{ 'a' * 99999999999 }}",
    "{{ 99999999999 * 'a' }}",
    "{{ [0] * 99999999999 }}",
    "{{ 'a'|center(99999999999) }}",
    "{{ 'a'.center(99999999999) }}",
    "{{ 'a'.ljust(width) }}",
    "{{ 'a'.zfill(99999999999) }}",
    "{{ '\\t'.expandtabs(99999999999) }}",
    "{{ ('a\\n' * 99999)|indent(99999) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{{ '%99999999999d'|format(1) }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 99999999999) }}",
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "{{ range(99999)|join('a' * 99999) }}",
    "{{ range(9)|batch(99999999999, 'a')|list }}",
    "{{ messages|tojson(indent=99999999999) }}",
    "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{% set x %}{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}{{ x|length }}",
    "{% set ns = namespace(s='a') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[]) %}{% for a in range(9999) %}{% set ns.s = ns.s + ['a' * 99999] %}{% endfor %}",
    "{{ lipsum(99999) }}",
]


@pytest.mark.parametrize("source", [*ENDLESS, *LONG])
def test_a_hostile_template_ends_soon_and_stays_small(source: str) -> None:
    begin = time.thread_time()
    render_hostile(source)
    assert time.thread_time() - begin < 1.0
    tracemalloc.start()  # which makes it slower
    try:
        render_hostile(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


def render_hostile(source: str) -> None:
    with render_budget(RenderBudget(**SMALL_BUDGET)), pytest.raises(BadRequest):
        ChatTemplate(source).render(MESSAGES, width=99999999999)


def test_the_budget_says_what_it_was() -> None:
    with render_budget(RenderBudget(0.01)), pytest.raises(RenderTooLong, match=r"takes more than 0.01 s"):
        ChatTemplate(ENDLESS[0]).render(MESSAGES)
    with render_budget(RenderBudget(characters=1000)), pytest.raises(RenderTooLong, match="more than 1000 characters"):
        ChatTemplate("{{ 'a' * 1001 }}").render(MESSAGES)


def test_operations_of_ordinary_templates_work_as_before() -> None:
    source = (
        "{% macro shown(m) %}[{{ m.role|upper }}]{{ m['content'] ~ '!' ~ 1 }}{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ shown(m) }}{% endfor %}"
        "{{ '%s-%05.1f' % ('x', 2.5) }}{{ '{0} {a:>4}'.format(1, a=2) }}{{ 3 * 'ab' + 'c' }}{{ 2 ** 10 * 3 + 1 }}"
        "{{ messages|map(attribute='role')|join(',') }}{{ [3, 1, 2]|sort|join }}{{ 'a-b'.split('-')|join('+') }}"
        "{{ 'x'.join(['1', '2']) }}{{ {'a': [1]}|tojson(indent=2) }}{{ 'a\\nb'|indent(2) }}{{ 'abc'.replace('b', '') }}"
        "{% set ns = namespace(last=0) %}{% for n in range(3) %}{% set ns.last = n %}{% endfor %}{{ ns.last }}"
    )
    text = ChatTemplate(source).render([{"role": "system", "content": "s"}, *MESSAGES])
    assert text == ('1[USER]Hello!1x-002.51    2abababc3073system,user123a+b1x2{\n  "a": [\n    1\n  ]\n}a\n  bac2')


def test_a_long_conversation_is_within_the_budget() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content|trim + '<|im_end|>\\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(ChatTemplate(source).render(messages)) > 2_000_000


def test_variables_of_a_template_may_have_any_name() -> None:
    assert ChatTemplate("{{ self.x }}{{ template }}").render(MESSAGES, template=1, context=2, source=3) == "1"
    with pytest.raises(BadRequest, match="`messages`"):
        ChatTemplate("x").render(MESSAGES, messages=[])


def test_a_template_of_a_megabyte_is_refused() -> None:
    with pytest.raises(BadRequest, match="1048576 characters"):
        ChatTemplate("x" * (1 << 20))
    assert MAX_SOURCE < 1 << 20
