"""gRPC beside HTTP, by a real client."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_tools import protoc

from benchmarks.resilience.processes import Command
from lmkit.text import Tokenizer
from lmkit.web.rpc import messages
from lmkit.web.rpc.messages import SERVICE, Answer, GenerateRequest, GenerateResponse
from tests.serve.fake_engine import DEMO, PHRASE
from tests.serve.live import Server

TOKENIZER = Tokenizer.from_pretrained(DEMO)
IDS = TOKENIZER.encode(PHRASE)
FOLDER = Path(messages.__file__).parent
CERTIFICATES = Path(__file__).parents[1] / "web" / "certificates"


def compile_proto(folder: Path) -> bytes:
    """The compiled form that `messages` reads. After a change of the .proto file, write it to COMPILED."""
    out = folder / "compiled"
    assert protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", messages.PROTO]) == 0
    return out.read_bytes()


class Client:
    def __init__(self, server: Server | Command, credentials: Any = None) -> None:
        found = re.search(r"gRPC on (\S+)", server.log)
        assert found, server.log
        self.address = found[1]
        self.channel = (
            grpc.secure_channel(self.address.replace("127.0.0.1", "localhost"), credentials)
            if credentials
            else grpc.insecure_channel(self.address)
        )
        self._whole = self.channel.unary_unary(
            f"/{SERVICE}/Generate", GenerateRequest.SerializeToString, GenerateResponse.FromString
        )
        self._stream = self.channel.unary_stream(
            f"/{SERVICE}/GenerateStream", GenerateRequest.SerializeToString, Answer.FromString
        )

    def generate(self, *, key: str = "", timeout: float = 120, **fields: Any) -> list[Any]:
        metadata = [("authorization", f"Bearer {key}")] if key else []
        return list(self._whole(GenerateRequest(**fields), timeout=timeout, metadata=metadata).answers)

    def stream(self, *, key: str = "", timeout: float = 120, **fields: Any) -> Any:
        metadata = [("authorization", f"Bearer {key}")] if key else []
        return self._stream(GenerateRequest(**fields), timeout=timeout, metadata=metadata)

    def refused(self, **fields: Any) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.generate(**fields)
        return caught.value


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--grpc-port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server)


def params(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "seed": 0, **fields}


def test_the_compiled_messages_are_those_of_the_proto(tmp_path: Path) -> None:
    kept = (FOLDER / messages.COMPILED).read_bytes()
    parse = descriptor_pb2.FileDescriptorSet.FromString
    assert parse(kept) == parse(compile_proto(tmp_path))


@pytest.mark.parametrize("prompt", [{"text": "Hi"}, {"input_ids": {"ids": TOKENIZER.encode("Hi")}}])
def test_generate(client: Client, prompt: dict[str, Any]) -> None:
    (answer,) = client.generate(**prompt, sampling_params=params())
    assert list(answer.output_ids) == IDS[:5]
    assert answer.text == TOKENIZER.decode(IDS[:5])
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (
        "length", len(TOKENIZER.encode("Hi")), 5
    )  # fmt: skip
    assert not answer.HasField("matched_stop")


def test_a_stream_is_the_whole_answer(client: Client) -> None:
    parts = list(client.stream(text="Hi", sampling_params=params(max_tokens=40, n=2)))
    for index in range(2):
        mine = [part for part in parts if part.index == index]
        assert [token for part in mine for token in part.output_ids] == (3 * IDS)[index : index + 40]
        (whole,) = client.generate(text="Hi", sampling_params=params(max_tokens=40, seed=index))
        assert "".join(part.text for part in mine) == whole.text
        assert [part.finish_reason for part in mine][-1] == "length"


def test_every_field_reaches_the_answer(client: Client) -> None:
    stop = TOKENIZER.decode(IDS[3:4])
    (answer,) = client.generate(
        text="Hi", logprobs=2, prompt_logprobs=1, return_token_ids=True, priority=3, cache_salt="s",
        sampling_params=params(max_tokens=9, stop=[stop], temperature=0.5, top_k=5, logit_bias={}),
    )  # fmt: skip
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    assert list(answer.prompt_token_ids) == TOKENIZER.encode("Hi")
    assert [position.token.id for position in answer.output_logprobs] == list(answer.output_ids)
    assert [len(position.top) for position in answer.output_logprobs] == [2] * len(answer.output_ids)
    assert not answer.prompt_logprobs[0].token.HasField("logprob")
    assert [len(position.top) for position in answer.prompt_logprobs[1:]] == [1] * (answer.prompt_tokens - 1)
    (other,) = client.generate(text="Hi", sampling_params=params(stop_token_ids=[IDS[2]], logit_bias={}))
    assert (other.finish_reason, other.matched_token) == ("stop", IDS[2])
    (biased,) = client.generate(text="Hi", sampling_params=params(logit_bias={77: 5.0}))
    assert set(biased.output_ids) == {77}


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "send text or input_ids"),
        ({"text": "Hi", "sampling_params": {"top_p": 2}}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"text": "Hi", "model": "other"}, grpc.StatusCode.NOT_FOUND, "'other' does not exist"),
        ({"text": "Hi " * 5000}, grpc.StatusCode.INVALID_ARGUMENT, "maximum context length"),
        ({"text": "REFUSE"}, grpc.StatusCode.UNAVAILABLE, "queue is full"),
        ({"text": "CRASH"}, grpc.StatusCode.INTERNAL, "engine"),
        ({"text": "x" * (2 << 20)}, grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max"),
    ],
)
def test_an_error_has_its_status_and_tells_nothing_of_the_server(
    client: Client, fields: dict[str, Any], code: Any, says: str
) -> None:
    error = client.refused(**fields)
    assert (error.code(), says in error.details()) == (code, True), error
    assert "secret" not in error.details()


def test_an_error_in_a_stream(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stream(text="CRASH"))
    assert caught.value.code() == grpc.StatusCode.INTERNAL


def test_a_deadline_ends_the_request(server: Server, client: Client) -> None:
    error = client.refused(text="SLOW", sampling_params={"max_tokens": 2000}, timeout=0.5)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    server.until(lambda: server.metric("lmkit:num_requests_running") == 0)


def test_a_cancelled_stream_ends_in_the_engine(server: Server, client: Client) -> None:
    call = client.stream(text="SLOW", sampling_params={"max_tokens": 3000})
    assert next(iter(call)).completion_tokens >= 1
    server.until(lambda: server.metric("lmkit:num_requests_running") == 1)
    call.cancel()
    server.until(lambda: server.metric("lmkit:num_requests_running") == 0)


def test_health(server: Server, client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", SERVICE):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_calls_survive_the_end_of_the_engine() -> None:
    with Server("--grpc-port", "0") as server:
        client = Client(server)
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        seen: list[int] = []
        threading.Thread(target=lambda: seen.extend(_statuses(watch, 3)), daemon=True).start()
        server.until(lambda: seen == [1])
        assert client.refused(text="KILL").code() == grpc.StatusCode.UNAVAILABLE
        server.until(lambda: seen == [1, 2, 1])
        assert len(client.generate(text="Hi", sampling_params=params())) == 1
        assert server.terminate() == 0


def _statuses(watch: Any, count: int) -> Iterator[int]:
    for _, answer in zip(range(count), watch, strict=False):
        yield answer.status


def test_calls_of_the_health_service_keep_nobody_out(server: Server, client: Client) -> None:
    """It needs no key, so a host gets few of its calls at once. Checks and the other calls have theirs."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(32)]
    assert [next(iter(watch)).status for watch in watches] == [1] * 32
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(stub.Watch(health_pb2.HealthCheckRequest())))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert stub.Check(health_pb2.HealthCheckRequest()).status == 1
    assert client.generate(text="Hi", sampling_params=params(max_tokens=1))
    for watch in watches:
        watch.cancel()
    while True:  # until the server has seen that they ended
        with contextlib.suppress(grpc.RpcError):
            assert next(iter(stub.Watch(health_pb2.HealthCheckRequest()))).status == 1
            break


