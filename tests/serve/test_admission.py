"""What one tenant may have open, and which priorities a key may ask for."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import RequestError
from lmkit.serve.admission import Admission
from lmkit.serve.auth import NOBODY, Owner, owner_of
from lmkit.serve.protocol import CompletionRequest
from lmkit.serve.to_request import completion_requests
from lmkit.turbo.request import EngineInfo, Request, SamplingParams
from lmkit.web.auth import parse_key
from lmkit.web.errors import error_body, error_response

CONFIG = EngineConfig(max_queue=12, max_batch_size=4, queue_quota=0.5, max_queued_tokens=1000)  # 16 places, 8 of one


def body(tenant: str, count: int, tokens: int = 1) -> list[Request]:
    return [
        Request(request_id=f"r{i}", prompt_ids=[1] * tokens, params=SamplingParams(), tenant=tenant)
        for i in range(count)
    ]


def refused(admission: Admission, requests: list[Request]) -> str:
    with pytest.raises(RequestError) as caught, admission.admit(requests):
        pass
    return caught.value.code


def test_a_tenant_fills_its_share_of_the_queue_and_no_more() -> None:
    admission = Admission(CONFIG)
    with ExitStack() as held:
        held.enter_context(admission.admit(body("a", 5)))
        held.enter_context(admission.admit(body("a", 3)))
        assert refused(admission, body("a", 1)) == "rate_limit_exceeded"
        held.enter_context(admission.admit(body("b", 7)))
        assert refused(admission, body("c", 2)) == "queue_full"
        held.enter_context(admission.admit(body("c", 1)))
    with admission.admit(body("a", 8)):  # all places are free again
        pass


def test_a_tenant_is_admitted_by_the_tokens_of_its_prompts() -> None:
    admission = Admission(CONFIG)
    with admission.admit(body("a", 4, tokens=100)):
        assert refused(admission, body("a", 2, tokens=51)) == "rate_limit_exceeded"
        with admission.admit(body("a", 2, tokens=50)), admission.admit(body("b", 1, tokens=500)):
            assert refused(admission, body("c", 1)) == "queue_full"


def test_a_body_that_never_fits_is_not_told_to_come_again() -> None:
    admission = Admission(CONFIG)
    assert refused(admission, body("a", 9)) == "invalid_request"
    assert refused(admission, body("a", 1, tokens=501)) == "invalid_request"
    assert refused(Admission(EngineConfig(max_queue=12, max_batch_size=4)), body("", 17)) == "invalid_request"


def test_a_refused_body_is_not_counted() -> None:
    admission = Admission(CONFIG)
    for _ in range(3):
        assert refused(admission, body("a", 9)) == "invalid_request"
    with pytest.raises(ValueError, match="ends"), admission.admit(body("a", 8)):
        raise ValueError("ends")
    with admission.admit(body("a", 8)):
        pass


def test_a_429_says_when_to_come_again() -> None:
    error = RequestError("rate_limit_exceeded", "too much")
    response = error_response(error, retry_after=7)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert b"rate_limit_error" in error_body(error)


@pytest.mark.parametrize(
    ("line", "priority", "allowed"),
    [
        ("k", 0, True), ("k", 1000, True), ("k", -1, False), ("k min_priority=-10", -10, True),
        ("k min_priority=-10", -11, False), ("k min_priority=5", 0, False), ("k role=proxy", -1, False),
        (None, -1000, True),
    ],
)  # fmt: skip
def test_a_key_raises_its_priority_only_as_far_as_it_may(line: str | None, priority: int, allowed: bool) -> None:
    owner = owner_of(parse_key(line), "") if line else owner_of(None, "")
    info = EngineInfo(
        model_path="m", vocab_size=50, max_model_len=64, num_blocks=4, block_size=4, kv_dtype="float32", memory={}
    )
    asked = CompletionRequest(model="m", prompt=[1, 2], priority=priority)

    def requests() -> list[Request]:
        return completion_requests(asked, None, info, "r", owner=owner)  # type: ignore[arg-type]

    if allowed:
        assert requests()[0].priority == priority
    else:
        with pytest.raises(RequestError) as caught:
            requests()
        assert (caught.value.code, caught.value.param) == ("permission_denied", "priority")


def test_the_weight_of_a_key_reaches_the_engine() -> None:
    assert owner_of(parse_key("k weight=2.5"), "").weight == 2.5
    assert owner_of(parse_key("k weight=2 role=proxy"), "0" * 32).weight == 2
    assert NOBODY == Owner() == owner_of(None, "")
    for wrong in ("0", "-1", "1000", "nan", "x"):
        with pytest.raises(ValueError, match="weight"):
            parse_key(f"k weight={wrong}")
