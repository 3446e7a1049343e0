"""Hooks that the tests name as `tests.serve.hook_examples:Redact`."""

from __future__ import annotations

import os
import time
from typing import Any

PARTS: list[str] = []


class Redact:
    """Takes the word SECRET out of prompts, and `fox` out of answers."""

    def before(self, call: dict[str, Any]) -> dict[str, Any] | None:
        print("what a hook prints breaks nothing")  # noqa: T201
        body = call["body"]
        if "prompt" not in body or "SECRET" not in body["prompt"]:
            return None
        return {"body": body | {"prompt": body["prompt"].replace("SECRET", "xxx")}}

    def after(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"text": call["text"].replace("fox", "***")}


class Moderate:
    """Refuses prompts with FORBIDDEN and answers with `lazy`. It sees answers while they are written."""

    sees = "so_far"

    def before(self, call: dict[str, Any]) -> dict[str, Any] | None:
        return {"refuse": f"not on {call['route']}"} if "FORBIDDEN" in str(call["body"]) else None

    def after(self, call: dict[str, Any]) -> dict[str, Any] | None:
        return {"refuse": "not here"} if "lazy" in call["text"] else None


class Changes:
    """May not change a text of which a part is sent."""

    sees = "so_far"

    def after(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"text": call["text"].upper()}


class Fails:
    timeout = 2.0
    processes = 1

    def before(self, call: dict[str, Any]) -> Any:
        prompt = str(call["body"])
        if "RAISE" in prompt:
            raise ValueError(prompt)
        if "LEAVE" in prompt:
            os._exit(3)
        if "SLEEP" in prompt:
            time.sleep(60)
        return 7 if "SEVEN" in prompt else None


class FailsOpen(Fails):
    on_failure = "pass"


class Nothing:
    pass


class Wrong:
    sees = "some"

    def after(self, call: dict[str, Any]) -> None:
        pass


def _broken() -> None:
    raise RuntimeError("cannot be made")


class Breaks:
    def __init__(self) -> None:
        _broken()
