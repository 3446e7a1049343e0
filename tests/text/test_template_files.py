"""Which chat template is used: of several files and names, with tools and without, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointWriter
from lmkit.text import ChatTemplate, Tokenizer
from lmkit.text.chat.conversation import ChatMessage, Tool
from lmkit.text.chat.style import Style
from tests.text.samples import write_folder

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
BOTH = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools | tojson }}"}]
ONE, TWO = "one{{ tools | length if tools }}", "two{{ tools | length if tools }}"

PLACES: dict[str, dict[str, Any]] = {
    "one text": {"tokenizer_config.json": {"chat_template": ONE}},
    "a list": {"tokenizer_config.json": {"chat_template": BOTH}},
    "a file": {"chat_template.jinja": ONE},
    "a file before one text": {"chat_template.jinja": ONE, "tokenizer_config.json": {"chat_template": TWO}},
    "a file before a list": {"chat_template.jinja": ONE, "tokenizer_config.json": {"chat_template": BOTH}},
    "a folder": {"chat_template.jinja": ONE, "additional_chat_templates/tool_use.jinja": TWO},
    "a folder before a list": {
        "chat_template.jinja": ONE,
        "additional_chat_templates/tool_use.jinja": TWO,
        "tokenizer_config.json": {"chat_template": BOTH},
    },
    "another name": {"chat_template.jinja": ONE, "additional_chat_templates/rag.jinja": TWO},
}


def written(path: Path, files: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.pop("tokenizer_config.json", {})
    folder = write_folder(path, tokenizer_config=config)
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("files", PLACES.values(), ids=PLACES.keys())
def test_the_template_is_that_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = written(tmp_path, dict(files))
    theirs, own = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        right = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert own.render_chat(CHAT, tools=tools or ()) == right


def test_the_older_file_of_models_that_see_images(tmp_path: Path) -> None:
    files = {"chat_template.json": {"chat_template": ONE}}
    assert Tokenizer.from_pretrained(written(tmp_path, dict(files))).render_chat(CHAT) == "one"
    files["tokenizer_config.json"] = {"chat_template": TWO}
    assert Tokenizer.from_pretrained(written(tmp_path, dict(files))).render_chat(CHAT) == "two"
    files["preprocessor_config.json"] = {}
    assert Tokenizer.from_pretrained(written(tmp_path, dict(files))).render_chat(CHAT) == "one"


def test_a_template_by_its_name(tmp_path: Path) -> None:
    folder = written(tmp_path, dict(PLACES["another name"]))
    assert Tokenizer.from_pretrained(folder, "rag").render_chat(CHAT) == "two"


def test_a_list_without_texts_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, {"tokenizer_config.json": {"chat_template": [{"name": "default"}]}})
    with pytest.raises(CheckpointError, match="list of named texts"):
        Tokenizer.from_pretrained(folder)


def test_the_server_s_prompt_with_tools(tmp_path: Path) -> None:
    """The dialect is that of the template for tools. Calls of the past stand there, too, without tools to call."""
    tool_use = "<tools>{{ tools | tojson }}</tools><tool_call>"
    listed = [{"name": "default", "template": "{{ messages[-1].content }}"}, {"name": "tool_use", "template": tool_use}]
    folder = written(tmp_path, {"tokenizer_config.json": {"chat_template": listed}})
    style = Style(Tokenizer.from_pretrained(folder))
    assert style.dialect is not None
    assert style.dialect.name == "hermes"
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    assert style.write([ChatMessage(role="user", content="hi")], tools).startswith('<tools>[{"type": "function"')
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "<tool_call>" in style.write([ChatMessage.model_validate(message) for message in talk])


def test_named_templates_are_copied(tmp_path: Path) -> None:
    source = written(tmp_path / "source", dict(PLACES["a folder"]))
    (tmp_path / "target").mkdir()
    writer = CheckpointWriter(tmp_path / "target")
    writer.add("a", torch.zeros(2))
    writer.finish({}, source)
    assert (tmp_path / "target" / "additional_chat_templates" / "tool_use.jinja").read_text() == TWO


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("test", ["is none", "is defined", "is not none"])
def test_what_is_not_given_is_none(name: str, test: str) -> None:
    source = f"{{{{ {name} {test} }}}}"
    right = transformers.utils.chat_template_utils.render_jinja_template([CHAT], chat_template=source)[0][0]
    assert ChatTemplate(source).render(CHAT) == right


@pytest.mark.parametrize("content", [None, "", "sure"])
def test_a_turn_that_only_calls_a_tool_has_no_text(tmp_path: Path, content: str | None) -> None:
    """A template of GLM's kind, which writes whatever is no text and no list."""
    template = (
        "{% macro shown(c) %}{% if c is string %}{{ c }}{% elif c is iterable and c is not mapping %}"
        "{% for p in c %}{{ p.text }}{% endfor %}{% else %}{{ c }}{% endif %}{% endmacro %}"
        "{% for m in messages %}<{{ m.role }}>{{ shown(m.content) }}"
        "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function.name }}<arg_key>{% endfor %}{% endfor %}"
        "{{ tools | length if tools }}"
    )
    folder = written(tmp_path, {"tokenizer_config.json": {"chat_template": template}})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [*CHAT, {"role": "assistant", "content": content, "tool_calls": [call]}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    right = theirs.apply_chat_template(talk, tools=TOOLS, tokenize=False)
    style = Style(Tokenizer.from_pretrained(folder))
    messages = [ChatMessage.model_validate(message) for message in talk]
    assert style.write(messages, [Tool.model_validate(tool) for tool in TOOLS]) == right
    assert "None" not in right
