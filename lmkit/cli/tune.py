"""`lmkit tune MODEL`: measure the plans of a model's products, and splits of its attention, on this GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from lmkit.config import Activations


def tune(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a .gguf file, or "demo".')],
    plans: Annotated[int, typer.Option(min=1, help="Plans to measure for each shape and number of tokens.")] = 8,
    activations: Annotated[Activations, typer.Option(help="Rounding of inputs, as in `lmkit serve`.")] = "auto",
) -> None:
    """Measure how a model's products and attention are computed fastest on this GPU, and keep it for engines."""
    from lmkit.turbo.engine.tuning import tune_model
    from lmkit.turbo.runners.cuda_device import CudaDevice

    tuned = tune_model(model, CudaDevice.opened(), num_plans=plans, activations=activations)
    for entry in tuned.entries:
        key, plan = entry.key, entry.plan
        how = "the library" if plan is None else plan.words
        what = f"{key.outputs} x {key.inputs}, {key.bits} bits"
        what, unit = (f"{key.experts} experts of {what}", "pairs") if key.experts else (what, "tokens")
        print(f"{what}: up to {entry.tokens} {unit} {entry.microseconds:.1f} us, {how}")
    for cost in tuned.split_costs:
        shape = cost.key
        heads = f"heads of {shape.head_dim}, {shape.queries} for each KV head, KV of {shape.bits} bits"
        print(f"attention, {heads}: a split costs {cost.tiles} tiles")
    for each in tuned.wide_blocks:
        rows = f"rows of {each.key.row_dim}, {each.key.queries} queries each, KV of {each.key.bits} bits"
        print(f"attention, {rows}: split into {each.blocks} blocks of a multiprocessor")
    for gain in tuned.latent_gains:
        print(f"latent attention of {gain.key.heads} heads: plain heads save {gain.factor:.2f} of the estimate")
    print(f"{tuned.path}: engines use these plans from their next start on")
