"""Chat templates: what they can do, and what a hostile or broken one cannot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lmkit.errors import CheckpointError, RequestError
from lmkit.text import ChatTemplate, Tokenizer
from lmkit.text import template as template_module
from tests.text.samples import TOKENIZERS, write_folder

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return TOKENIZERS["demo"]


def test_demo_template_renders_as_jinja_with_trimmed_blocks(demo: Tokenizer) -> None:
    assert demo.chat_template is not None
    assert demo.chat_template.render(CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.chat_template.render(CHAT, add_generation_prompt=False).endswith("<|im_end|>\n")
    assert demo.encode_chat(CHAT)[:1] == [1]


def test_bos_is_not_doubled() -> None:
    llama = TOKENIZERS["llama"]
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    tokenizer = Tokenizer(llama.backend, named_tokens={"bos_token": "<s>"}, chat_template=template)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1


def test_no_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        TOKENIZERS["llama"].encode_chat(CHAT)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": "one"}, "one"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]}, "two"),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, config: dict, expected: str) -> None:
    folder = write_folder(tmp_path, tokenizer_config=config)
    template = Tokenizer.from_pretrained(folder).chat_template
    assert template is not None
    assert template.render([]) == expected
    (tmp_path / "chat_template.jinja").write_text("file wins")
    template = Tokenizer.from_pretrained(folder).chat_template
    assert template is not None
    assert template.render([]) == "file wins"


def test_what_templates_use() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}"
        "{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{% generation %}{{ m | tojson }}{% endgeneration %}{%- endfor -%}"
        "{{ ns.n }} {{ strftime_now('%Y')[:2] }} {{ 'ab' * 2 }} {{ 2 ** 3 }} {{ range(3) | list }}"
        "{{ ' think' if enable_thinking is defined and enable_thinking }}"
    )
    template = ChatTemplate(source)
    assert template.parameters == {"enable_thinking"}
    rendered = template.render(CHAT, variables={"enable_thinking": True})
    assert rendered == '{"role": "user", "content": "Hi <b>"}1 20 abab 8 [0, 1, 2] think'


def test_only_variables_of_the_template_are_accepted(demo: Tokenizer) -> None:
    assert demo.chat_template is not None
    for name in ("tokenize", "return_dict", "messages", "self", "tools", "bos_token", "raise_exception"):
        with pytest.raises(RequestError, match=name) as error:
            demo.chat_template.render(CHAT, variables={name: "x"})
        assert error.value.code == "unknown_parameter"


def test_raise_exception_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as error:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(CHAT)
    assert error.value.code == "invalid_request"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ undefined_function() }}",
        "{{ 1 / 0 }}",
        "{{ messages | attr('__class__') | attr('mro') }}",
        "{{ '%d' % 'x' }}",
        "{{ messages + 1 }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_errors_are_the_request_s_and_say_nothing_of_the_inside(source: str) -> None:
    with pytest.raises(RequestError) as error:
        ChatTemplate(source).render(CHAT)
    assert error.value.code == "invalid_request"
    assert error.value.param == "messages"
    for word in ("class", "subclasses", "passwd", "Error", "zero", "undefined"):
        assert word not in error.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(999999999) | list }}",
        "{{ 'a' * 999999999 }}",
        "{{ [0] * 999999999 }}",
        "{{ 999999 ** 999999 }}",
        "{% for a in messages[0].content * 1000 %}{{ messages[0].content * 10 }}{% endfor %}",
        "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_templates_run_on_a_budget(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDER_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(RequestError, match="too long"):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}])
    assert time.monotonic() - start < 5


def test_a_huge_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match="limit"):
        ChatTemplate("x" * (template_module.MAX_TEMPLATE_CHARS + 1))
