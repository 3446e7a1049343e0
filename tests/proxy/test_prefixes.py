"""Which node probably has the beginning of a prompt."""

from __future__ import annotations

import itertools
import json
from base64 import b64encode
from random import Random

import pytest

from lmkit.proxy.asked import read_asked
from lmkit.proxy.prefixes import CHUNK_BYTES, MAX_BYTES, Cut, PrefixIndex, cuts

PROMPT = Random(0).randbytes(64 << 10)


def test_cuts_depend_on_the_bytes_and_not_on_the_parts() -> None:
    whole = cuts([PROMPT])
    assert whole == cuts([PROMPT[:5], b"", PROMPT[5:4096], PROMPT[4096:]])
    assert [cut.end for cut in whole[:3]] == [256, 512, 768]
    assert whole[: len(cuts([PROMPT[:9999]]))] == cuts([PROMPT[:9999]])
    assert cuts([PROMPT], b"another tenant")[0].digest != whole[0].digest
    assert cuts([b"x" * (CHUNK_BYTES - 1)]) == []


def test_a_change_parts_everything_behind_it() -> None:
    changed = bytearray(PROMPT)
    changed[1000] ^= 1
    same = [a == b for a, b in zip(cuts([PROMPT]), cuts([bytes(changed)]), strict=True)]
    assert same == [True] * 3 + [False] * (len(same) - 3)


def test_cuts_of_a_long_prompt_are_few_and_bounded() -> None:
    found = cuts([bytes(4 * MAX_BYTES)])
    assert len(found) < 150
    assert found[-1].end <= MAX_BYTES
    assert all(after.end - cut.end <= max(CHUNK_BYTES, cut.end / 16) for cut, after in itertools.pairwise(found))


def test_the_longest_beginning_of_each_node_is_found() -> None:
    index = PrefixIndex[str]()
    index.add("a", cuts([PROMPT[:1024]]))
    index.add("b", cuts([PROMPT[:2048]]))
    index.add("c", cuts([b"something else" * 100]))
    assert index.cached(cuts([PROMPT[:1500]])) == {"a": 256, "b": 320}
    assert index.cached(cuts([PROMPT])) == {"a": 256, "b": 512}
    assert index.cached(cuts([b"unknown" * 100])) == {}
    assert index.cached([]) == {}
    index.forget("b")
    assert index.cached(cuts([PROMPT])) == {"a": 256}


def test_what_was_used_longest_ago_leaves_first_and_ends_before_beginnings() -> None:
    index = PrefixIndex[str]()
    old, new = cuts([PROMPT[:1024]]), cuts([b"new" * 1000])[:4]
    index.add("a", old, 512)
    index.add("a", new, 384)  # 256 + 256 tokens do not fit
    assert index.cached(new) == {"a": 256}
    assert index.cached(old) == {"a": 128}


def test_the_index_is_bounded_over_all_nodes() -> None:
    index, rng = PrefixIndex[int](max_entries=100), Random(1)
    for i in range(1000):
        index.add(i % 10, cuts([rng.randbytes(3000)]))
    assert len(index) <= 100
    for node in range(10):
        index.forget(node)
    assert len(index) == 0
    assert index._holders == {}


def turn(count: int, **fields: object) -> bytes:
    messages = [{"role": "user" if i % 2 else "assistant", "content": f"{i} " * 300} for i in range(count)]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_a_turn_begins_like_the_turn_before_it() -> None:
    first, second = (cuts(read_asked(turn(count)).parts()) for count in (3, 5))
    assert len(first) > 5
    assert second[: len(first)] == first


def test_tools_stand_before_messages_and_other_fields_do_not_matter() -> None:
    plain, other = (cuts(read_asked(turn(3, **fields)).parts()) for fields in ({}, {"n": 2, "stream": True}))
    assert plain == other
    tools = cuts(read_asked(turn(3, tools=[{"type": "function"}])).parts())
    assert tools[0] != plain[0]


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ([], {}, ""),
        ([], {"user": "u"}, "u"),
        ([], {"user": "u", "session_id": "s"}, "s"),
        ([(b"x-session-token", b"t")], {"session_id": "s"}, "t"),
        ([(b"x-session-token", b"")], {"session_id": 5, "user": {"a": [1]}}, ""),
        ([], {"user": "u" * 10_000}, "u" * 256),
    ],
)
def test_sessions(headers: list[tuple[bytes, bytes]], fields: dict[str, object], expected: str) -> None:
    assert read_asked(turn(1, **fields)).session(headers) == expected


def test_an_image_counts_as_its_tokens_and_by_its_bytes() -> None:
    """Prompts part where their images differ, and what comes after an image of megabytes is seen."""

    def seen(file: bytes, text: str) -> tuple[list[Cut], int]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file).decode()}"}}
        content = [image, {"type": "text", "text": text}]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
        parts = list(read_asked(body).parts())
        return cuts(parts), sum(map(len, parts))

    cat, dog = bytes(3 << 20), bytes(3 << 20)[:-1] + b"x"
    first, size = seen(cat, "What is it? " * 100)
    assert 4096 < size < 4096 + 2000
    assert seen(cat, "What is it? " * 100) == (first, size)
    assert seen(cat, "And where? " * 100)[0][:16] == first[:16]
    assert seen(cat, "And where? " * 100)[0] != first
    assert not {*seen(dog, "What is it? " * 100)[0]} & {*first}
    small, _ = seen(b"icon", "What is it? " * 100)
    assert seen(b"more", "What is it? " * 100)[0] != small
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(cat).decode()}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [block, block]}]}).encode()
    assert 2 * 4096 < sum(map(len, read_asked(body).parts())) < 2 * 4096 + 400


def test_what_a_node_has_not_used_for_long_is_lost() -> None:
    index = PrefixIndex[str]()
    prompts = [cuts([Random(i).randbytes(4096)]) for i in range(5)]
    for i, prompt in enumerate(prompts):
        index.add("a", prompt, now=float(i))
        index.add("b", prompt, now=float(i))
    index.touch("a", prompts[0], 9.0)
    index.touch("gone", prompts[0], 9.0)
    index.expire("a", 2.0)
    index.expire("gone", 2.0)
    has = [index.cached(prompt).keys() for prompt in prompts]
    assert has == [{"a", "b"}, {"b"}, {"b"}, {"a", "b"}, {"a", "b"}]
    assert index._sizes == {"a": 3 * 4096, "b": 5 * 4096}
    index.expire("a", 100.0)
    assert index._sizes["a"] == 0
    assert all(index.cached(prompt).keys() == {"b"} for prompt in prompts)
