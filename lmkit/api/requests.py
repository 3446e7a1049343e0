"""From a caller's arguments to engine requests, and from their outputs to answers. Both kinds of pipeline share it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmkit.api.generation import GenerationConfig, configs_for
from lmkit.api.images import load
from lmkit.api.prompts import Messages, check_call, id_rows, prompt_list
from lmkit.api.response import Response, Session, refused, response
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, RequestError
from lmkit.text import Tokenizer
from lmkit.text.cut import cut_text
from lmkit.text.messages import ImagePart, has_images, message_parts, plain_messages, shown_parts
from lmkit.turbo.request import EngineInfo, ImageInput, Request, StepOutput, VectorLayer, check_head
from lmkit.turbo.transport.output import AssistantTurn, RequestOutput
from lmkit.turbo.transport.prompt_images import Shown, read_images, with_frames, with_images

if TYPE_CHECKING:
    from lmkit.api.chats import Chats, Reader


def engine_config(model: Any, backend_config: Any, options: dict[str, Any]) -> EngineConfig:
    """The configuration in the arguments of `pipeline`. Raises ConfigError."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model: expected a checkpoint's folder or its name, got {type(model).__name__}")
    if backend_config is None:
        return EngineConfig(**options)
    if not isinstance(backend_config, EngineConfig):
        raise ConfigError(f"backend_config: expected an EngineConfig, got {type(backend_config).__name__}")
    if options:
        raise ConfigError("pipeline: give backend_config or its fields as keywords, not both")
    return backend_config


class Batch:
    """The requests of one call by the index of their prompt, and the prompts that were refused."""

    def __init__(self, size: int, is_single: bool) -> None:
        self.requests: dict[int, Request] = {}
        self.readers: dict[int, Reader] = {}  # of answers that are more than one text
        self.refused: list[Response] = []
        self.responses = [Response(index=index) for index in range(size)]
        self._is_single = is_single

    def part(self, index: int, output: RequestOutput) -> Response:
        """What an output adds to its answer."""
        part, reader = response(index, output), self.readers.get(index)
        return part if reader is None else reader.take(part, output)

    def add(self, part: Response) -> None:
        self.responses[part.index].extend(part)

    def result(self) -> Any:
        """A Response for a single prompt, or a list of Responses."""
        return self.responses[0] if self._is_single else self.responses


