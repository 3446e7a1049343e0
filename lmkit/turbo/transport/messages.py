"""The messages between the front end and the engine process: these structs as msgpack, over two ZeroMQ sockets."""

from __future__ import annotations

import msgspec

from lmkit.turbo.request import EngineInfo, EngineStats, Request, Siblings, StepOutput

ENGINE = "lmkit.turbo.engine.engine:Engine"  # the class that the engine process runs by default
QUEUED_MESSAGES = 4096  # high-water mark of both sockets
BEAT_SECONDS = 0.5  # between signs of life


class Add(msgspec.Struct, frozen=True, tag=True):
    siblings: Siblings


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Compute a prompt once nothing else is to be done. Nothing comes back."""

    request: Request  # is_ahead


class SetAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load the adapter in a folder, beside the steps, or with None unload it, and say AdapterSet when that is done."""

    name: str
    folder: str | None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Close the engine, free its memory, say Asleep and wait for Wake. All requests end without an answer."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Load the model again, and say Ready."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Asleep(msgspec.Struct, frozen=True, tag=True):
    pass


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. It comes also while the engine loads, compiles or computes."""

    is_slow: bool = False  # the step under way has taken more than half of the time that it may take
    resident: int = 0  # bytes of memory that the process has


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, for a reason that its user can do something about."""

    kind: str  # class name of the LMKitError
    message: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The fields of the RequestError with which the engine refused a request."""

    request_id: str
    code: str
    message: str
    param: str | None


class AdapterSet(msgspec.Struct, frozen=True, tag=True):
    """The answer to SetAdapter: the adapter's path, None if it was unloaded, or the fields of a RequestError."""

    name: str
    path: str | None = None
    code: str = ""
    error: str = ""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[StepOutput]


class Stats(msgspec.Struct, frozen=True, tag=True):
    engine: EngineStats
    failures: int  # engine steps that raised since the start


Command = Add | Prepare | Abort | SetAdapter | Sleep | Wake | Shutdown
Event = Ready | Asleep | Beat | Failed | Refused | AdapterSet | Outputs | Stats
