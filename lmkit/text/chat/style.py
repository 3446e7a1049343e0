"""How a model writes reasoning and calls of tools, and what of both a request asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.text import Tokenizer
from lmkit.text.chat.answer_events import AnswerEvents
from lmkit.text.chat.conversation import AllowedTools, Chat, ChatMessage, NamedFunction, Tool, ToolOptions
from lmkit.text.dialects import DIALECTS, PLAIN, THOUGHTS, Dialect, Parser, Thought, dialect_of, thought_of
from lmkit.text.dialects.prompt import described, with_texts, with_told
from lmkit.text.messages import shown_parts
from lmkit.text.template import THINKING_SWITCHES

if TYPE_CHECKING:
    from lmkit.text.grammar import Grammars

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITY = {"low": "Keep your answers short.", "high": "Answer at length and in detail."}


class Style:
    """A model's dialect for calls and its form of reasoning. Both come from its chat template, or from options."""

    def __init__(
        self, tokenizer: Tokenizer, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        """A parser is a name of DIALECTS or THOUGHTS, "none", or None: as the template shows."""
        template = tokenizer.chat_template
        source = template.tool_source if template is not None else ""
        self.takes_tools = template is not None and template.takes_tools
        if tool_parser is not None:
            self.dialect: Dialect | None = DIALECTS.get(tool_parser)
        else:
            self.dialect = dialect_of(source) or (None if self.takes_tools else PLAIN)
        self.thought: Thought | None = (
            thought_of(template.source if template is not None else "")
            if reasoning_parser is None
            else THOUGHTS.get(reasoning_parser)
        )
        self._tokenizer = tokenizer

    @property
    def tool_parser(self) -> str | None:
        """The name of the dialect; None for a model that takes no chats, or no tools."""
        return self.dialect.name if self.dialect is not None and self._tokenizer.chat_template is not None else None

    def special_ids(self, tools: bool) -> tuple[int, ...]:
        """Special tokens that are marks, so the parser must see them."""
        marks = (*self.dialect.specials, self.dialect.begin) if tools and self.dialect else ()
        if self.thought:
            marks += (self.thought.begin, self.thought.end, *self.thought.specials)
            marks += DIALECTS["harmony"].specials if self.thought.name == "harmony" else ()
        ids = {self._tokenizer.backend.token_to_id(mark) for mark in marks}
        return tuple(sorted(token for token in ids if token is not None and token in self._tokenizer.special_ids))

    def render(self, body: Chat, variables: dict[str, Any]) -> str:
        """The conversation as the model's template writes it. Raises RequestError."""
        variables = self._with_effort(body.reasoning_effort, variables)
        told, template = VERBOSITY.get(body.verbosity or "", ""), self._tokenizer.chat_template
        if told and template is not None and "verbosity" in template.parameters:
            told, variables = "", {"verbosity": body.verbosity} | variables
        return self.write(
            body.messages,
            shown_tools(body),
            variables,
            told=told,
            add_generation_prompt=body.add_generation_prompt,
            continue_final=bool(body.continue_final_message),
        )

    def write(
        self,
        conversation: Sequence[ChatMessage],
        described: Sequence[Tool] = (),
        variables: dict[str, Any] | None = None,
        *,
        told: str = "",
        add_generation_prompt: bool | None = None,
        continue_final: bool = False,
    ) -> str:
        """A conversation and the tools that it may call. Raises RequestError.

        `told` is for the end of the system's message. The text ends where an answer begins. With `continue_final` it
        ends with the text of the last message.
        """
        if continue_final and add_generation_prompt:
            message = "continue_final_message does not go with add_generation_prompt; send one of them"
            raise RequestError("invalid_request", message, "continue_final_message")
        add = add_generation_prompt is not False and not continue_final
        tools = [_described(tool) for tool in described]
        messages: Sequence[Mapping[str, Any]] = list(map(plain_message, conversation))
        messages = with_told(messages, told) if told else messages
        if tools and self.dialect is None:
            message = "this model's chat template shows no form for calls of tools; name one with --tool-parser"
            raise RequestError("unsupported_parameter", message, "tools")
        messages, tools = self._written(messages, tools)
        text = self._tokenizer.render_chat(messages, add_generation_prompt=add, variables=variables, tools=tools)
        return _up_to(text, conversation[-1]) if continue_final else text

    def _written(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]]]:
        """Messages and tools for the template, with what it has no place for as texts."""
        template, dialect = self._tokenizer.chat_template, self.dialect or PLAIN
        has_calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        if template is None or not (tools or has_calls):
            return messages, tools
        if not template.writes_calls(bool(tools)):
            results = not template.writes_results(bool(tools))
            messages = with_texts(messages, dialect, results=results)
        if tools and not self.takes_tools:
            return with_told(messages, described(tools, dialect)), []
        return messages, tools

    def _with_effort(self, effort: str | None, variables: dict[str, Any]) -> dict[str, Any]:
        """The variables for an effort. A template that can only think or not is told that. Raises RequestError."""
        template = self._tokenizer.chat_template
        if effort is None or template is None:
            return variables
        if "reasoning_effort" in template.parameters:
            asked: dict[str, Any] = {"reasoning_effort": nearest_effort(effort, template.source)}
        elif switches := THINKING_SWITCHES & template.parameters:
            asked = dict.fromkeys(switches, effort not in ("none", "minimal"))
        elif ignore("reasoning_effort"):
            return variables
        else:
            message = "reasoning_effort: this model's chat template knows none"
            raise RequestError("unsupported_parameter", message, "reasoning_effort")
        if differing := [name for name, value in asked.items() if variables.get(name, value) != value]:
            message = f"reasoning_effort={effort!r} does not go with {differing[0]}; send one"
            raise RequestError("invalid_request", message, "reasoning_effort")
        return variables | asked

    def is_thinking(self, prompt_end: str) -> bool:
        """Whether a prompt ends with the mark that begins the reasoning."""
        return self.thought is not None and prompt_end.rstrip().endswith(self.thought.begin)

    def parser(self, body: Chat, *, is_thinking: bool) -> Parser | None:
        """A parser of one answer; None if all of it is content."""
        tools = called_tools(body)
        if not tools and self.thought is None:
            return None
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        thought = None if keeps_reasoning(body) else self.thought
        if thought is None and not tools:
            return None
        return Parser(self.dialect if tools else None, thought, is_thinking=is_thinking, parameters=schemas)

    def grammar(self, body: Chat, content: str, vocab_size: int, *, is_thinking: bool) -> str:
        """The grammar of the answer; `content` is that of its content. "" for any answer. Raises RequestError."""
        tools = called_tools(body)
        budget = body.thinking_token_budget if self.thought else None  # without reasoning, every budget is kept
        if budget is not None:
            self._check_budget()
        self._check_format(body)
        if not tools and budget is None and not (content and self.thought):
            return content
        from lmkit.text.dialects.grammar import Called, Form, grammar  # most requests never need it

        grammars = self._tokenizer.grammars(vocab_size)
        form = Form(
            [
                Called(tool.function.name, _held_schema(tool, grammars if _has_patterns(tool) else None))
                for tool in tools
            ],
            self.dialect if tools else None,
            must_call=must_call(body),
            parallel=_may_call_again(body),
            thought=self.thought,
            is_thinking=is_thinking,
            thinking_budget=budget,
            content=content,
        )
        whole = grammar(form, self._tokenizer)
        param = "tools" if tools else "response_format" if content else "thinking_token_budget"
        try:
            grammars.check(whole, param)
        except RequestError:
            if not tools:
                raise
            held = [Called(tool.function.name, _held_schema(tool, grammars)) for tool in tools]
            whole = grammar(replace(form, tools=held), self._tokenizer)
            grammars.check(whole, param)
        return whole

    def reasoning_end(self, body: Chat) -> int:
        """The token that ends the reasoning, if that has a budget; -1 if not."""
        if self.thought is None or body.thinking_token_budget is None:
            return -1
        token_id = self._tokenizer.backend.token_to_id(self.thought.end)
        return -1 if token_id is None else token_id

    def _check_budget(self) -> None:
        if self.thought and self._tokenizer.backend.token_to_id(self.thought.end) is None:
            reason = f"{self.thought.end}, the end of this model's reasoning, is not a token of its own"
            raise RequestError("unsupported_parameter", f"thinking_token_budget: {reason}", "thinking_token_budget")

    def _check_format(self, body: Chat) -> None:
        """Raise RequestError unless the fields about where reasoning stands agree, and this model can follow them."""
        fields = {
            "separate_reasoning": body.separate_reasoning,
            "reasoning_format": _FORMATS.get(body.reasoning_format or ""),
            "include_reasoning": True if body.include_reasoning is False else None,
        }
        asked = {name: value for name, value in fields.items() if value is not None}
        if len(set(asked.values())) > 1:
            raise RequestError("invalid_request", f"{' and '.join(asked)} differ; send one of them", list(asked)[-1])
        if keeps_reasoning(body) and self.thought is THOUGHTS["harmony"]:
            param = "separate_reasoning" if body.separate_reasoning is False else "reasoning_format"
            message = f"{param}: the channels of this model's answers cannot stay in the content"
            raise RequestError("unsupported_parameter", message, param)

    def answer(self, body: Chat, *, is_thinking: bool) -> AnswerEvents:
        """A reader of one answer to the request."""
        thought, dialect = self.thought, self.dialect or PLAIN
        return AnswerEvents(
            self.parser(body, is_thinking=is_thinking),
            show_reasoning=body.include_reasoning is not False,
            show_content=not must_call(body),
            decode=partial(self._tokenizer.decode, skip_special_tokens=False),
            end=thought.end if thought else "",
            num_id_chars=dialect.num_id_chars,
            id_form=dialect.id_form,
            num_earlier=sum(len(message.tool_calls or ()) for message in body.messages),
        )


