"""The only reader of the process' environment: the variables of lmkit, of launchers and of libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NamedTuple

from lmkit import cores
from lmkit.config import StrictStruct, checked_level
from lmkit.errors import ConfigError
from lmkit.option import notes_of


class Variable(NamedTuple):
    """`ca_file: Annotated[str | None, Variable("LMKIT_CA_FILE", "...")]` is read from `LMKIT_CA_FILE`."""

    name: str
    help: str
    readers: str = "all"  # the commands


class Environment(StrictStruct, frozen=True):
    """All environment variables that lmkit reads. Those in an annotation are its own; docs/reference.md lists them."""

    api_key: Annotated[
        str | None,
        Variable(
            "LMKIT_API_KEY",
            "the key that a server takes, and that a client sends; several for a server have spaces between them",
            "`serve`, `chat`, `proxy add`, `remove`, `status`",
        ),
    ]
    ca_file: Annotated[
        str | None,
        Variable(
            "LMKIT_CA_FILE", "authorities in PEM that they trust beside the usual ones", "`chat`, `bench`, `proxy`"
        ),
    ]
    cache_dir: Annotated[
        Path, Variable("LMKIT_CACHE_DIR", "compiled kernels and packed weights; default `~/.cache/lmkit`")
    ]
    state_dir: Annotated[
        Path,
        Variable("LMKIT_STATE_DIR", "the lists of known models and of running servers; default `~/.local/state/lmkit`"),
    ]
    cpu_isa: Annotated[
        str | None,
        Variable(
            "LMKIT_CPU_ISA",
            "a lower path of the CPU kernels: amx, avx512_vnni, avx_vnni, avx2, neon_i8mm, neon_dot or portable",
        ),
    ]
    cuda: Annotated[
        str,
        Variable(
            "LMKIT_CUDA",
            "parts of the engine on a GPU to turn on or off, such as `overlap=off` ([cuda.md](cuda.md#switches))",
        ),
    ]
    log_level: Annotated[str, Variable("LMKIT_LOG_LEVEL", "DEBUG, INFO, WARNING, ERROR or CRITICAL")]
    num_threads: Annotated[
        int | None,
        Variable(
            "LMKIT_NUM_THREADS",
            "threads of the CPU kernels; default the physical cores that the process may use",
        ),
    ]
    visible_gpus: str | None  # CUDA_VISIBLE_DEVICES, which CUDA reads; None = all
    rank: int  # of this process among these
    rendezvous: tuple[str, int]  # HOST, PORT at which processes of torchrun find each other
    world_size: int  # processes of one quantization on all machines, as its launcher sets it
    local_world_size: int  # processes of one quantization on this machine
    traces: bool  # OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, which OpenTelemetry reads, is set


# Those that every command reads. `lmkit serve` and `lmkit proxy` read one for each of their options as well.
VARIABLES = {note.name: note for note in notes_of(Environment, Variable).values()}


def environment() -> Environment:
    """Read the environment. Raises ConfigError for a value that cannot be used."""
    threads = os.environ.get("LMKIT_NUM_THREADS")
    if threads is not None and not (threads.isdecimal() and int(threads) > 0):
        raise ConfigError(f"LMKIT_NUM_THREADS={threads!r}: expected a positive integer")
    return Environment(
        cpu_isa=os.environ.get("LMKIT_CPU_ISA") or None,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cuda=os.environ.get("LMKIT_CUDA") or "",
        num_threads=int(threads) if threads else None,
        cache_dir=_folder("LMKIT_CACHE_DIR", "XDG_CACHE_HOME", "~/.cache"),
        state_dir=_folder("LMKIT_STATE_DIR", "XDG_STATE_HOME", "~/.local/state"),
        log_level=checked_level(os.environ.get("LMKIT_LOG_LEVEL") or "INFO", "LMKIT_LOG_LEVEL="),
        rank=_number("RANK", 0),
        rendezvous=(os.environ.get("MASTER_ADDR") or "127.0.0.1", _number("MASTER_PORT", 29500)),
        world_size=_launched("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        local_world_size=_launched("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        ca_file=os.environ.get("LMKIT_CA_FILE") or None,
        traces=any(os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_")),
        api_key=os.environ.get("LMKIT_API_KEY") or None,
    )


def _folder(own: str, parent: str, default: str) -> Path:
    """The folder that `own` names, else that of lmkit in the user's folder of this kind (XDG base directories)."""
    return Path(os.environ.get(own) or os.path.join(os.environ.get(parent) or os.path.expanduser(default), "lmkit"))


def lmkit_variables() -> dict[str, str]:
    """The variables LMKIT_* that are set and not empty."""
    return {name: text for name, text in sorted(os.environ.items()) if name.startswith("LMKIT_") and text}


def child_environment(**added: str) -> dict[str, str]:
    """This process' environment for a server that it starts, without its own options, with variables added."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("LMKIT_") or name in VARIABLES}
    kept.pop("LMKIT_API_KEY", None)
    return kept | added


def default_num_threads() -> int:
    """LMKIT_NUM_THREADS, else this process' share of the physical cores that it may use."""
    here = environment()
    return here.num_threads or max(1, cores.available().usable // here.local_world_size)


def calm_openmp() -> None:
    """Make the OpenMP threads of torch wait for work a fraction of a millisecond before they sleep, unless the user
    chose (libgomp's GOMP_SPINCOUNT). By default each spins for several after every step, on a core that other processes
    may need. For the entry of a process: torch's runtime reads it when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def tokenize_serially() -> None:
    """Make the tokenizers library work in the calling thread. By default all calls share threads of the library, and a
    short text waits until long ones are done. For the entry of a server, before it has threads.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _launched(*names: str) -> int:
    """A count that torchrun (the first name), Open MPI or MPICH sets for its processes; 1 without a launcher."""
    given = next((os.environ[name] for name in names if name in os.environ), "1")
    if not (given.isdecimal() and int(given) > 0):
        raise ConfigError(f"{names[0]}={given!r}: expected a positive integer")
    return int(given)


def _number(name: str, default: int) -> int:
    """A number that torchrun sets. Raises ConfigError if it is none."""
    given = os.environ.get(name) or str(default)
    if not given.isdecimal():
        raise ConfigError(f"{name}={given!r}: expected a number")
    return int(given)
