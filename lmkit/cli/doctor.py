"""`lmkit doctor`: what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine can run: packages, processor, kernels, memory, GPU."""
    from lmkit.devices import CPU, CUDA
    from lmkit.kernels.cpu import isa

    report = {
        "packages": _packages(),
        "extras": _extras(),
        "machine": _machine(),
        "environment": _environment(),
        "kernels": {"instruction set": isa.describe(), **_kernels(CPU.name)},
        "caches": _caches(),
        "gpu": _gpu(),
    }
    if "capability" in report["gpu"]:
        report["kernels on the gpu"] = _kernels(CUDA.name)
        report["self-tests"] = _self_tests()
    if json:
        print(jsonlib.dumps(report, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for section, rows in report.items():
        table.add_row(Text(section, style="bold"), "")
        for key, value in rows.items():
            table.add_row(f"  {key}", Text(str(value)))  # Text: lmkit[cuda] is no markup
    Console().print(table)


def _packages() -> dict[str, str]:
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("lmkit", "torch", "numba", "tokenizers", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing: pip install lmkit"
    return found


def _extras() -> dict[str, str]:
    """For each extra, what it is for, and how to get what is missing."""
    from lmkit.extras import EXTRAS, install

    found = {}
    for name, extra in EXTRAS.items():
        missing = ", ".join(extra.missing())
        state = f"{missing} missing: {install(name)}" if missing else "installed"
        found[name] = f"{state} ({extra.purpose})"
    return found


def _machine() -> dict[str, str]:
    from lmkit import cores
    from lmkit.environment import default_num_threads
    from lmkit.turbo.host_memory import available_memory, gib

    threads = f"{default_num_threads()} ({cores.available().describe()})"
    return {"threads": threads, "free memory": gib(available_memory())}


def _environment() -> dict[str, str]:
    """The variables of lmkit that are set. Keys are not shown."""
    from lmkit.environment import lmkit_variables

    found = lmkit_variables()
    return {name: "set" if name == "LMKIT_API_KEY" else text for name, text in found.items()}


def _kernels(device: str) -> dict[str, Any]:
    """For each op, the implementation that a usual layer gets on the device, and the reasons of the others."""
    import torch

    import lmkit.kernels  # noqa: F401 - registers them
    from lmkit.kernels import ops
    from lmkit.kernels.registry import Op

    heads = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8}
    linear = {"out_features": 4096, "in_features": 4096}
    groups, rows = {"group_size": 128, **linear}, {"group_size": -1, "bits": 8, **linear}
    traits: dict[str, dict[str, Any]] = {
        "rope_append": {"rotary_dim": 128, **heads},
        "rope_paged_attention": {"rotary_dim": 128, **heads},
        "kv_append": heads,
        "paged_attention": heads,
        "gated_delta": {"key_dim": 128, "kernel": 4},
        "linear_dense": {"dtype": torch.bfloat16, **linear},
        "linear_w4a16": {"bits": 4, **groups},
        "linear_w4a8": {"bits": 4, **groups},
        "linear_w8a8": rows,
        "linear_w8a16": rows,
        "linear_fp8": rows,
        "linear_fp8_a8": rows,
    }
    found: dict[str, Any] = {}
    for op in vars(ops).values():
        if isinstance(op, Op):
            asked = traits.get(op.name, {})
            offered = [impl for impl in op.implementations if impl.device in (device, "any")]
            refused = [f"{x.name}: {reason}" for x in offered if (reason := x.accepts(**asked)) is not None]
            chosen = op.select(device, **asked).name
            found[op.name] = chosen + (f" (not {'; '.join(refused)})" if refused else "")
    return found


def _caches() -> dict[str, str]:
    """Folder and size of the files kept between starts."""
    from lmkit.environment import environment
    from lmkit.kernels.cpu import jit
    from lmkit.turbo.host_memory import gib

    packed = environment().cache_dir / "packed"
    rows = {"compiled kernels": jit.cache_directory(), "packed weights": packed}
    sizes = {
        name: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for name, folder in rows.items()
    }
    return {name: f"{folder} ({gib(sizes[name])})" for name, folder in rows.items()} | {
        "packed weights, first": "<checkpoint>/.lmkit, if it can be written"
    }


def _gpu() -> dict[str, str]:
    """The GPU and its software, or what is missing and the command that helps."""
    import torch

    from lmkit.kernels.cuda import module

    problem = module.missing()
    if not torch.cuda.is_available():
        rows = {"device": f"none: {problem}", "engine": "models run on the CPU"}
        if torch.version.cuda is None:
            rows["torch"] = f"{torch.__version__} is built without CUDA: on a machine with a GPU, pip install torch"
        return rows
    from lmkit.turbo.host_memory import gib

    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "memory": f"{gib(free)} free of {gib(total)}",
        "driver": _driver(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        **_cupy(),
        "engine": "models run on the GPU" if problem is None else f"through torch, slowly: {problem}",
    }


def _self_tests() -> dict[str, str]:
    """For each model that was tested on this GPU, what was found."""
    from lmkit.turbo.engine import self_test

    return {found.model: f"{found.text} [{found.on}]" for found in reversed(self_test.results())}


def _driver() -> str:
    """The version of NVIDIA's driver, from its kernel module."""
    from pathlib import Path

    try:
        line = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"
    return next((word for word in line.split() if word[0].isdigit() and "." in word), line)


def _cupy() -> dict[str, str]:
    try:
        import cupy
    except ImportError:
        return {"cupy": "missing: pip install 'lmkit[cuda]' (CUDA 13) or 'lmkit[cuda12]'"}
    try:
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except (AttributeError, ImportError, RuntimeError) as error:
        nvrtc = f"cannot be loaded: {error}"
    return {"cupy": cupy.__version__, "nvrtc": nvrtc}