def nearest_effort(effort: str, source: str) -> str:
    """The effort of those that a template names, or of the three usual ones, which is nearest to this one."""
    if effort not in EFFORTS:
        return effort
    known = [one for one in EFFORTS if one in EFFORTS[2:5] or re.search(rf"""["']{one}["']""", source)]
    return min(known, key=lambda one: abs(EFFORTS.index(one) - EFFORTS.index(effort)))


def _up_to(text: str, last: ChatMessage) -> str:
    """A rendered conversation up to the end of its last message, as the template shows it. Raises RequestError."""
    content = last.content or ""
    shown = next((form for form in (content, content.strip()) if form and form in text), "")
    if last.tool_calls or not content.strip() or not shown:
        message = "continue_final_message: the last message must be a text that the template shows"
        raise RequestError("invalid_request", message, "continue_final_message")
    return text[: text.rindex(shown) + len(shown)]


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates read it: arguments of calls are objects. `content` is None if there is none."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        plain["content"] = shown_parts(message.parts)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.thoughts:
        plain["reasoning_content"] = message.thoughts
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def shown_tools(body: ToolOptions) -> list[Tool]:
    """The tools that the prompt describes."""
    return [] if body.tool_choice == "none" else list(body.tools or ())


def called_tools(body: ToolOptions) -> list[Tool]:
    """The tools that the answer may call. Raises RequestError if the choice names others."""
    tools, choice = shown_tools(body), body.tool_choice
    if choice not in (None, "none", "auto") and not tools:
        raise RequestError("invalid_request", "tool_choice: there are no tools to choose from", "tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("invalid_request", "tools: two of them have the same name", "tools")
    wanted = names
    if isinstance(choice, NamedFunction):
        wanted = [choice.function.name]
    elif isinstance(choice, AllowedTools):
        wanted = [tool.function.name for tool in choice.allowed_tools.tools]
    if unknown := [name for name in wanted if name not in names]:
        raise RequestError("invalid_request", f"tool_choice: {unknown[0][:128]!r} is not in tools", "tool_choice")
    return [tool for tool in tools if tool.function.name in wanted]


_FORMATS = {"none": False, "deepseek": True}  # whether reasoning stands apart from the content


def keeps_reasoning(body: Chat) -> bool:
    """Whether reasoning stays in the content."""
    return body.separate_reasoning is False or body.reasoning_format == "none"


def must_call(body: ToolOptions) -> bool:
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedFunction)


