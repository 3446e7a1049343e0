"""`lmkit tune MODEL`: measure the plans of a model's products on this GPU."""

from __future__ import annotations

from typing import Annotated

import typer


def tune(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, or "demo".')],
    plans: Annotated[int, typer.Option(min=1, help="Plans to measure for each shape and number of tokens.")] = 8,
) -> None:
    """Measure which plans compute the products of a model fastest on this GPU, and keep them for engines."""
    from lmkit.config import EngineConfig
    from lmkit.turbo.engine.tuning import tune_model
    from lmkit.turbo.runners.device import CudaDevice, resolve_device

    device = resolve_device(EngineConfig(device="cuda"))
    assert isinstance(device, CudaDevice)
    entries, path = tune_model(model, device, num_plans=plans)
    for entry in entries:
        key, plan = entry.key, entry.plan
        how = "the library" if plan is None else plan.words
        what = f"{key.outputs} x {key.inputs}, {key.bits} bits"
        print(f"{what}: up to {entry.tokens} tokens {entry.microseconds:.1f} us, {how}")
    print(f"{path}: engines use these plans from their next start on")