def test_every_call_but_health_needs_a_key() -> None:
    with Server("--grpc-port", "0", "--api-key", "secret") as server:
        client = Client(server)
        for key in ("", "wrong", "SECRET"):
            assert client.refused(text="Hi", key=key).code() == grpc.StatusCode.UNAUTHENTICATED
        assert client.generate(text="Hi", key="secret", sampling_params=params())
        large = "a" * (2 << 20)  # more than a message may have: a good key decides whether it is read
        assert client.refused(text=large, key="wrong").code() == grpc.StatusCode.UNAUTHENTICATED
        assert client.refused(text=large, key="secret").code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        stub = health_pb2_grpc.HealthStub(client.channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == 1
        assert "secret" not in server.log.replace("test-secret", "")


def test_tls_and_a_renewed_certificate(tmp_path: Path) -> None:
    def install(name: str) -> None:
        for end in ("pem", "key"):
            shutil.copy(CERTIFICATES / f"{name}.{end}", tmp_path / f"server.{end}")

    def works(server: Server, name: str) -> bool:
        roots = (CERTIFICATES / f"{name}.pem").read_bytes()
        client = Client(server, grpc.ssl_channel_credentials(roots))
        try:
            return bool(client.generate(text="Hi", timeout=3, sampling_params=params()))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    install("first")
    files = ("--tls-cert", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key"))
    with Server("--grpc-port", "0", *files) as server:
        assert works(server, "first")
        assert not works(server, "second")
        install("second")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("the certificate is read anew")
        assert works(server, "second")


def test_a_port_that_is_in_use_is_one_line(server: Server, client: Client) -> None:
    with Server("--grpc-port", client.address.rpartition(":")[2]) as other:
        other.process.wait(20)
        assert other.process.returncode == 2
        assert "lmkit: cannot listen on 127.0.0.1" in other.log
        assert "Traceback" not in other.log
