"""The process of a `Sandbox`: `python sandbox_process.py MODULE CPU_SECONDS MEMORY_BYTES`.

Its standard input is a socket. It ends when the socket's other side closes.

The kernel bounds its work: an answer that takes more processor time, memory or stack than allowed ends this process, or
is a MemoryError that the module catches. Neither this file nor the module imports anything of lmkit, so that the
process starts fast.

    request: the arguments of `answer`, a list     reply: [kind, value]     each a line of JSON
"""

from __future__ import annotations

import importlib.util
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType

import msgspec

BUFFER_BYTES = 1 << 18
STACK_BYTES = 2 << 20  # a quarter of what threads have elsewhere: input that passes here passes there


def main() -> None:
    path, cpu_seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    module = _load(path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + memory, in_use + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(module, cpu_seconds))
    thread.start()
    thread.join()


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(module: ModuleType, cpu_seconds: float) -> None:
    with socket.socket(fileno=sys.stdin.fileno()).makefile("rwb", BUFFER_BYTES) as stream:
        for request in stream:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # at its end, SIGPROF ends this process
            reply = _reply(module, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(reply + b"\n")
            stream.flush()


def _reply(module: ModuleType, request: bytes) -> bytes:
    try:
        return msgspec.json.encode(module.answer(*msgspec.json.decode(request)))
    except MemoryError:
        return msgspec.json.encode(("limit", ""))
    except UnicodeEncodeError:  # a lone surrogate, which the work itself wrote
        return msgspec.json.encode(("failed", ""))


if __name__ == "__main__":
    main()
