"""Receipts of answers: GET /receipts/ID for the client whose answer it was, GET /receipts/key for the public key.

An answer gets one if its request has the header `x-lmkit-receipt: 1`, or all do (`--receipts`). The answer's header of
that name has the id. What is kept are commitments (web.receipt), no texts and no tokens. A receipt is signed when it is
fetched, once the digests of the model's files are known, which takes a second for each gigabyte on the first time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from lmkit.environment import environment
from lmkit.errors import RequestError, UnsupportedError
from lmkit.formats.fingerprint import content_digest
from lmkit.serve.auth import Owner, owner
from lmkit.serve.serving import Serving
from lmkit.turbo.request import ImageInput, SamplingParams
from lmkit.turbo.request import Request as EngineRequest
from lmkit.turbo.transport.output import RequestOutput
from lmkit.web.receipt import HEADER, HIDDEN, Choice, Receipt, Record, Signer, commit, commit_to, key_id, marks
from lmkit.web.resume import Known

Outputs = AsyncGenerator[tuple[int, RequestOutput]]
MAX_KEPT = 4096  # receipts of a server; the oldest leave
MAX_DIGESTS = 256
_PLAIN = SamplingParams()

router = APIRouter()


class _Kept(NamedTuple):
    owner: Owner
    server: Serving
    record: Record  # but for digests of files
    salt: bytes


class Noted:
    """One answer that gets a receipt."""

    def __init__(self, receipts: Receipts, id: str, server: Serving, owner: Owner) -> None:
        self.id, self._receipts, self._server, self._owner = id, receipts, server, owner
        self._created = int(time.time())

    async def noted(self, requests: Sequence[EngineRequest], known: Sequence[Known], outputs: Outputs) -> Outputs:
        """The outputs as they come. `known`: what another node gave."""
        ids: list[list[int]] = [[] for _ in requests]
        last: list[RequestOutput | None] = [None] * len(requests)
        try:
            async with aclosing(outputs):
                async for idx, output in outputs:
                    ids[idx] += output.token_ids
                    last[idx] = output
                    yield idx, output
        finally:  # also of an answer that was broken off
            salt = os.urandom(32)
            choices = [
                _choice(salt, request, tokens, sum(len(k.token_ids) for k in known if k.choice == idx), output)
                for idx, (request, tokens, output) in enumerate(zip(requests, ids, last, strict=True))
            ]
            record = Record(
                id=self.id,
                created=self._created,
                model=self._server.model_name,
                weights="",
                computed=self._server.info.computed,
                choices=choices,
            )
            self._receipts.keep(_Kept(self._owner, self._server, record, salt))


def _choice(salt: bytes, request: EngineRequest, tokens: list[int], known: int, output: RequestOutput | None) -> Choice:
    stride, found = marks(salt, tokens)
    return Choice(
        prompt=commit(salt, request.prompt_ids),
        prompt_tokens=len(request.prompt_ids),
        images=commit_to_images(salt, request.images),
        answer=commit(salt, tokens),
        answer_tokens=len(tokens),
        known_tokens=known,
        stride=stride,
        marks=found,
        sampling=_sampling(salt, request.params),
        finish=None if output is None else output.finish_reason,
        kv=[] if output is None else output.kv,
        preemptions=0 if output is None else output.num_preemptions,
    )


def commit_to_images(salt: bytes, images: Sequence[ImageInput]) -> str | msgspec.UnsetType:
    """The commitment to a prompt's images, whose token ids are the same for all of them; UNSET: it has none."""
    shown = [(image.start, image.digest.hex()) for image in images]
    return commit_to(salt, shown) if shown else msgspec.UNSET


def _sampling(salt: bytes, params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not those by default."""
    given, plain = msgspec.to_builtins(params), msgspec.to_builtins(_PLAIN)
    changed = {name: value for name, value in given.items() if value != plain[name]}
    return {name: commit_to(salt, value) if name in HIDDEN else value for name, value in changed.items()}


def commitments(salt: bytes, params: SamplingParams) -> dict[str, Any]:
    """What a record commits to of these parameters."""
    return {name: value for name, value in _sampling(salt, params).items() if name in HIDDEN}


class Receipts:
    """The receipts of a server's last answers."""

    def __init__(self, path: str | None, *, for_all: bool) -> None:
        """`path`: of the private key. Raises ConfigError and UnsupportedError if all answers get receipts."""
        self._path, self._for_all = Path(path or environment().cache_dir / "receipt.key"), for_all
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._digests: dict[tuple[str, str], str] = {}  # by path and edition
        self._signer: Signer | None = None
        if for_all or path is not None:
            self.signer()

    def signer(self) -> Signer:
        if self._signer is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._signer = Signer(self._path)
        return self._signer

    def begin(self, headers: Mapping[str, str], id: str, server: Serving, owner: Owner) -> Noted | None:
        """The receipt of an answer that begins, if it gets one. Raises RequestError."""
        asked = headers.get(HEADER)
        if asked not in (None, "0", "1"):
            raise RequestError("invalid_request", f"{HEADER}: expected 1", HEADER)
        if not (self._for_all or asked == "1") or asked == "0":
            return None
        self.checked()
        return Noted(self, id, server, owner)

    def checked(self) -> Signer:
        """The signer. Raises RequestError if this server has none."""
        try:
            return self.signer()
        except UnsupportedError as error:
            raise RequestError("unsupported_parameter", str(error), HEADER) from None

    def keep(self, kept: _Kept) -> None:
        self._kept[kept.record.id] = kept
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    async def get(self, id: str, owner: Owner) -> Receipt:
        """Raises RequestError for an unknown id, an answer of another client, and one that has not ended."""
        kept = self._kept.get(id)
        if kept is None or kept.owner[:2] != owner[:2]:
            raise RequestError("not_found", f"there is no receipt of {id[:128]!r}: it was not asked for, or is gone")
        server = kept.server
        folder = server.engine.config.adapter_folders[server.adapter] if server.adapter else ""
        try:
            weights = await self._digest(server.info.model_path, server.edition)
            adapter = await self._digest(folder, server.edition) if folder else ""
        except OSError as error:
            raise RequestError("engine_unavailable", f"the model's files cannot be read: {error.strerror}") from None
        choices = [replace(choice, adapter=adapter) for choice in kept.record.choices]
        return self.checked().sign(replace(kept.record, weights=weights, choices=choices), kept.salt)

    async def _digest(self, path: str, edition: str) -> str:
        """Of files that do not change under this edition. A thread for each receipt would cost more than to sign it."""
        if (path, edition) not in self._digests:
            if len(self._digests) >= MAX_DIGESTS:
                self._digests.clear()
            self._digests[path, edition] = await asyncio.to_thread(content_digest, Path(path))
        return self._digests[path, edition]


def receipts(request: Request) -> Receipts:
    found: Receipts = request.app.state.receipts
    return found


@router.get("/receipts/key")
async def key(request: Request) -> Response:
    """The public key, base64 of its 32 bytes."""
    public = receipts(request).checked().public
    shown = {"algorithm": "Ed25519", "key": public, "id": key_id(public)}
    return Response(msgspec.json.encode(shown), media_type="application/json")


@router.get("/receipts/{id}")
async def receipt(request: Request, id: str) -> Response:
    found = await receipts(request).get(id, owner(request))
    return Response(msgspec.json.encode(found), media_type="application/json")
