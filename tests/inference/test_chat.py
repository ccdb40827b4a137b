"""Chat formats: built-in ones, a checkpoint's template, and templates that mean harm."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil  # type: ignore[import-untyped]
import pytest

from jaxrl_sync.inference.chat import ChatError, ChatMLFormat, PlainFormat, TemplateFormat, chat_format
from jaxrl_sync.inference.tokenizer import CharTokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2+2?"},
]
PUBLISHED_STYLE = """{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- raise_exception('no tools here') }}
    {%- endif %}
    {{- '<s>' + message.role + ': ' + (message.content | trim) + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<s>assistant:' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- ' quick' }}
    {%- endif %}
{%- endif %}"""


def test_chatml_is_the_format_of_models_without_a_template() -> None:
    form = chat_format(CharTokenizer())
    assert isinstance(form, ChatMLFormat)
    assert form.render(TALK, {}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert form.stop == ("<|im_end|>",)


def test_small_alphabets_get_the_plain_format() -> None:
    assert chat_format(CharTokenizer("0123456789+=")) == PlainFormat("")
    assert chat_format(CharTokenizer("01 ")).render([{"content": "0"}, {"content": "1"}], {}) == "0 1"


def test_template_of_a_checkpoint() -> None:
    form = TemplateFormat(PUBLISHED_STYLE, {"eos_token": "</s>"})
    try:
        expected = (
            "<s>system: Be brief.</s><s>user: Hi</s><s>assistant: Hello</s><s>user: 2+2?</s><s>assistant:"
        )
        assert form.render(TALK, {}) == expected
        assert form.render(TALK, {"enable_thinking": False}) == expected + " quick"
        with pytest.raises(ChatError, match="no tools here"):
            form.render([{"role": "tool", "content": "x"}], {})
        assert form.render(TALK, {}) == expected
    finally:
        form.close()


def test_template_has_the_filters_of_published_ones() -> None:
    loop = "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    source = "{{ {'b': '<é>'} | tojson }}" + loop
    form = TemplateFormat(source, {})
    try:
        assert form.render(TALK, {}) == '{"b": "<é>"}1'
    finally:
        form.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 7 ** (7 ** 10) }}",
    ],
)
def test_template_that_never_ends_fails_its_request_only(source: str) -> None:
    form = TemplateFormat(source, {}, deadline_s=1.0)
    begun = time.monotonic()
    with pytest.raises(ChatError, match="no answer within 1 s"):
        form.render(TALK, {})
    assert time.monotonic() - begun < 20
    assert form._child is None
    form.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'x' * 3000000000 }}", "MemoryError"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "MemoryError",
        ),
        ("{% for i in range(2000) %}{{ 'x' * 10000 }}{% endfor %}", "over 16777216 bytes"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{{ ''.join(cycler.__init__.__globals__.os.popen('id').read()) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for %}", "does not compile"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_hostile_templates_get_nothing(source: str, words: str) -> None:
    form = TemplateFormat(source, {}, deadline_s=60.0)
    try:
        with pytest.raises(ChatError) as caught:
            form.render(TALK, {})
        assert words in str(caught.value)
    finally:
        form.close()


def test_rendering_process_ends_with_its_parent() -> None:
    code = (
        "import time; from jaxrl_sync.inference.chat import TemplateFormat; form = TemplateFormat('x', {}); "
        "form.render([], {}); print(form._child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=20)
    assert not child.is_running()


def test_oversized_template_is_refused() -> None:
    with pytest.raises(ChatError, match="at most 1048576"):
        TemplateFormat("x" * (1 << 21), {})
