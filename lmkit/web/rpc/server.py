"""gRPC beside HTTP, of a server and of a proxy. A call becomes a request to POST /generate of the application, so keys,
limits and errors are the same. A client that cancels a call, or whose deadline passes, leaves as one that closes its
connection.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from starlette.types import ASGIApp, Message

from lmkit.config import MAX_TIMEOUT
from lmkit.errors import HTTP_STATUS, JSON_ERRORS, ConfigError, RequestError
from lmkit.log import get_logger
from lmkit.web.inside import call
from lmkit.web.rpc.messages import SERVICE, Answer, GenerateRequest, GenerateResponse
from lmkit.web.rpc.translate import answer_of, body_of
from lmkit.web.sse import EventData
from lmkit.web.tls import Certificate

MAX_CALLS = 1024  # at once; one more is refused
MAX_MESSAGE_BYTES = 1 << 20  # of a message, which is read before its call begins
HANDSHAKE_SECONDS = 10
PATH = "/generate"  # of the application
STOP_SECONDS = 3.0  # for answers to reach their clients at the end
HEALTH = "grpc.health.v1.Health"
WATCH_SECONDS = 0.5  # between looks at the health
MAX_WATCHES, MAX_WATCHES_OF_HOST = 256, 32  # calls of a kind of the health service at once: no key
MESSAGE_SECONDS = 5.0  # for the message of such a call to come
HEADERS = ("authorization", "x-api-key", "x-request-id", "x-lmkit-tenant", "traceparent", "tracestate")
# HTTP status -> gRPC status
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED, 404: grpc.StatusCode.NOT_FOUND, 408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    402: grpc.StatusCode.RESOURCE_EXHAUSTED, 499: grpc.StatusCode.CANCELLED, 502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip

logger = get_logger(__name__)


Check = Callable[[list[tuple[bytes, bytes]]], object]


@asynccontextmanager
async def serving(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    max_body_bytes: int,
    check_key: Check,
    takes_requests: Callable[[], bool],
    tls: Certificate | None = None,
    stop_seconds: float = STOP_SECONDS,
) -> AsyncGenerator[int]:
    """Serve gRPC until the block ends; then calls have `stop_seconds` to end. Gives the port. Raises ConfigError.

    `check_key` raises RequestError for headers without a good key. `takes_requests` is what the health service says.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", min(max_body_bytes, MAX_MESSAGE_BYTES)),
            ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
            ("grpc.so_reuseport", 0),
        ],
        interceptors=[KeysFirst(check_key)],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    generation = Generation(app)
    how = {"request_deserializer": GenerateRequest.FromString}
    handlers = {
        "Generate": grpc.unary_unary_rpc_method_handler(
            generation.whole, response_serializer=GenerateResponse.SerializeToString, **how
        ),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(
            generation.stream, response_serializer=Answer.SerializeToString, **how
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health = Health(takes_requests)
    how = {
        "request_deserializer": health_pb2.HealthCheckRequest.FromString,
        "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
    }
    checks = {
        "Check": grpc.stream_stream_rpc_method_handler(health.check, **how),
        "Watch": grpc.stream_stream_rpc_method_handler(health.watch, **how),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, checks),))
    host = f"[{host}]" if ":" in host else host
    address = f"{host}:{port}"
    try:
        port = server.add_secure_port(address, _credentials(tls)) if tls else server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(f"cannot listen on {address} for gRPC: is the port in use?") from None
    await server.start()
    logger.info("gRPC on %s:%d", host, port)
    try:
        yield port
    finally:
        await server.stop(stop_seconds)


def _credentials(tls: Certificate) -> Any:
    """The certificate as it was last read, for each new connection."""

    def current() -> Any:
        return grpc.ssl_server_certificate_configuration([tls.pem])

    return grpc.dynamic_ssl_server_credentials(current(), current)