class RequestMaker:
    """Makes the requests to one engine."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self._tokenizer, self._info = tokenizer, info
        self._ids = itertools.count()

    def batch(
        self,
        prompts: Any,
        gen_config: Any,
        *,
        do_preprocess: bool = True,
        priority: int = 0,
        timeout: float | None = None,
        adapter_name: str = "",
        **chat_options: Any,
    ) -> Batch:
        """Raises ConfigError or RequestError for arguments of wrong types; a prompt that cannot run is refused."""
        check_call(priority, timeout, adapter_name)
        items, is_single = prompt_list(prompts)
        asked = {name: value for name, value in chat_options.items() if value is not None}
        if asked and not do_preprocess:
            raise ConfigError(f"{next(iter(asked))} needs the chat template; leave do_preprocess on")
        batch = Batch(len(items), is_single)
        fields = {"priority": priority, "timeout": timeout, "adapter": adapter_name}
        has_chats = bool(asked) or not all(isinstance(prompt, str) for prompt in items)
        options = self._chats.options(asked) if has_chats else None
        for index, (prompt, config) in enumerate(zip(items, configs_for(gen_config, len(items)), strict=True)):
            try:
                check_head(self._info.has_head)
                if options is None or (isinstance(prompt, str) and not asked):
                    batch.requests[index] = self.request(self._text_ids(str(prompt), do_preprocess), config, **fields)
                    continue
                conversation = self._chats.open(prompt, options)
                ids, images = self._with_images(conversation.text, conversation.images)
                request = self.request(ids, config, images=images, **fields)
                batch.requests[index] = conversation.completed(request, config, self._info.vocab_size)
                if (reader := conversation.reader()) is not None:
                    batch.readers[index] = reader
            except RequestError as error:
                batch.refused.append(refused(index, error))
        return batch

    @cached_property
    def _chats(self) -> Chats:
        from lmkit.api.chats import Chats  # takes 0.2 s, and texts do not need it

        return Chats(self._tokenizer)

    @property
    def vector_layers(self) -> tuple[VectorLayer, ...]:
        """What follows the pooling of embeddings."""
        return self._info.vector_layers

    def scoring(self, inputs: Any) -> list[Request]:
        """Requests for the log-probabilities of texts or lists of token ids. Raises RequestError."""
        config = GenerationConfig(max_new_tokens=0)
        rows = id_rows(inputs, self._tokenizer.encode, 2, "perplexity needs at least two tokens")
        return [self.request(row, config, prompt_logprobs=True) for row in rows]

    def embedding(self, inputs: Any, prompt_name: str | None = None) -> list[Request]:
        """Requests for the embeddings of texts or lists of token ids. Raises RequestError."""
        config, sentences = GenerationConfig(max_new_tokens=0), self._info.sentences
        prompt, longest = sentences.prompt(prompt_name), sentences.max_tokens

        def encode(text: str) -> list[int]:
            if not longest or longest > self._info.max_model_len:
                return self._tokenizer.encode(prompt + text)
            return cut_text(prompt + text, self._tokenizer, longest, special=True, keep_end=False)

        rows = id_rows(inputs, encode, 1, "an embedding needs at least one token")
        return [self.request(row, config, pooling=self._info.pooling) for row in rows]

    def request(self, prompt_ids: list[int], config: GenerationConfig, **fields: Any) -> Request:
        config = config.filled(self._info.sampling)
        config.validate(self._info.vocab_size)
        params = config.params()
        if params.grammar:
            self._tokenizer.grammars(self._info.vocab_size).check(params.grammar, "response_format")
        return Request(request_id=f"pipeline-{next(self._ids)}", prompt_ids=prompt_ids, params=params, **fields)

    def _text_ids(self, prompt: str, do_preprocess: bool) -> list[int]:
        """The tokens of a text, or of a user's message with it."""
        if not do_preprocess or self._tokenizer.chat_template is None:
            return self._encode(prompt, True)
        return self._encode(self._tokenizer.render_chat([{"role": "user", "content": prompt}]), False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A chat template writes its own special tokens."""
        self._tokenizer.check_length(text, self._info.max_model_len, "prompt")
        return self._tokenizer.encode(text, add_special_tokens)

    def turn(self, prompt: Any, session: Session, gen_config: Any) -> Turn:
        """The next turn of a conversation. Raises RequestError if it cannot run."""
        check_head(self._info.has_head)
        messages = plain_messages([*_history(session), {"role": "user", "content": prompt}])
        found = [self._read(message) for message in messages if has_images(message["content"])]
        shown = [message | {"content": _shown(message["content"])} for message in messages]
        images = [image for of_one in found for image in of_one]
        text = with_frames(self._tokenizer.render_chat(shown), images, self._info)
        self._tokenizer.check_length(text, self._info.max_model_len, "prompt")
        encoded = session.tokens.encode(self._tokenizer, text)
        (config,) = configs_for(gen_config, 1)
        ids, placed = with_images(encoded.ids, images, self._info)
        request = self.request(ids, config, images=placed, session_id=session.id)
        return Turn(session, messages, request, AssistantTurn(encoded))

    def _with_images(self, text: str, parts: Sequence[ImagePart]) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The tokens of a rendered conversation with these images. Raises RequestError."""
        images = read_images(parts, self._info, load)
        return with_images(self._encode(with_frames(text, images, self._info), False), images, self._info)

    def _read(self, message: dict[str, Any]) -> list[Shown]:
        """The images of a message, which has them as they were read from now on."""
        parts = message_parts(message["content"])
        images = read_images([part for part in parts if isinstance(part, ImagePart)], self._info, load)
        rest = iter(images)
        message["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.mark, part.mark: next(rest)}
            for part in parts
        ]
        return images


class Turn:
    """One turn of a conversation. `take` gets the outputs of its request, and `end` keeps a whole answer."""

    def __init__(
        self, session: Session, messages: Sequence[dict[str, Any]], request: Request, tokens: AssistantTurn
    ) -> None:
        self.request = request
        self._session, self._messages, self._tokens = session, messages, tokens
        self._answer = Response()

    def take(self, output: RequestOutput) -> Response:
        part = response(0, output)
        self._answer.extend(part)
        self._session.tokens = self._tokens.add(output) or self._session.tokens
        return part

    def end(self) -> None:
        answer, session = self._answer, self._session
        session.response = answer
        if answer.finish_reason in ("stop", "length"):
            session.history[:] = [*self._messages, {"role": "assistant", "content": answer.text}]


def _shown(content: Any) -> Any:
    """A message's content as chat templates read it."""
    return shown_parts(message_parts(content)) if has_images(content) else content


def open_session(prompt: Any, session: Any) -> Session:
    """The given session, or a new one. Raises ConfigError or RequestError for arguments of other types."""
    if not isinstance(prompt, str | list):
        kind = type(prompt).__name__
        raise RequestError("invalid_request", f"prompt: expected the user's next message as text, got {kind}", "prompt")
    if session is not None and not isinstance(session, Session):
        raise ConfigError(f"session: expected a Session, from pipe.session(); got {type(session).__name__}")
    if session is not None and not isinstance(session.history, list):
        raise ConfigError(f"session.history: expected a list of messages, got {type(session.history).__name__}")
    return session or Session()


def embedding_of(output: StepOutput) -> bytes:
    """The embedding of a text. Raises RequestError if it was not computed."""
    if output.error is not None:
        raise RequestError(output.error_code, output.error)
    return output.embedding


def mean_nll(output: StepOutput) -> float:
    """The mean negative log-likelihood of a scored prompt. Raises RequestError if it was not scored."""
    if output.error is not None:
        raise RequestError("engine_error", output.error)
    return -math.fsum(position.logprob for position in output.prompt_logprobs) / len(output.prompt_logprobs)


def _history(session: Session) -> Messages:
    """The messages of a session. A pair (user, assistant) stands for two of them."""
    messages: Messages = []
    for item in session.history:
        if isinstance(item, list | tuple) and len(item) == 2:
            user, assistant = item
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        else:
            messages.append(item)
    return messages
