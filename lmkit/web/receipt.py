"""Receipts: signed records of how an answer was computed, without its text.

    record      what computed the answer, how it was sampled, and commitments to its prompt and its tokens
    salt        32 random bytes, beside the record: the key of its commitments
    signature   Ed25519, of the record as JSON with sorted keys and no spaces

A commitment is HMAC-SHA256(salt, token ids as little-endian int32). Who has the record without its salt cannot test
guesses, however short the prompt is. Who has the salt, too, can: a holder who shows a receipt to others leaves it out,
and gives it to those who may check the tokens. `marks` are the first two bytes of the commitments to the answer's
beginnings, one for each `stride` tokens: they tell where a replay parts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lmkit.errors import JSON_ERRORS, ConfigError
from lmkit.extras import needed_for

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HEADER = "x-lmkit-receipt"  # of a request: 1; of its answer: the receipt's id
FORMAT = 1
KEY_BYTES = 32  # of a public key
MOST_MARKS = 512
MARK_BYTES = 2
HIDDEN = ("stop", "grammar", "logit_bias")  # parameters that hold parts of texts: the record commits to them


class Choice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the answers to a prompt."""

    prompt: str  # the commitment to its tokens, as hex
    prompt_tokens: int
    images: str | msgspec.UnsetType = msgspec.UNSET  # the commitment to its images and where they stand, if it has any
    answer: str
    answer_tokens: int
    known_tokens: int = 0  # the first of these, which another node had given
    stride: int = 1
    marks: str = ""  # base64
    sampling: dict[
        str, Any
    ]  # parameters that are not those by default, the seed among them; commitments to HIDDEN ones
    adapter: str = ""  # the digest of its files
    finish: str | None = None  # None: it was broken off, or moved to another node
    kv: list[tuple[int, str]] = []  # where the KV of the prompt came from: (end, source) of runs of tokens
    preemptions: int = 0


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What computed an answer. A field that is not signed is no part of it."""

    lmkit_receipt: int = FORMAT
    id: str
    created: int  # seconds since 1970
    model: str  # its name
    weights: str  # the digest of the model's files
    computed: dict[str, Any]  # kernels, instruction set, versions and options that change bits
    choices: list[Choice]


class Receipt(msgspec.Struct, kw_only=True):
    """A record with what proves it. Without `salt` nothing tells its tokens."""

    record: Record
    salt: str | None = None  # hex
    key: str  # the public key, base64
    signature: str  # base64


def _bytes(token_ids: Iterable[int]) -> bytes:
    """Each as 4 bytes, the lowest first, as on every processor that lmkit runs on."""
    return array("i", token_ids).tobytes()


def commit(salt: bytes, token_ids: Iterable[int]) -> str:
    """The commitment to these tokens."""
    return hmac.digest(salt, _bytes(token_ids), "sha256").hex()


def commit_to(salt: bytes, value: Any) -> str:
    """The commitment to a parameter."""
    plain = msgspec.to_builtins(value, str_keys=True)  # only such keys can be sorted
    return hmac.digest(salt, msgspec.json.encode(plain, order="sorted"), "sha256").hex()


def marks(salt: bytes, token_ids: list[int]) -> tuple[int, str]:
    """(stride, marks) of an answer."""
    stride = max(1, -(-len(token_ids) // MOST_MARKS))
    state, found = hmac.new(salt, digestmod="sha256"), bytearray()
    data = _bytes(token_ids)
    for start in range(0, len(data), 4 * stride):
        state.update(data[start : start + 4 * stride])
        found += state.copy().digest()[:MARK_BYTES]
    return stride, base64.b64encode(found).decode()


def parting(salt: bytes, choice: Choice, token_ids: list[int]) -> int | None:
    """The index of the first token, or of the first of `stride`, that another answer does not have; None: it is the
    same answer."""
    if commit(salt, token_ids) == choice.answer:
        return None
    same, stride = base64.b64decode(choice.marks), choice.stride
    state, data = hmac.new(salt, digestmod="sha256"), _bytes(token_ids)
    for i in range(0, len(same) // MARK_BYTES):
        state.update(data[4 * stride * i : 4 * stride * (i + 1)])
        if state.copy().digest()[:MARK_BYTES] != same[MARK_BYTES * i : MARK_BYTES * (i + 1)]:
            return i * stride
    return min(len(token_ids), choice.answer_tokens)


class Read(NamedTuple):
    """The receipts of an answer, and the nodes that may have further ones."""

    receipts: list[Receipt]
    silent: list[str]


def read(data: bytes) -> Read:
    """The receipts of a file: one, or the parts that a proxy gives. Raises ConfigError."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
        receipts = msgspec.convert(found.get("parts", [found]), list[Receipt])
        silent = msgspec.convert(found.get("silent", []), list[str])
        for receipt in receipts:
            _check(receipt)
    except (*JSON_ERRORS, ValueError) as error:
        raise ConfigError(f"this is no receipt: {error}") from None
    if len({receipt.record.id for receipt in receipts}) != 1:
        raise ConfigError(
            "these are the receipts of several answers" if receipts else "there is no receipt in this file"
        )
    return Read(receipts, silent)


def _check(receipt: Receipt) -> None:
    """Raises ValueError for what no server writes. Anybody can sign it with a key of their own."""
    record = receipt.record
    if record.lmkit_receipt != FORMAT:
        raise ValueError(f"it has format {record.lmkit_receipt}, and this version reads {FORMAT}")
    if not record.choices:
        raise ValueError("it has no answer")
    bytes.fromhex(receipt.salt or "")
    for choice in record.choices:
        base64.b64decode(choice.marks, validate=True)
        if min(choice.stride, choice.answer_tokens + 1) < 1:
            raise ValueError("its numbers of tokens are wrong")


def _signed(record: Record) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(record), order="sorted")


class Signer:
    """A private key in a file of this user's alone, made if there is none."""

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError for a file that cannot be used, and UnsupportedError without the package."""
        with needed_for("a receipt"):
            from cryptography.hazmat.primitives import serialization as forms
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        path = Path(path)
        try:
            if not path.exists():
                made = Ed25519PrivateKey.generate().private_bytes(
                    forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
                )
                partial = path.with_name(f"{path.name}.{os.getpid()}")
                with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(made)
                with suppress(FileExistsError):  # another server has just made one
                    os.link(partial, path)
                partial.unlink()
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{path}: others may read this key; chmod 600 {path}")
            key = forms.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: cannot use the key of receipts: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"{path}: the key of receipts is no Ed25519 key")
        self._key: Ed25519PrivateKey = key
        self.public = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    def sign(self, record: Record, salt: bytes) -> Receipt:
        signature = base64.b64encode(self._key.sign(_signed(record))).decode()
        return Receipt(record=record, salt=salt.hex(), key=self.public, signature=signature)


def is_signed(receipt: Receipt, public: str) -> bool:
    """Whether the owner of this public key has signed the record."""
    with needed_for("the signature of a receipt"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True))
        key.verify(base64.b64decode(receipt.signature, validate=True), _signed(receipt.record))
    except (ValueError, InvalidSignature):
        return False
    return receipt.key == public


def key_id(public: str) -> str:
    """A short name of a public key."""
    return hashlib.sha256(public.encode()).hexdigest()[:16]
