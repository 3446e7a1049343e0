"""Chat templates: what they can do, and what a hostile or broken one cannot."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from lmkit.errors import CheckpointError, RequestError
from lmkit.text import ChatTemplate, Tokenizer
from lmkit.text.template import MAX_TEMPLATE_CHARS, TemplateProcess
from tests.text.samples import TOKENIZERS, write_folder

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def limited() -> TemplateProcess:
    return TemplateProcess(cpu_seconds=0.2, memory=128 << 20)


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


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].function.arguments.a }}", "False1"),
        ("{{ messages[0].content is none }}{{ '' + messages[0].tool_calls[0].function.arguments }}", 'True{"a": 1}'),
        ("{{ messages[0].content.strip() }}{{ messages[0].tool_calls[0].function.arguments.a }}", "1"),
    ],
    ids=["objects", "DeepSeek", "Qwen3"],
)
def test_calls_are_written_as_the_template_wants_them(source: str, written: str) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == written


def test_messages_of_the_system_in_the_middle_are_the_users_where_a_template_refuses_them() -> None:
    loop = "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}"
    strict = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('not first') }}{% endfor %}" + loop
    said = [("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("system", "f")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert ChatTemplate(loop).render(messages) == "s(a)s(b)u(c)a(d)u(e)s(f)"
    assert ChatTemplate(strict).render(messages) == "s(a)u(b\n\nc)a(d)u(e\n\nf)"
    with pytest.raises(RequestError, match="no users"):
        ChatTemplate("{{ raise_exception('no users') }}").render(messages)


def test_a_template_that_does_not_know_developers_reads_the_system() -> None:
    messages = [{"role": "developer", "content": "a"}]
    assert ChatTemplate("{{ messages[0].role }}").render(messages) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}").render(messages) == "developer"


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


def test_templates_know_the_day() -> None:
    template = ChatTemplate("{% set date_string = date_string or 'old' %}{{ date_string }}")
    before, shown = f"{datetime.now():%d %b %Y}", template.render([])
    assert shown in (before, f"{datetime.now():%d %b %Y}")
    assert template.render([], variables={"date_string": "01 Jan 2000"}) == "01 Jan 2000"


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
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages | attr('__class__') | attr('mro') }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_errors_are_the_request_s_and_say_nothing_of_the_inside(source: str) -> None:
    with pytest.raises(RequestError) as error:
        ChatTemplate(source).render(CHAT)
    assert error.value.code == "invalid_request"
    assert error.value.param == "messages"
    for word in ("class", "subclasses", "passwd", "globals", "Error"):
        assert word not in error.value.message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ undefined_function() }}", "'undefined_function' is undefined"),
        ("{{ messages[0].description.text }}", "has no attribute 'description'"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_an_error_of_a_template_says_what_it_lacked(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        ChatTemplate(source).render(CHAT)
    assert error.value.code == "invalid_request"


def test_a_template_may_append_and_show_what_a_filter_gives_but_change_no_other_request() -> None:
    template = ChatTemplate("{% set _ = messages.append(1) %}{{ messages | length }}{{ [1, 2] | map('abs') | tojson }}")
    assert [template.render(CHAT) for _ in range(2)] == ["3[1, 2]"] * 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% for a in messages[0].content * 1000 %}{% for b in messages[0].content * 1000 %}{% endfor %}{% endfor %}",
        "{{ range(999999999) | list }}",
        "{{ messages[0].content * 999999999 }}",
        "{{ [messages] * 999999999 }}",
        "{{ messages[0].content | center(10 ** 11) }}",
        "{{ '%9999999999d' % (messages | length) }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}",
        "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_a_rendering_has_limits_of_time_and_memory(source: str, limited: TemplateProcess) -> None:
    template, messages = ChatTemplate(source, process=limited), [{"role": "user", "content": "x" * 1000}]
    with pytest.raises(RequestError, match="too much time or memory") as error:
        template.render(messages)
    assert (error.value.code, error.value.param) == ("invalid_request", "messages")
    assert ChatTemplate("{{ messages | length }}", process=limited).render(messages) == "1"


@pytest.mark.parametrize("source", ["{{ 'a' | center(10 ** 11) }}", "{{ 999999 ** 999999 }}"])
def test_compiling_has_the_same_limits(source: str, limited: TemplateProcess) -> None:
    """Jinja computes constant expressions when it compiles."""
    with pytest.raises(RequestError, match="too much time or memory"):
        ChatTemplate(source, process=limited).render(CHAT)


def test_a_killed_process_is_started_again() -> None:
    process = TemplateProcess()
    template = ChatTemplate("{{ messages | length }}", process=process)
    assert template.render(CHAT) == "2"
    (child,) = {each for each in psutil.Process().children() if each.pid == process.pid}
    child.kill()
    child.wait(10)
    assert template.render(CHAT) == "2"
    assert process.pid != child.pid


def test_the_process_ends_with_its_parent() -> None:
    ask = "from lmkit.text.template import *; SHARED.ask('', None); print(SHARED.pid, flush=True)"
    code = f"{ask}; os.kill(os.getpid(), 9)"
    child = int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_get_their_own_renderings() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    texts = [str(i) * 1000 for i in range(64)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: template.render([{"role": "user", "content": text}]), texts)) == texts


@pytest.mark.parametrize("source", ["{% if", "{{ x | no_such_filter }}", "{% include %}", "{% for %}"])
def test_a_template_that_does_not_compile_says_so(source: str, tmp_path: Path) -> None:
    (write_folder(tmp_path) / "chat_template.jinja").write_text(source)
    with pytest.raises(CheckpointError, match=r"chat template: does not compile: ."):
        Tokenizer.from_pretrained(tmp_path).check_template()
    with pytest.raises(RequestError, match=r"does not compile: ."):
        Tokenizer.from_pretrained(tmp_path).render_chat(CHAT)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "\ud800"}])
    with pytest.raises(RequestError, match="does not accept"):
        ChatTemplate("{{ '\\ud800' }}").render(CHAT)


def test_a_huge_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match="limit"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))
