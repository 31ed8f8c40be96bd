"""Chat templates that loop, grow, recurse or reach out: each ends in one error within about a second, and rendering goes on."""

from __future__ import annotations

import time

import pytest
from paddock_runner.errors import PaddockError, UnsupportedError
from paddock_runner.text.template import ChatTemplate

GOOD = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
HELLO = [{"role": "user", "content": "hello"}]
LOOPS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loop whose filter is false": "{% for a in range(99999) %}{% for b in range(99999) if b == 'x' %}{% endfor %}{% endfor %}",
    "filters over ranges": "{% for a in range(99999) %}{% set x = range(99999)|map('string')|list %}{% endfor %}",
    "macro that calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macro that calls itself twice": "{% macro m(n) %}{% if n < 60 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}",
    "recursive loop": "{% set l = [[[]]] %}{% for x in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
    "large range": "{% for a in range(10 ** 12) %}{% endfor %}",
}
GROWTH = {
    "doubling by plus": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by tilde": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by capture": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
    "doubling by macro": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = d(n.s) %}{% endfor %}",
    "doubling by join": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = [n.s, n.s]|join %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = n.s.replace('a', 'aa') %}{% endfor %}",
    "doubling by replace filter": "{% set n = namespace(s='aa') %}{% for a in range(99) %}{% set n.s = n.s|replace('a', 'aa') %}{% endfor %}",
    "doubling by format": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "doubling by str.format": "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list by sum": "{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = [n.s, n.s]|sum(start=[]) %}{% endfor %}",
    "times": "{{ 'x' * 10000000000 }}",
    "list times": "{{ [1] * 1000000000 }}",
    "power": "{{ 10 ** 1000000000 }}",
    "squares": "{% set n = namespace(s=3) %}{% for a in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}{{ n.s }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "nested format width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "indent": "{{ 'x\ny'|indent(1000000000) }}",
    "json indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "long output": "{% set s = 'x' * 1000000 %}{% for a in range(999) %}{{ s }}{% endfor %}",
}
NEST = "{% set n = namespace(l=['x'], m=['x']) %}{% for a in range(60) %}{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}{% endfor %}"
NESTED = {
    "printed": NEST + "{{ n.l }}",
    "as JSON": NEST + "{{ n.l|tojson }}",
    "as string": NEST + "{% set s = n.l|string %}",
    "joined": NEST + "{% set s = [n.l]|join %}",
    "compared": NEST + "{% if n.l == n.m %}{% endif %}",
    "compared by a test": NEST + "{% if n.l is eq(n.m) %}{% endif %}",
    "searched": NEST + "{% if n.l in [n.m] %}{% endif %}",
    "sorted": NEST + "{% set s = [n.l, n.m]|sort %}",
    "concatenated": NEST + "{% set s = n.l ~ '' %}",
    "formatted": NEST + "{% set s = '%s' % (n.l,) %}",
    "formatted by method": NEST + "{% set s = '{}'.format(n.l) %}",
    "used as key": NEST.replace("[", "(").replace("]", ")").replace("('x')", "('x',)") + "{% set s = {n.l: 1} %}",
}
REACHES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "format string": "{{ '{0.__class__}'.format(messages) }}",
    "changing the messages": "{{ messages.append(1) }}",
}
BROKEN = {
    "syntax": "{% for m in messages %}",
    "unknown filter": "{{ messages|explode }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too large": "x" * 300_000,
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}


def _cases(table: dict[str, str]) -> list[object]:
    return [pytest.param(source, id=name) for name, source in table.items()]


@pytest.mark.parametrize("source", _cases({**LOOPS, **GROWTH, **NESTED}))
def test_a_template_without_bounds_is_stopped_within_about_a_second(source: str) -> None:
    template = ChatTemplate(source)
    before = time.thread_time()
    with pytest.raises(UnsupportedError, match="chat template cannot be used"):
        template.render([{"role": "user", "content": "hello"}])
    assert time.thread_time() - before < 3.0
    assert GOOD.render(HELLO) == "[user] hello\n"


@pytest.mark.parametrize("source", _cases(REACHES))
def test_a_template_that_reaches_out_is_refused(source: str) -> None:
    with pytest.raises(PaddockError):
        text = ChatTemplate(source).render(HELLO)
        assert "class" not in text and "root:" not in text
        raise UnsupportedError("it printed nothing")
    assert HELLO == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("source", _cases(BROKEN))
def test_a_broken_template_is_one_error_when_a_chat_comes_and_not_before(source: str) -> None:
    template = ChatTemplate(source)
    assert not template.exists
    with pytest.raises(UnsupportedError, match="chat template cannot be used"):
        template.render(HELLO)


def test_a_long_honest_conversation_is_within_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 10_000
    text = GOOD.render(messages)
    assert len(text) == 10_000 * (len("[user] ") + 1000 + 1)


def test_ordinary_text_with_percent_signs_years_and_braces_is_not_refused() -> None:
    source = "{{ '100% of 2024: %s' % ('x',) if false else '%s in 2024' % 'x' }}{{ 'Year 2024: {}'.format(1) }}{{ 'a'|default(131072) }}"
    assert ChatTemplate(source).render(HELLO) == "x in 2024Year 2024: 1a"
