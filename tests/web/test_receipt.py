"""What a receipt commits to, and what its signature holds."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.errors import ConfigError
from lmkit.web.receipt import MOST_MARKS, Choice, Receipt, Record, Signer, commit, is_signed, marks, parting, read

SALT = bytes(range(32))


def choice(ids: list[int], **fields: Any) -> Choice:
    stride, found = marks(SALT, ids)
    return Choice(
        prompt=commit(SALT, [1, 2]), prompt_tokens=2, answer=commit(SALT, ids), answer_tokens=len(ids), stride=stride,
        marks=found, sampling={"seed": 3}, **fields,
    )  # fmt: skip


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Signer, Receipt]:
    signer = Signer(tmp_path / "key")
    computed = {"kernels": "k", "isa": "avx2", "options": {"kv_dtype": "int8"}}
    record = Record(id="chatcmpl-1", created=5, model="m", weights="w", computed=computed, choices=[choice([4, 5])])
    return signer, signer.sign(record, SALT)


def test_a_receipt_survives_the_wire_and_a_pretty_printer(signed: tuple[Signer, Receipt]) -> None:
    signer, receipt = signed
    data = msgspec.json.format(msgspec.json.encode(receipt), indent=2)
    (back,) = read(data).receipts
    assert back == receipt
    assert is_signed(back, signer.public)
    told = read(msgspec.json.encode({"parts": [receipt, receipt], "silent": ["http://a"]}))
    assert told == ([receipt, receipt], ["http://a"])


TAMPERED = [
    ("id", "chatcmpl-2"), ("model", "n"), ("weights", "v"), ("created", 6), ("computed", {"isa": "avx2"}),
    ("choices", []), ("choices", [choice([4, 6])]), ("choices", [choice([4, 5], preemptions=1)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), TAMPERED)
def test_nothing_of_a_record_can_be_changed(name: str, value: Any, signed: tuple[Signer, Receipt]) -> None:
    signer, receipt = signed
    forged = msgspec.structs.replace(receipt, record=msgspec.structs.replace(receipt.record, **{name: value}))
    assert not is_signed(forged, signer.public)


def test_another_key_does_not_pass(signed: tuple[Signer, Receipt], tmp_path: Path) -> None:
    _, receipt = signed
    other = Signer(tmp_path / "other")
    assert not is_signed(receipt, other.public)
    assert not is_signed(msgspec.structs.replace(receipt, signature="?"), receipt.key)
    assert not is_signed(receipt, "no key")


def test_the_key_is_this_users_alone_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "key"
    public = Signer(path).public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert Signer(path).public == public
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        Signer(path)
    path.chmod(0o600)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="cannot use the key"):
        Signer(path)


@pytest.mark.parametrize("count", [0, 1, 7, MOST_MARKS, MOST_MARKS + 1, 5 * MOST_MARKS - 3])
def test_where_answers_part(count: int) -> None:
    ids = [(7 * i) % 50 for i in range(count)]
    made = choice(ids)
    assert len(base64.b64decode(made.marks)) <= 2 * MOST_MARKS
    assert parting(SALT, made, ids) is None
    for at in {0, count // 3, count - 1} if count else set():
        other = [*ids[:at], 99, *ids[at + 1 :]]
        assert parting(SALT, made, other) == at // made.stride * made.stride
    for other in ([*ids, 1], ids[:-1]) if count else ():  # the end of one is in the last run of the other
        end = parting(SALT, made, other)
        assert end is not None
        assert len(other) - made.stride <= end <= count


def test_what_is_no_receipt() -> None:
    for data in (b"", b"[]", b"{}", b'{"record": 1}', b"\xff", b'{"parts": []}', b'{"parts": 1}'):
        with pytest.raises(ConfigError, match="no receipt"):
            read(data)


UNSIGNED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [  # of the receipt, record and choice
    ({}, {"verified": True}, {}, "unknown field `verified`"),
    ({}, {}, {"checked_by": "them"}, "unknown field `checked_by`"),
    ({}, {"lmkit_receipt": 2}, {}, "format 2"),
    ({}, {"choices": []}, {}, "no answer"),
    ({"salt": "xyz"}, {}, {}, "hexadecimal"),
    ({}, {}, {"marks": "?"}, "base64"),
    ({}, {}, {"stride": 0}, "numbers of tokens"),
    ({}, {}, {"answer_tokens": -1}, "numbers of tokens"),
]


@pytest.mark.parametrize(("receipt", "record", "answer", "words"), UNSIGNED)
def test_what_no_server_writes_is_refused(
    receipt: dict[str, Any], record: dict[str, Any], answer: dict[str, Any], words: str, signed: tuple[Signer, Receipt]
) -> None:
    """Else it would stand in a receipt whose signature is right, or stop a replay."""
    data = msgspec.to_builtins(signed[1])
    data["record"]["choices"][0] |= answer
    data["record"] |= record
    with pytest.raises(ConfigError, match=f"no receipt: .*{words}"):
        read(msgspec.json.encode(data | receipt))


def test_parts_are_of_one_answer(signed: tuple[Signer, Receipt]) -> None:
    signer, receipt = signed
    other = signer.sign(msgspec.structs.replace(receipt.record, id="chatcmpl-2"), SALT)
    with pytest.raises(ConfigError, match="several answers"):
        read(msgspec.json.encode({"parts": [receipt, other]}))
