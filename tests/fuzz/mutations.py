"""Seeded mutations of bytes and of JSON, and the sizes at which fuzzing runs."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Few in `make test`, many in `make test-all`. A seed and a number name one mutant.
SIZES = [60, pytest.param(20_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])]

_NUMBERS = [0, 1, -1, 0.5, 1e308, 2**31, 2**63, 2**64, -(2**63), 10**30]
_TEXTS = ["", "a", "a" * 5000, "\x00", "é🙂", "../../etc/passwd", "{{ 7 * 7 }}", "%s%n", "null"]
_PIECES = [b"\x00", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\r\n", b"\n\n", b'"', b"{", b"[" * 50, b"\x80", b"1e9999"]


def mutated_bytes(seed: bytes, rng: random.Random) -> bytes:
    """`seed` with one to six small damages."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        length = min(rng.choice([1, 2, 4, 8, 64]), len(data) - at)
        match rng.randrange(7):
            case 0 if length:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = rng.choice(_PIECES)
            case 3:
                data[at : at + length] = rng.randbytes(length)
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                data[at : at + length] = rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1]).to_bytes(8, "little")[:length]
            case _:
                del data[at:]
    return bytes(data)


def mutated_json(value: Any, rng: random.Random) -> Any:
    """A copy of `value` in which one to three values or keys are others."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(copy)) or [({"": copy}, "")])
        match rng.randrange(6):
            case 0:
                holder[key] = _other(rng)
            case 1 if isinstance(holder, dict):
                holder[rng.choice(_TEXTS)] = holder.pop(key)
            case 2:
                del holder[key]
            case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                holder[key] = rng.choice([holder[key] * 2, holder[key] + 1, -holder[key], *_NUMBERS])
            case 4:
                holder[key] = [holder[key]] * rng.choice([0, 1, 3, 300])
            case _:
                holder[key] = {rng.choice(_TEXTS): holder[key]}
    return copy


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key or index) in `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _other(rng: random.Random) -> Any:
    deep: Any = 1
    for _ in range(rng.choice([0, 0, 0, 250])):
        deep = [deep]
    return rng.choice([None, True, False, [], {}, deep, rng.choice(_NUMBERS), rng.choice(_TEXTS), [[]], {"a": {}}])


def survives(number: int, name: str, attempt: Callable[[random.Random], None], allowed: type[BaseException]) -> None:
    """Run `attempt` on `number` mutants. Only `allowed` may come out."""
    outcomes = {"accepted": 0, "refused": 0}
    for index in range(number):
        try:
            attempt(random.Random(f"{name} {index}"))
            outcomes["accepted"] += 1
        except allowed:
            outcomes["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"mutant {index} of {name}: {type(error).__name__}: {str(error)[:300]}") from error
    logging.getLogger(__name__).info("%s: %s", name, outcomes)  # seen with --log-cli-level INFO
    assert outcomes["refused"], "no mutant was refused: the mutations miss"