def _may_call_again(body: ToolOptions) -> bool:
    """OpenAI: a function by name is called exactly once. So is the only one, if the answer must be a call."""
    asked = body.parallel_tool_calls
    return not (must_call(body) and len(called_tools(body)) == 1) if asked is None else asked


def _has_patterns(tool: Tool) -> bool:
    """Whether a check of all tools together may not see what is too much: it takes one way through the grammar."""
    return '"pattern' in json.dumps(tool.function.parameters)


def _held_schema(tool: Tool, grammars: Grammars | None) -> Mapping[str, Any]:
    """The schema of a tool's arguments, without what no grammar holds. A strict tool's is held whole, or refused.

    With `grammars` a schema that they refuse is any object; they are asked one by one where all together are refused.
    """
    from lmkit.text.dialects.grammar import ANY_OBJECT, NO_PARAMETERS
    from lmkit.text.grammar import grammar_of
    from lmkit.text.held_schema import held

    function = tool.function
    schema = {"type": "object", **function.parameters} if function.parameters else NO_PARAMETERS
    try:
        whole = grammar_of("json_schema", schema, f"tools: {function.name}", strict=bool(function.strict))
        if grammars is not None:
            grammars.check(whole, f"tools: {function.name}")
    except RequestError as error:
        if function.strict:
            raise RequestError(error.code, error.message, "tools") from None
        ignore(f"tools.{function.name}.parameters")
        return ANY_OBJECT
    return held(schema)[0]


def _described(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


def _object(arguments: str) -> Any:
    """Arguments as an object. A text that is none stands as it is: the model wrote it."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