class KeysFirst(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses a call without a good key before its message is read. The health service needs none."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith(f"/{SERVICE}/"):
            try:
                self._check(_headers(details.invocation_metadata))
            except RequestError as error:
                return _refusal(error)
        return await continuation(details)


def _refusal(error: RequestError) -> Any:
    """A handler that ends a call. It is one of a stream of messages, because that of a single message reads it."""

    async def refuse(requests: Any, context: Any) -> None:
        await _fail(context, error.status, {"error": {"code": error.code, "message": error.message}})

    return grpc.stream_stream_rpc_method_handler(refuse)


def _headers(metadata: Any) -> list[tuple[bytes, bytes]]:
    """The metadata that the application reads."""
    sent = dict(metadata or ())
    return [(name.encode(), sent[name].encode()) for name in HEADERS if isinstance(sent.get(name), str)]


class Generation:
    """The calls of the service."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def whole(self, request: Any, context: Any) -> Any:
        parts: list[bytes] = []
        await self._ask(request, context, parts.append, is_stream=False)
        data = await _read(context, b"".join(parts))
        found = [await _answer(context, part) for part in (data if isinstance(data, list) else [data])]
        return GenerateResponse(answers=found)

    async def stream(self, request: Any, context: Any) -> None:
        events = EventData()

        async def send(piece: bytes) -> None:
            for event in events.feed(piece):
                if event == b"[DONE]":
                    continue
                data = await _read(context, event)
                if isinstance(data, dict) and (error := data.get("error")):
                    code = error.get("code") if isinstance(error, dict) else None
                    await _fail(context, HTTP_STATUS.get(str(code), 500), data)
                await context.write(await _answer(context, data))

        await self._ask(request, context, send, is_stream=True)

    async def _ask(
        self, request: Any, context: Any, on_part: Callable[[bytes], Awaitable[None] | None], *, is_stream: bool
    ) -> None:
        """Give `on_part` each part of a good answer. Ends the call with an error otherwise."""
        status, refusal = 200, b""

        async def on_message(message: Message) -> None:
            nonlocal status, refusal
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status != 200:
                refusal += message.get("body", b"")
            elif body := message.get("body"):
                sending = on_part(body)
                if sending is not None:
                    await sending

        body = {**body_of(request), "stream": is_stream}
        if (seconds := context.time_remaining()) is not None and math.isfinite(seconds):
            body["timeout"] = min(max(seconds, 0.001), MAX_TIMEOUT)
        headers = _headers(context.invocation_metadata())
        raw = msgspec.json.encode(body)
        await call(self._app, PATH, raw, on_message, headers=headers, client=_client(context.peer()))
        if status != 200:
            await _fail(context, status, await _read(context, refusal))


async def _read(context: Any, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except JSON_ERRORS:
        await _fail(context, 502, {})


async def _answer(context: Any, data: Any) -> Any:
    """Behind a proxy stand servers of all kinds."""
    try:
        return answer_of(data)
    except (KeyError, TypeError, ValueError):
        await _fail(context, 502, {})


async def _fail(context: Any, status: int, answer: Any) -> None:
    """End the call with the error of an answer."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        error = {"code": "bad_gateway", "message": "the node's answer is none of lmkit's"}
    metadata = (("x-lmkit-error", str(error.get("code"))),)
    await context.abort(CODES.get(status, grpc.StatusCode.INTERNAL), str(error.get("message")), metadata)


def _client(peer: str) -> tuple[str, int]:
    """`ipv4:127.0.0.1:5000` -> its address and port."""
    host, _, port = peer.partition(":")[2].rpartition(":")
    return host or "-", int(port) if port.isdecimal() else 0


class Health:
    """The standard health service, which needs no key. It knows the server ("") and the service Generation.

    Its calls read their message themselves: one that never comes must not keep a place. Few of them run at once, so
    that calls without a key leave the others theirs, and watches leave checks theirs.
    """

    def __init__(self, takes_requests: Callable[[], bool]) -> None:
        self._takes_requests = takes_requests
        self._checks, self._watches = Counter[str](), Counter[str]()  # that run, by host

    async def check(self, requests: Any, context: Any) -> None:
        async with self._place(context, self._checks):
            request = await _message(requests, context)
            if request.service not in ("", SERVICE):
                await context.abort(grpc.StatusCode.NOT_FOUND, f"expected the service {SERVICE}, or none")
            await context.write(self._status())

    async def watch(self, requests: Any, context: Any) -> None:
        async with self._place(context, self._watches):
            request, last = await _message(requests, context), None
            while True:
                now = self._status() if request.service in ("", SERVICE) else _UNKNOWN
                if now != last:
                    await context.write(now)
                last = now
                await asyncio.sleep(WATCH_SECONDS)

    @asynccontextmanager
    async def _place(self, context: Any, running: Counter[str]) -> AsyncGenerator[None]:
        host = _client(context.peer())[0]
        if running.total() >= MAX_WATCHES or running[host] >= MAX_WATCHES_OF_HOST:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls of the health service; end some")
        running[host] += 1
        try:
            yield
        finally:
            running[host] -= 1
            if not running[host]:
                del running[host]

    def _status(self) -> Any:
        return _SERVING if self._takes_requests() else _NOT_SERVING


_SERVING, _NOT_SERVING, _UNKNOWN = (
    health_pb2.HealthCheckResponse(status=status)
    for status in (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
        health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
    )
)


async def _message(requests: Any, context: Any) -> Any:
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            async for request in requests:
                return request
    except TimeoutError:
        pass
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no message came within {MESSAGE_SECONDS:g} s")
