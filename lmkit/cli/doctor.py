"""`lmkit doctor`: what this machine can run, and why not the rest."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Tell what this machine can run: packages, processor, kernels, memory, GPU."""
    report = {"packages": _packages(), "machine": _machine(), "kernels": _kernels(), "caches": _caches(), "gpu": _gpu()}
    if json:
        print(jsonlib.dumps(report, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for section, rows in report.items():
        table.add_row(f"[bold]{section}", "")
        for key, value in rows.items():
            table.add_row(f"  {key}", str(value))
    Console().print(table)


def _packages() -> dict[str, str]:
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("lmkit", "torch", "numba", "transformers", "tokenizers", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing: pip install lmkit"
    return found


def _machine() -> dict[str, str]:
    from lmkit.config import default_num_threads
    from lmkit.turbo.memory import available_memory, gib

    return {"threads": str(default_num_threads()), "free memory": gib(available_memory())}


def _kernels() -> dict[str, Any]:
    """For each op on the CPU: the implementation a usual layer gets, and what the others answered."""
    import torch

    from lmkit.kernels import ops
    from lmkit.kernels.cpu import isa
    from lmkit.kernels.registry import Op

    heads = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8}
    linear = {"out_features": 4096, "in_features": 4096}
    traits: dict[str, dict[str, Any]] = {
        "rope_append": {"rotary_dim": 128, **heads},
        "kv_append": heads,
        "paged_attention": heads,
        "linear_dense": {"dtype": torch.bfloat16, **linear},
        "linear_w4a16": {"group_size": 128, "bits": 4, **linear},
        "linear_w4a8": {"group_size": 128, "bits": 4, **linear},
        "linear_w8a8": {"group_size": -1, "bits": 8, **linear},
        "linear_w8a16": {"group_size": -1, "bits": 8, **linear},
        "linear_fp8": {"group_size": -1, "bits": 8, **linear},
    }
    rows: dict[str, Any] = {"instruction set": isa.describe()}
    for op in vars(ops).values():
        if isinstance(op, Op):
            chosen = op.select("cpu", **traits.get(op.name, {}))
            refused = [
                f"{impl.name}: {reason}"
                for impl in op.implementations
                if (reason := impl.accepts(**traits.get(op.name, {}))) is not None
            ]
            rows[op.name] = chosen.name + (f" (not {'; '.join(refused)})" if refused else "")
    return rows


def _caches() -> dict[str, str]:
    """Folder and size of what is kept between starts."""
    from lmkit.config import environment
    from lmkit.kernels.cpu import jit
    from lmkit.turbo.memory import gib

    packed = environment().cache_dir / "packed"
    rows = {"compiled kernels": jit.cache_directory(), "packed weights": packed}
    sizes = {
        name: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for name, folder in rows.items()
    }
    return {name: f"{folder} ({gib(sizes[name])})" for name, folder in rows.items()} | {
        "packed weights, first": "<checkpoint>/.lmkit, if it can be written"
    }


def _gpu() -> dict[str, str]:
    import importlib.util

    import torch

    if not torch.cuda.is_available():
        return {"device": "none that torch can use"}
    rows = {"device": torch.cuda.get_device_name(0)}
    rows["cupy"] = "installed" if importlib.util.find_spec("cupy") else "missing: pip install 'lmkit[cuda]'"
    rows["engine"] = "CUDA kernels are not part of this build: models run on the CPU"
    return rows
