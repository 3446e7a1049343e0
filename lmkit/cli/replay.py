"""`lmkit replay RECEIPT`: check a receipt, and compute its answer again."""

from __future__ import annotations

import base64
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.errors import ConfigError

if TYPE_CHECKING:
    from lmkit.web.receipt import Choice, Receipt

MAX_BYTES = 64 << 20


class Outcome(IntEnum):
    """Exit codes, beside 2 for a mistake of the user."""

    EQUAL = 0
    PARTS = 1  # the answer is another, and nothing says why
    DIFFERS = 3  # the answer is another, and something that decides it is another, too
    FORGED = 4  # the signature is wrong


def replay(
    receipt: Annotated[Path, typer.Argument(help="A receipt as GET /receipts/ID gives it.")],
    prompt: Annotated[
        Path | None,
        typer.Option(help="A JSON list of token ids, the JSON body of the request, or the text of the prompt."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Compute it here with this checkpoint.")] = None,
    server: Annotated[str | None, typer.Option(help="Let the server at http://HOST:PORT compute it.")] = None,
    key: Annotated[
        str | None, typer.Option(help="The public key: a file, a URL or base64. Default: the one in the receipt.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="For the server; default LMKIT_API_KEY.")] = None,
    adapter: Annotated[str | None, typer.Option(help="The adapter's folder, if one answered.")] = None,
) -> None:
    """Check a receipt's signature. With a prompt and a model or server, compute its answers again and say whether they
    are equal, or where they part. Status: 0 equal, 1 they part, 3 they part and something else differs too, 4 the
    signature is wrong."""
    from lmkit.small_files import read
    from lmkit.web.receipt import is_signed, key_id
    from lmkit.web.receipt import read as read_receipts

    worst = Outcome.EQUAL
    if prompt is not None and (model is None) == (server is None):
        raise ConfigError("replay: say who computes it again: --model PATH, or --server URL")
    found = read_receipts(read(receipt, MAX_BYTES))
    if found.silent:
        print(f"parts may be missing: {', '.join(found.silent)} did not answer")
    public_key = None if key is None else _public(key, api_key)
    for part in found.receipts:
        public = public_key or part.key
        if not is_signed(part, public):
            print(f"{part.record.id}: the signature is not one of key {key_id(public)}")
            raise typer.Exit(Outcome.FORGED)
        whose = "its own key" if key is None else "key"
        print(f"{part.record.id}: signed with {whose} {key_id(public)}")
        if prompt is not None:
            worst = max(worst, _replayed(part, read(prompt, MAX_BYTES), model, server, api_key, adapter))
    raise typer.Exit(worst)


def _public(given: str, api_key: str | None) -> str:
    """A public key in base64, from where `given` says. Raises ConfigError."""
    import httpx
    import msgspec

    from lmkit.small_files import read
    from lmkit.web.client import client_options
    from lmkit.web.receipt import KEY_BYTES

    if given.startswith(("http://", "https://")):
        base, _, _ = given.rstrip("/").partition("/receipts/key")
        try:
            with httpx.Client(**client_options(base, api_key, timeout=30)) as http:
                return str(http.get("/receipts/key").raise_for_status().json()["key"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise ConfigError(f"{given}: no public key: {error}") from None
    try:
        text = read(Path(given), MAX_BYTES).decode().strip() if Path(given).is_file() else given
        public = str(msgspec.json.decode(text)["key"]) if text.startswith("{") else text
        if len(base64.b64decode(public, validate=True)) == KEY_BYTES:
            return public
    except (OSError, KeyError, ValueError, msgspec.MsgspecError):
        pass
    raise ConfigError(f"--key {given[:128]}: neither a file nor the base64 of a public key")


def _replayed(
    receipt: Receipt, data: bytes, model: str | None, server: str | None, api_key: str | None, adapter: str | None
) -> Outcome:
    """Compute the answers of one receipt again, and print what becomes of each."""
    from lmkit.cli.replayed import Here, There
    from lmkit.web.receipt import parting

    record = receipt.record
    if receipt.salt is None:
        raise ConfigError("this receipt has no salt: nothing can be compared with its commitments")
    salt, outcome = bytes.fromhex(receipt.salt), Outcome.EQUAL
    maker = Here(str(model), record, adapter) if server is None else There(server, record, api_key)
    with maker:
        differences = maker.differences()
        for line in differences:
            print(f"  another {line}")
        requests = maker.requests(data, salt)
        for number, (choice, request) in enumerate(zip(record.choices, requests, strict=True)):
            at = parting(salt, choice, maker.answer(request, choice))
            print(f"  answer {number}: {_said(choice, at)}")
            if at is not None:
                outcome = max(outcome, Outcome.DIFFERS if differences else Outcome.PARTS)
    return outcome


def _said(choice: Choice, at: int | None) -> str:
    if at is None:
        return f"equal, {choice.answer_tokens} tokens"
    if choice.stride == 1:
        return f"parts at token {at} of {choice.answer_tokens}"
    return f"parts at a token from {at} to {at + choice.stride - 1} of {choice.answer_tokens}"
