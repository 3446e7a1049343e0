"""Rows of a data set as documents: a text, or a conversation. The schemas are those that are common for such data.

    text                             also content, code, article, sentence, document, raw_content
    messages                         also conversations, conversation, dialogue, dialog, turns, data: turns in a list
    prompt, completion               a question and its answer; both may be lists of turns
    instruction, input, output       Alpaca; `input` is added to the instruction
    question, answer                 and more of the kind, see QUESTIONS and ANSWERS

A turn has `role` and `content` (OpenAI), `from` and `value` (ShareGPT), or is itself a question and its answer; turns
that are plain texts are the user's and the assistant's in turn. A content may be a list of parts. Names of columns may
have capitals. A row that holds no text is no error: real data sets have some.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from lmkit.errors import ConfigError

Messages = list[dict[str, Any]]
Document = str | Messages
Row = Mapping[str, Any]

TEXTS = ("text", "content", "chat", "code", "article", "sentence", "document", "raw_content")
TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat", "data")
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "response", "output", "answer", "chosen")
SYSTEMS = ("system", "system_prompt")
COLUMNS = {*TEXTS, *TURNS, *QUESTIONS, *ANSWERS, *SYSTEMS}
SCHEMAS = (
    "text; messages or conversations (a list of turns, each with role and content, or from and value); prompt and "
    "completion; instruction, input and output; question and answer"
)
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool_response": "tool",
}  # fmt: skip
KEPT = ("name", "tool_call_id", "reasoning_content")  # of a turn, besides its role, content and calls


def row_documents(rows: Iterable[Any], where: object) -> Iterator[Document]:
    """The document of each row, "" for one that holds no text.

    Raises ConfigError if no row holds a text. It lists the columns that there are, and the known schemas.
    """
    count, usable, columns = 0, False, dict[str, None]()
    for row in rows:
        count += 1
        document = read_row(row)
        if not usable:
            usable = document is not None
            columns |= dict.fromkeys(row if isinstance(row, Mapping) else ())
        yield "" if document is None else document
    if count == 0:
        raise ConfigError(f"calibration data {where}: no rows")
    if not usable:
        raise ConfigError(nothing_usable(where, f"none of {count} rows holds a text", columns))


def nothing_usable(where: object, problem: str, columns: Iterable[str]) -> str:
    """The message about a data set without a text that can be read."""
    return f"calibration data {where}: {problem}; its columns: {', '.join(columns) or 'none'}; known are {SCHEMAS}"


def read_row(row: Any) -> Document | None:
    """The text or conversation of a row; None if it holds no text."""
    if isinstance(row, str):
        return _text(row) or None
    if isinstance(row, list):
        return read_turns(row)
    columns = {name.lower(): value for name, value in row.items()}
    texts = [columns.get(name) for name in TEXTS]
    found: list[Document | None] = [_text(texts[0]), *(read_turns(columns.get(name)) for name in TURNS)]
    found += [_pair(columns), *map(_text, texts)]
    return next((document for document in found if document), None)


def read_turns(turns: Any) -> Messages | None:
    """A conversation's messages; None if these are no turns, or none of them holds a text or calls a tool."""
    if isinstance(turns, Mapping) and all(isinstance(values, list) for values in turns.values()):
        turns = [dict(zip(turns, values, strict=False)) for values in zip(*turns.values(), strict=False)]  # by columns
    if not isinstance(turns, list):
        return None
    messages: Messages = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": turn})
        elif isinstance(turn, Mapping) and (found := _turn(turn)):
            messages += found
        else:
            return None
    return messages if any(m["content"].strip() or m.get("tool_calls") for m in messages) else None


def _turn(turn: Row) -> Messages | None:
    """The messages of a turn: one, or a question and its answer."""
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str):
        return _pair(turn)
    content = next((turn[name] for name in ("content", "value", "text") if turn.get(name) is not None), None)
    message: dict[str, Any] = {"role": ROLES.get(role.lower(), role.lower()), "content": _text(content)}
    message |= {name: turn[name] for name in KEPT if isinstance(turn.get(name), str)}
    return [message | ({"tool_calls": calls} if (calls := _calls(turn.get("tool_calls"))) else {})]


def _pair(columns: Row) -> Messages | None:
    """A question, what it is about, and its answer, if the columns have these. None or empty: they have no question."""
    asked = [columns[name] for name in QUESTIONS if columns.get(name)]
    answer = next((columns[name] for name in ANSWERS if columns.get(name)), None)
    if not asked:
        return None
    questions = read_turns(asked[0]) or _message("user", *asked)
    answers = read_turns(answer) or _message("assistant", answer)
    if answers and answers[0]["role"] != "assistant":  # it repeats the question
        return answers
    return questions and [*_message("system", *(columns.get(name) for name in SYSTEMS)), *questions, *answers]


def _message(role: str, *texts: Any) -> Messages:
    """One message with the texts that there are, or none."""
    content = "\n".join(filter(None, map(_text, texts)))
    return [{"role": role, "content": content}] if content else []


def _text(value: Any) -> str:
    """The text of a value: a text, or a list of parts with a line for each that is or has a text."""
    if isinstance(value, Mapping):
        value = value.get("text", value.get("parts"))
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    return value if isinstance(value, str) and value.strip() else ""


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Calls of tools as chat templates read them: their arguments are objects."""
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                with contextlib.suppress(msgspec.DecodeError):  # a template may take a text
                    arguments = msgspec.json.decode(arguments or "{}")
            kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
            called = {"name": function["name"], "arguments": {} if arguments is None else arguments}
            found.append(kept | {"type": "function", "function": called})
    return found
