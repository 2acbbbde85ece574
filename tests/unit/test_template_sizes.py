"""What a chat template would make is measured first: everything known that amplifies, and what fits as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text import template
from slipstream.engine.text.tokenizer import Tokenizer
from tests.checkpoints import write_tokenizer
from tests.unit.test_text_chat import made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


NEST = "{% set n = namespace(s=['a']) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}"


@pytest.mark.parametrize(
    "expression",
    [
        "k.replace('a', k)",
        "k.replace('', k)",
        "k.replace('a', k, 500)",
        "k.replace('a', k, count=500) if false else k.encode().replace(b, k.encode())",
        "k|replace('a', k)",
        "k|replace('a', k, count=500)",
        "k.join(k)",
        "k.join(k|list|map('upper'))",
        "k.encode().join([b] * 1000)",
        "k|join(k)",
        "range(1000)|join(k)",
        "k|map('upper')|join(d=k)",
        "messages|map(attribute='role')|map('replace', 'u', k * 99)|list|first|replace('a', k)",
        "('{0}' * 1000).format(k)",
        "('{k}' * 1000).format(k=k)",
        "('{k}' * 1000).format_map({'k': k})",
        "('{0}' * 1000)|safe|attr('format')",
        "('{0:{1}}').format(1, '9000000')",
        "('{0:>{w}}').format(1, w=9000000)",
        "'{0:9000000}'.format(1)",
        "('%s' * 1000) % ((k,) * 1000)",
        "('%(k)s' * 1000) % {'k': k}",
        "'%*d' % (9000000, 1)",
        "'%.9000000f' % 1",
        "'%9000000d%9000000d' % (1, 1)",
        "('%(k)s' * 1000)|format(k=k)",
        "k.center(9000000)",
        "k.rjust(9000000)",
        "k.zfill(9000000)",
        "('\t' * 1000).expandtabs(1000)",
        "('\t' * 1000).expandtabs(tabsize=1000)",
        "k.translate({97: k})",
        "k.encode() * 1000",
        "b * 9000000",
        "('a\n' * 1000)|indent(k)",
        "('a\n' * 1000)|indent(1000)",
        "('a ' * 1000)|wordwrap(1, wrapstring=k)",
        "([1] * 1000)|tojson(indent=1000)",
        "([1] * 1000)|tojson(separators=(k, k))",
        "('www.a.de ' * 1000)|urlize(target=k)",
        "k|slice(9000000)|list",
        "k|batch(9000000, 'a')|list",
        "(9).to_bytes(9000000, 'big')",
        "(9).to_bytes(length=9000000, byteorder='big')",
        "n.s",
        "n.s|string",
        "{'a': n.s}.items()",
        "[{'a': 1}.items(), {'a': n.s}.items()]",
        "{'a': n.s}.values()",
        "n",
        "n.s|tojson",
        "n.s|pprint",
        "n.s|join",
        "n.s|list|join",
        "[n.s]|map('string')|list",
        "'%s' % (n.s,)",
        "'%s' % {'a': n.s}",
        "'{}'.format(n.s)",
        "'{!r}'.format(n.s)",
        "n.s ~ ''",
        "{'a': n.s}",
        "n.s == t.s",
        "n.s in [t.s]",
        "[n.s, t.s]|sort",
        "[n.s, t.s]|max",
        "f()",
        "g",
    ],
)
def test_what_a_template_makes_is_counted_before_it_is_made(
    expression: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By methods, filters, formats, shared parts of lists, macros: each would make a million characters or more."""
    monkeypatch.setattr(template, "N_CHARS_MAX", 100_000)
    long = "{% set k = 'a' * 1000 %}{% set b = 'a'.encode() %}"
    twice = NEST + NEST.replace("set n =", "set t =").replace("n.s", "t.s")
    macro = "{% macro f() %}{% for i in range(1000) %}{{ k }}{% endfor %}{% endmacro %}"
    block = (
        "{% set g %}{% for i in range(1000) %}{{ k }}{% endfor %}{% endset %}" if expression == "g" else ""
    )
    if "attr('format')" in expression:
        expression = f"({expression})(k)"
    source = f"{long}{twice}{macro}{block}{{% set x = {expression} %}}{{{{ x }}}}"
    with pytest.raises(InvalidRequest, match="it makes a value of more than"):
        made(source, tokenizer).render(Chat([{"role": "user", "content": "x"}]))


def test_what_fits_is_made(tokenizer: Tokenizer) -> None:
    """The same ways to write, in the sizes of real templates."""
    source = (
        "{{ 'aXa'.replace('X', 'yy') }} {{ 'aXa'|replace('X', 'y', 1) }} {{ ', '.join(['a', 'b']) }}"
        " {{ [1, [2, 'x']]|join('-') }} {{ 'abc'|map('upper')|join(',') }} {{ '{}-{:>4}'.format('a', 7) }}"
        " {{ '%s=%5.1f%%' % ('a', 2) }} {{ '%(a)s'|format(a=3) }} {{ 'a\tb'.expandtabs(4) }}"
        " {{ 'a\nb'|indent(2) }} {{ 'aa bb'|wordwrap(2) }} {{ {'a': [1, none]}|tojson(indent=1) }}"
        " {{ [3, 1]|sort }} {{ 'abcd'|batch(3, '-')|list }} {{ 'abc'.translate({97: 'A'}) }} {{ [1] == [1] }}"
        " {{ 'x'.encode() }} {{ 'a' in ['a'] }} {{ namespace(last=10**12).last }} {{ '=' * 3 ~ [1] }}"
        " {{ messages[0] }}{% for a in 'ab' %}{% set b = a.replace('a', 'x') %}{{ b.replace('b', 'y') }}{% endfor %}"
    )
    expected = (
        "ayya aya a, b 1-[2, 'x'] A,B,C a-   7 a=  2.0% 3 a   b a\n  b aa\nbb {\n \"a\": [\n  1,\n  null\n ]\n}"
        " [1, 3] [['a', 'b', 'c'], ['d', '-', '-']] Abc True b'x' True 1000000000000 ===[1]"
        " {'role': 'user', 'content': 'x'}xy"
    )
    assert made(source, tokenizer).render(Chat([{"role": "user", "content": "x"}])) == expected
