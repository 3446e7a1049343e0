"""The self-test of a GPU's kernels, at an engine's first start on this GPU, driver and version of lmkit.

    engine --- query ---> process: each kernel beside torch         (self_test_process.py)
           <-- lines ---  at gemm.cu | off gemm_wide.cu: errors of ... | done

A process that ends or hangs has said at which kernel it was. It is started again without that kernel, until one says
that all is right. The engine then goes on without the same kernels. The result is kept in the cache folder. What there
was no time for is tested at the next start, which finds kernels compiled.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import lmkit
from lmkit.config import EngineConfig
from lmkit.ended import MemoryKills
from lmkit.environment import child_environment, environment
from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.cached_file import replace_file
from lmkit.kernels.cuda.switches import FILES, turn_off
from lmkit.log import get_logger
from lmkit.models.identity import sources_digest
from lmkit.turbo.request import SelfTest
from lmkit.turbo.runners.device import EngineDevice

if TYPE_CHECKING:
    from lmkit.models.resolved import ResolvedModel

log = get_logger(__name__)

SECONDS: float | None = 20.0  # after which no test begins, unless all are required; None: no end
HANG_SECONDS = 120.0  # of one kernel, with its compilation
LAST = "the end"  # a process that is past all kernels
SOURCES = "kernels/cuda/*.py", "kernels/cuda/csrc/*", "turbo/engine/self_test*.py"


class Query(msgspec.Struct, frozen=True):
    """What to test within how many seconds, and what to leave out, with the reasons."""

    model_path: str
    config: EngineConfig
    off: dict[str, str]
    seconds: float | None = None


class At(msgspec.Struct, frozen=True, tag=True):
    """A kernel's file, or a switch, that is used from here on. `fault`: it has failed for good."""

    name: str
    fault: str = ""


class Off(msgspec.Struct, frozen=True, tag=True):
    name: str
    reason: str


class Done(msgspec.Struct, frozen=True, tag=True):
    checks: int
    untested: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """There is no result. `broken`: because nothing computes the model right."""

    reason: str
    broken: bool


Said = At | Off | Done | Failed


def result(model: ResolvedModel, config: EngineConfig, device: EngineDevice) -> SelfTest | None:
    """Test the kernels of a model, unless it was done before, and go on without those that fail. None: it has none, or
    none are tested.

    Raises UnsupportedError if nothing computes the model right, or if `config` requires that all is right.
    """
    if not (device.self_test and device.has_kernels) or config.selftest == "off" or config.num_processes > 1:
        return None
    path = _path(model, config, device)
    found = _read(path)
    if found is None or found.untested:
        log.info("self-test: the kernels of this model are compared with torch, once on this GPU")
        seconds = None if config.selftest == "require" else SECONDS
        found = _tested(Query(str(model.reader.path), config, {}, seconds), device)
        if not found.problem:
            _write(path, found)
    if found.is_broken:
        raise UnsupportedError(f"this GPU does not compute the model right: {found.problem}; --selftest off tries it")
    if config.selftest == "require" and (found.off or found.problem):
        raise UnsupportedError(f"--selftest require: {found.text}")
    for name, reason in found.off.items():
        turn_off(name, reason)
    (log.warning if found.off or found.problem else log.info)("self-test: %s", found.text)
    return found


def _path(model: ResolvedModel, config: EngineConfig, device: EngineDevice) -> Path:
    """The file of a result, which holds for a device and its software, for kernels as they are, and for a model."""
    used = config.kv_dtype, config.deterministic, config.tokens_per_step, config.sequences_per_step
    facts = device.software(), lmkit.__version__, environment().cuda, model.spec, model.packing, model.storages, used
    text = sources_digest(SOURCES) + repr((*facts, config.tokens_per_block, config.max_model_len))
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def folder() -> Path:
    """Where results are kept."""
    return environment().cache_dir / "selftest"


def results() -> list[SelfTest]:
    """All results that are kept, the newest first."""
    files = sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime)
    return [found for file in files if (found := _read(file)) is not None]


def _read(path: Path) -> SelfTest | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SelfTest)
    except (OSError, msgspec.MsgspecError):
        return None


def _write(path: Path, found: SelfTest) -> None:
    try:
        replace_file(path, msgspec.json.encode(found))
    except OSError as error:
        log.warning("the self-test's result is not kept: %s", error.strerror)


def _tested(query: Query, device: EngineDevice) -> SelfTest:
    """Start processes until one says that all is right, or that nothing is."""
    start, off, software = time.perf_counter(), dict(query.off), device.software()
    for _ in range(len(FILES)):
        left = None if query.seconds is None else query.seconds - (time.perf_counter() - start)
        lines, ended = _run(msgspec.structs.replace(query, off=off, seconds=left), device)
        off |= {line.name: line.reason for line in lines if isinstance(line, Off)}
        last = lines[-1] if lines else None
        common = SelfTest(on=software, model=query.model_path, off=off, seconds=time.perf_counter() - start)
        if isinstance(last, Done):
            return msgspec.structs.replace(common, checks=last.checks, untested=last.untested)
        if isinstance(last, Failed):
            return msgspec.structs.replace(common, problem=last.reason, is_broken=last.broken)
        at = next((line for line in reversed(lines) if isinstance(line, At)), None)
        if at is None or at.name == LAST or at.name in off:
            break
        off[at.name] = at.fault or f"the process that tested it {ended}"
        log.warning("self-test: %s: %s", at.name, off[at.name])
    return msgspec.structs.replace(common, problem=f"the process {ended}; its log says why")


def _run(query: Query, device: EngineDevice) -> tuple[list[Said], str]:
    """What a process has said, and how it ended. One that says nothing for HANG_SECONDS is killed."""
    kills, lines, hung = MemoryKills(), list[Said](), False
    process = subprocess.Popen(
        [sys.executable, "-m", device.self_test],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
        cwd=Path(lmkit.__file__).parents[1],
    )
    heard = threading.Event()

    def watch() -> None:
        nonlocal hung
        while process.poll() is None:
            heard.clear()
            if not heard.wait(HANG_SECONDS):
                hung = True
                process.kill()
                return

    threading.Thread(target=watch, name="self-test", daemon=True).start()
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as pipe:
        pipe.write(msgspec.json.encode(query))
    with process.stdout as pipe:
        for line in pipe:
            heard.set()
            with suppress(msgspec.MsgspecError):  # libraries print, too
                lines.append(msgspec.json.decode(line, type=Said))
    status = process.wait()
    heard.set()
    return lines, "hung" if hung else kills.ended(status)
