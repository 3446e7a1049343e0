"""Rows of calibration data: every common schema is read to the same conversation, and rows without a text are left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lmkit.errors import ConfigError
from lmkit.quant.data.rows import read_row, row_documents
from lmkit.quant.data.sources import documents, read_documents

PAIR = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *PAIR]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
PAIRS: dict[str, dict[str, Any]] = {
    "OpenAI": {"messages": PAIR},
    "ShareGPT": {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "ShareGPT by columns": {"conversations": {"from": ["human", "gpt"], "value": ["2 + 2?", "4"]}},
    "conversations with roles": {"conversations": PAIR},
    "WildChat": {"conversation": [{**turn, "language": "English"} for turn in PAIR], "model": "x"},
    "Capybara": {"conversation": [{"input": "2 + 2?", "output": "4"}]},
    "UltraChat": {"id": "1", "data": ["2 + 2?", "4"]},
    "parts": {"messages": [{"role": t["role"], "content": [{"type": "text", "text": t["content"]}]} for t in PAIR]},
    "an image beside a text": {
        "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2 + 2?"}]}, PAIR[1]]
    },
    "prompt and completion": {"prompt": "2 + 2?", "completion": "4"},
    "prompt and completion as turns": {"prompt": PAIR[:1], "completion": PAIR[1:]},
    "prompt and response": {"prompt": "2 + 2?", "response": "4"},
    "prompt as turns": {"prompt": PAIR[:1], "response": "4"},
    "preference": {"prompt": "2 + 2?", "chosen": PAIR, "rejected": PAIR[:1]},
    "Alpaca": {"instruction": "2 + 2?", "input": "", "output": "4"},
    "question and answer": {"question": "2 + 2?", "answer": "4"},
    "capitals": {"Question": "2 + 2?", "Answer": "4", "Id": 3},
    "query and answer": {"query": "2 + 2?", "answer": "4", "lang": "en"},
    "text null beside messages": {"text": None, "messages": PAIR},
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "ShareGPT": {"conversations": [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "OpenOrca": {"system_prompt": "Be brief.", "question": "2 + 2?", "response": "4"},
    "Alpaca": {"system": "Be brief.", "instruction": "2 + 2?", "output": "4"},
}  # fmt: skip
WITHOUT_TEXT: list[dict[str, Any]] = [
    {"text": None}, {"text": " \n"}, {"text": 3}, {"messages": []}, {"messages": None}, {"messages": [3]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": None}]},
    {"conversations": [{"from": "human", "value": ""}]}, {"instruction": "", "output": "4"},
    {"question": None, "answer": None}, {"score": 1}, {},
]  # fmt: skip


@pytest.mark.parametrize("schema", PAIRS)
def test_a_question_and_its_answer(schema: str) -> None:
    assert read_row(PAIRS[schema]) == PAIR


@pytest.mark.parametrize("schema", SYSTEMS)
def test_a_system_prompt_comes_first(schema: str) -> None:
    assert read_row(SYSTEMS[schema]) == WITH_SYSTEM


def test_texts_and_what_comes_before_what() -> None:
    assert read_row({"text": "a", "messages": PAIR}) == "a"
    assert read_row({"content": "a", "path": "x.py"}) == "a"
    assert read_row({"article": "a", "highlights": "b"}) == "a"
    assert read_row({"prompt": "2 + 2?", "prompt_id": "7", "messages": PAIR}) == PAIR  # UltraChat 200k
    assert read_row({"instruction": "Add.", "input": "2 and 2", "output": "4"}) == [
        {"role": "user", "content": "Add.\n2 and 2"}, {"role": "assistant", "content": "4"},
    ]  # fmt: skip
    assert read_row({"prompt": "alone"}) == [{"role": "user", "content": "alone"}]


def test_calls_of_tools_and_their_results() -> None:
    turns = [
        PAIR[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1", "tool_calls": None},
        {"from": "observation", "value": "5"},
    ]
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert read_row({"messages": turns}) == [
        PAIR[0],
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "tool", "content": "5"},
    ]
    assert read_row({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}) is not None


@pytest.mark.parametrize("row", WITHOUT_TEXT, ids=json.dumps)
def test_a_row_without_a_text_is_left_out(row: dict[str, Any]) -> None:
    assert read_row(row) is None
    assert list(row_documents([{"text": "a"}, row, {"text": "b"}], "x")) == ["a", "", "b"]


def test_a_file_without_a_text_names_its_columns_and_the_schemas(tmp_path: Path) -> None:
    rows = [{"score": 1, "label": "a"}, {"score": 2, "url": "b"}]
    line = r"none of 2 rows holds a text; its columns: score, label, url; known are text; messages or conversations"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=rf"rows\.jsonl: {line}"):
        list(read_documents(tmp_path / "rows.jsonl"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "rows.parquet")
    with pytest.raises(
        ConfigError, match=r"rows\.parquet: no column holds a text; its columns: score, label; known are"
    ):
        list(read_documents(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("schema", PAIRS)
def test_the_same_rows_from_parquet(tmp_path: Path, schema: str) -> None:
    if schema == "an image beside a text":
        pytest.skip("a Parquet column has one type")
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PAIRS[schema]] * 2), file)
    assert list(read_documents(file)) == [PAIR, PAIR]


@pytest.mark.parametrize(
    "content",
    [
        [{"messages": PAIR}, {"text": "b"}],
        {"version": "1", "data": [{"messages": PAIR}, {"text": "b"}]},
        [PAIR, "b"],
    ],
)
def test_a_json_file_is_a_list_of_rows(tmp_path: Path, content: Any) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(content, indent=1))
    assert list(read_documents(tmp_path / "rows.json")) == [PAIR, "b"]


def test_a_json_file_may_have_rows_in_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert list(read_documents(tmp_path / "rows.json")) == ["a", "b"]
    (tmp_path / "one.json").write_text(json.dumps({"messages": PAIR}))
    assert list(read_documents(tmp_path / "one.json")) == [PAIR]


def test_descriptions_beside_data_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert list(documents(str(tmp_path))) == ["a"]
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "dataset_info.json").write_text('[{"text": "b"}]')
    assert list(documents(str(tmp_path))) == ["b"]
