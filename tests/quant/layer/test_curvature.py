"""The curvature of the loss at the outputs of linears, and the descent that it weighs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.nvfp4 import NVFP4
from lmkit.kernels.cuda.module import tensor_device
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, QuantScheme, dequantize, int_scheme, quantize
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.kv import fit
from lmkit.quant.layer import curvature, descent
from lmkit.quant.layer.curvature import DAMPING, Curvature, weights_of_outputs
from lmkit.quant.layer.gradients import with_gradients
from lmkit.quant.layer.head import HeadWithGradients
from lmkit.quant.layer.refine import refine
from lmkit.quant.layer.scaling import IDENTITY, Candidate, ScaleSearch, fold_each_pair, record
from lmkit.quant.layer.sweep import Sweep
from lmkit.quant.run import Quantizer, prepare
from lmkit.scales import Exponents, Numbers, Scales, TwoLevel
from tests.quant.helpers import SCALE, calibrate, recipe, tiny_checkpoint
from tests.quant.killed import digest
from tests.quant.second_device import NAME, SecondDevice

LOSS = {"step": "gptq", "loss": 2}
Hook = Callable[[Any, Any, Tensor], None]


def rows_of(num_rows: int = 4, seq_len: int = 24) -> Tensor:
    return torch.randint(0, 4096, (num_rows, seq_len), generator=torch.Generator().manual_seed(3))


def sweep(source: ModelSource, rows: Tensor, batch_tokens: int) -> dict[int, Curvature]:
    found: dict[int, Curvature] = {}
    Sweep(source, rows, batch_tokens, torch.float32, 5).run(found.__setitem__, lambda *state: None)
    return found


def drawn(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(5))[:, 0]


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma2": {},
    "opt": {"ffn_dim": 96},
    "gpt-oss": {},
    "deepseek-v3": {"first_k_dense_replace": 2, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_that_of_the_whole_model(tmp_path: Path, family: str) -> None:
    """Experts of transformers are no linears: their gradients are not compared here."""
    path, rows = tiny_checkpoint(tmp_path / "source", family, **FAMILIES[family]), rows_of()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Hook:
        def hook(module: Any, x: Any, y: Tensor) -> None:
            y.register_hook(lambda g: seen.__setitem__(name, g.flatten(0, -2)))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(watch(name))
    logits = model(rows[:3]).logits.flatten(0, 1)  # the last row is held out
    torch.nn.functional.cross_entropy(logits, drawn(logits), reduction="sum").backward()
    source = ModelSource(path)
    for index, found in sweep(source, rows, 48).items():  # one batch of two rows, one of one
        spec = source.spec.layers[index]
        seen_roles = {role for names in found for role in names.split(",")}
        assert all("experts" in role for role in spec.linears.keys() - seen_roles)  # some see no token
        assert seen_roles <= spec.linears.keys()
        for names, matrix in found.items():
            roles = names.split(",")
            if "experts" in names:
                continue
            g = torch.cat([seen[source.spec.module_name(index, role)] for role in roles], dim=1)
            torch.testing.assert_close(matrix, g.T @ g, rtol=1e-3, atol=1e-5 * float((g.T @ g).abs().max()))


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("qwen3-next", "gptq: loss does not go with linear attention"),
        ("gemma4", "gptq: loss does not go with layers that read the keys of others, or vectors of each token"),
    ],
)
def test_models_without_these_gradients(
    tmp_path: Path, family: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny_checkpoint(tmp_path / "source", family, **({"num_hidden_layers": 7} if family == "gemma4" else {}))
    with pytest.raises(UnsupportedError, match=line):
        prepare(source, recipe(rounder=LOSS))
    quantizer = prepare(source, recipe(rounder=LOSS | {"loss": "auto"}))
    assert not quantizer.recipe.needs_curvature
    assert caplog.messages == [f"{line}: it is left out"]


def test_auto_weighs_where_it_can(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    plans = [prepare(source, recipe(rounder=LOSS | {"loss": loss})).plan.seconds for loss in ("auto", 2, 0)]
    assert [plan.keys() for plan in plans[:2]] == [plans[0].keys()] * 2
    assert plans[2].keys() == plans[0].keys() - {"curvature"}


def test_an_expert_counts_the_tokens_that_it_sees(tmp_path: Path) -> None:
    source, rows = ModelSource(tiny_checkpoint(tmp_path / "source", "qwen3-moe")), rows_of()
    wanted: list[Curvature] = [{}, {}]
    head, hidden = HeadWithGradients(source, torch.float32, "cpu"), torch.empty(0)
    hidden = head.embed_rows(rows[:3]).requires_grad_()
    for index in range(2):
        layer = source.layer(index, torch.float32)
        computed = with_gradients(layer, layer.weights)  # type: ignore[arg-type]
        computed.observe_gradients(
            lambda roles, g, index=index: wanted[index].__setitem__(",".join(roles), g.T @ g)  # type: ignore[misc]
        )
        hidden = computed.output(hidden, rows.shape[1])
    log_p = head.log_probabilities(hidden)
    torch.nn.functional.nll_loss(log_p, drawn(log_p), reduction="sum").backward()
    for index, found in sweep(source, rows, 24).items():
        assert found.keys() == wanted[index].keys() - {"mlp.router"}
        assert any("experts" in name for name in found) == source.spec.layers[index].is_sparse
        for name, matrix in found.items():
            largest = float(wanted[index][name].abs().max())
            torch.testing.assert_close(matrix, wanted[index][name], rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("group", [("attn.q", "attn.k", "attn.v"), ("attn.q", "attn.v"), ("attn.v",), ("mlp.up",)])
def test_blocks_factors_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: tuple[str, ...]) -> None:
    monkeypatch.setattr(curvature, "MAX_BLOCK", 50)
    spec = ModelSource(tiny_checkpoint(tmp_path / "source")).spec.layers[0]
    generator = torch.Generator().manual_seed(0)
    gradients = {role: torch.randn(300, spec.linear_shape(role)[0], generator=generator) for role in spec.linears}
    factors = {"attn.v": torch.rand(32, generator=generator) + 0.5}
    stored: Curvature = {}
    for roles in spec.fused:
        g = torch.cat([gradients[role] for role in roles], dim=1)
        for part in g.split(100):
            curvature.add_gradients(stored, roles, part, torch.float32)
    curvature.finish(stored)
    assert stored["attn.q,attn.k,attn.v"].shape == (128, 43)
    g = torch.cat([gradients[role] / factors.get(role, torch.ones(1)) for role in group], dim=1)
    seen = []
    for rows, found in weights_of_outputs(stored, spec, group, factors):
        wanted = g[:, rows].T @ g[:, rows]
        wanted = wanted / wanted.diagonal().mean() + DAMPING * torch.eye(len(rows))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert len(rows) <= 50
        seen += rows.tolist()
    assert sorted(seen) == list(range(g.shape[1]))


def test_factors_on_rows_are_recorded(tmp_path: Path) -> None:
    layer = ModelSource(tiny_checkpoint(tmp_path / "source")).layer(0, torch.float32)
    calibrated, generator = calibrate(layer, torch.randn(96, 64), num_rows=2), torch.Generator().manual_seed(0)

    def choose(source: str, consumers: tuple[str, ...]) -> ScaleSearch:
        weight = layer.weights[source]
        assert isinstance(weight, Tensor)
        scale, name = torch.rand(len(weight), generator=generator) + 0.5, "x"
        if source.startswith("norm."):
            scale, name = torch.ones_like(scale), IDENTITY
        return ScaleSearch(source, consumers, Candidate(name, scale), {IDENTITY: 0.0, "x": 0.0})

    def differ(before: dict[str, Any], rows: dict[str, Tensor]) -> None:
        for role, factor in rows.items():
            torch.testing.assert_close(layer.weights[role], before[role] * factor[:, None])

    before, work = dict(layer.weights), SimpleNamespace(calibrated=calibrated, rows={}, columns={}, scales=[])
    record(work, fold_each_pair(calibrated, choose))  # type: ignore[arg-type]
    assert work.rows.keys() == {"attn.v", "mlp.up"}
    differ(before, work.rows)
    before = dict(layer.weights)
    rows = fit.fold(layer, torch.rand(2, 16, generator=generator) + 0.5)
    assert rows.keys() == {"attn.q", "attn.k"}
    differ(before, rows)


def problem(out: int, width: int, scheme: QuantScheme, seed: int = 0) -> tuple[Tensor, QTensor, Tensor, Tensor, Tensor]:
    """(weight, plain rounding, H, H_O, shift), correlated."""
    generator = torch.Generator().manual_seed(seed)

    def moments(size: int) -> Tensor:
        x = torch.randn(2 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
        h = x.T @ x
        return h / h.diagonal().mean() + 0.1 * torch.eye(size)

    weight = torch.randn(out, width, generator=generator)
    shift = 0.05 * torch.randn(out, width, generator=generator)
    return weight, quantize(weight, scheme), moments(width), moments(out), shift


def error(weight: Tensor, q: QTensor, h: Tensor, outputs: Tensor, shift: Tensor | None) -> float:
    """tr(H_O E H E^T) up to a constant."""
    e, h, outputs = (dequantize(q) - weight).double(), h.double(), outputs.double()
    pull = e @ h if shift is None else e @ h - 2 * shift.double()
    return float(((outputs @ e) * pull).sum())


@pytest.mark.parametrize(
    "scheme", [int_scheme(4, 32), int_scheme(4, 32, symmetric=True), int_scheme(3, -1), NVFP4, MXFP4]
)
@pytest.mark.parametrize("shifted", [False, True])
def test_no_round_raises_the_error(scheme: QuantScheme, shifted: bool) -> None:
    for seed, (out, width) in enumerate([(70, 64), (5, 96), (1, 32), (130, 32)]):
        weight, q, h, outputs, shift = problem(out, width, scheme, seed)
        given = shift if shifted else None
        before, errors = q, [error(weight, q, h, outputs, given)]
        for _ in range(4):
            q = descent.descend(weight, q, h, [(torch.arange(out), outputs)], 1, shift=given)
            assert (q.scales.dtype, q.factor) == (before.scales.dtype, before.factor)
            errors.append(error(weight, q, h, outputs, given))
        span = errors[0] - errors[-1]
        assert span > 0
        assert all(later <= earlier + 1e-4 * span for earlier, later in itertools.pairwise(errors))


def test_no_other_code_is_better_in_the_end() -> None:
    weight, q, h, outputs, shift = problem(6, 32, int_scheme(2, 32))
    q = descent.descend(weight, q, h, [(torch.arange(6), outputs)], 60, shift=shift)
    least = error(weight, q, h, outputs, shift)
    for i in range(6):
        for j in range(32):
            for code in range(4):
                codes = q.codes.clone()
                codes[i, j] = code
                other = QTensor(codes, q.scales, q.zeros, q.scheme)
                assert error(weight, other, h, outputs, shift) >= least - 1e-4 * abs(least)


def test_without_correlated_outputs_it_goes_on_as_refine_does() -> None:
    weight, q, h, _, shift = problem(48, 64, int_scheme(4, 32))
    eye = torch.eye(48)
    refined = refine(weight, q, h, 2, shift=shift)
    found = descent.descend(weight, refined, h, [(torch.arange(48), eye)], 2, shift=shift)
    assert error(weight, found, h, eye, shift) <= error(weight, refined, h, eye, shift)


def test_another_device_gives_the_same() -> None:
    weight, q, h, outputs, shift = problem(70, 64, int_scheme(4, 32))
    wanted = descent.descend(weight, q, h, [(torch.arange(70), outputs)], 2, shift=shift)
    with SecondDevice():
        at = tensor_device(NAME)
        there = QTensor(q.codes.to(at), q.scales.to(at), q.zeros.to(at), q.scheme)
        blocks = [(torch.arange(70), outputs)]
        found = descent.descend(weight.to(at), there, h.to(at), blocks, 2, shift=shift.to(at))
        codes, scales = found.codes.cpu(), found.scales.cpu()
    assert torch.equal(codes, wanted.codes)
    assert torch.equal(scales, wanted.scales)


def test_rows_without_a_block_stay() -> None:
    weight, q, h, outputs, _ = problem(12, 32, int_scheme(4, 32))
    rows = torch.tensor([9, 2, 5])
    found = descent.descend(weight, q, h, [(rows, outputs[:3, :3].contiguous())], 2)
    changed = ((found.codes != q.codes).any(1) | (found.scales != q.scales).any(1)).nonzero()[:, 0]
    assert set(changed.tolist()) == {2, 5, 9}


@pytest.mark.parametrize("value", [6.2e-5, 1e-4, 0.0123456, 0.99999, 1.00049, 3.14159, 2047.7, 65503.0])
def test_scales_are_rounded_to_float16(value: float) -> None:
    spacing = Numbers().spacing(None)
    assert descent._nearest_scale.py_func(value, spacing) == float(torch.tensor(value).to(torch.float16))


@pytest.mark.parametrize("scales", [Numbers(), Exponents(), TwoLevel(), TwoLevel(divided=True)], ids=str)
def test_one_scale_is_rounded_as_many_are(scales: Scales) -> None:
    spacing = scales.spacing(torch.tensor(0.37))
    values = torch.rand(64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-7, 6, 64)
    found = [float(descent._nearest_scale.py_func(value, spacing)) for value in values.numpy()]
    torch.testing.assert_close(torch.tensor(found), spacing.nearest(values), rtol=1e-6, atol=0)


class Stopped(Exception):
    pass


def stopped_in_layer(quantizer: Quantizer, out: Path, layer: int) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == "layers" and done == 3 * layer + 1:
            raise Stopped

    with pytest.raises(Stopped):
        quantizer.run(out, progress=progress)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    source, out = tiny_checkpoint(tmp_path / "source"), tmp_path / "out"
    quantizer = prepare(source, recipe(SCALE, LOSS, rounder=None))
    phases = []
    quantizer.run(tmp_path / "whole", progress=lambda what, done, total: phases.append((what, done, total)))
    assert [state for state in phases if state[0] == "curvature"] == [("curvature", i, 4) for i in range(4)]
    stopped_in_layer(quantizer, out, 1)
    work = WorkFolder.beside(out).path
    assert not (work / "loss-states.f32").exists()
    file = work / "loss-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    with pytest.raises(CheckpointError, match=r"loss-00001.safetensors: its bytes have changed .*--restart"):
        quantizer.run(out)
    file.write_bytes(data)
    phases.clear()
    quantizer.run(out, progress=lambda what, done, total: phases.append((what, done, total)))
    assert {what for what, _, _ in phases} == {"layers"}
    assert digest(out) == digest(tmp_path / "whole")
    prepare(source, recipe(SCALE, LOSS | {"loss": 0}, rounder=None)).run(tmp_path / "without")
    name = "model.safetensors"
    assert digest(tmp_path / "without")[name] != digest(out)[name]


def test_the_estimate_has_its_time_and_memory(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    plain, weighted = (prepare(source, recipe(rounder=LOSS | {"loss": rounds})) for rounds in (0, 2))
    assert weighted.plan.seconds["curvature"] > 0
    assert "curvature" not in plain.plan.seconds
    assert weighted.budget.memory_bytes > plain.budget.memory_bytes
    assert weighted.budget.disk_bytes > plain.budget.disk_bytes
