"""Kernels of csrc/sampling.cu: the reference's tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import module, sampling
from lmkit.turbo.runners.sampler import philox_uniform
from tests.kernels.cases import Case, draw_cases

REFERENCE = ops.draw.named("reference")


def on(device: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def random_parameters(count: int, vocab: int, generator: torch.Generator) -> list[Tensor]:
    """temperature, top_k, top_p, min_p, share of so many draws."""

    def some(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (count,), generator=generator)]

    share = torch.rand(count, dtype=torch.float64, generator=generator)
    share[::17] = some([0.0, 0.5, 1 - 2**-53])[::17]
    return [
        some([1e-300, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.7, 100.0]),
        some([0, 0, 1, 2, 7, 40, vocab // 2, vocab - 1, vocab, 10 * vocab]).long(),
        some([1.0, 1.0, 0.95, 0.9, 0.5, 0.01, 1e-12, 1 - 2**-53]),
        some([0.0, 0.0, 0.05, 0.5, 1.0]),
        share,
    ]


def random_logits(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Among them rows with ties, of which many are the greatest, hidden tokens, zeros of both signs, one value only."""
    logits = (
        torch.randn(rows, vocab, generator=generator) * torch.tensor([0.1, 1.0, 3.0, 20.0]).repeat(rows)[:rows, None]
    )
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1::7, 1::3] = -torch.inf
    logits[2::11] = torch.where(logits[2::11] > 0, 0.0, -0.0)
    logits[5::13] = 2.5
    logits[6::13, 1:] = -torch.inf
    return logits


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in draw_cases()])
def test_draws_the_cases_of_the_op(device: str, case: Case) -> None:
    args = case.make()
    assert torch.equal(sampling.draw(*on(device, *args)).cpu(), REFERENCE(*args))


@pytest.mark.parametrize(("vocab", "count"), [(1, 20), (2, 200), (40, 400), (523, 200), (3001, 200), (9001, 40)])
def test_draws_what_the_reference_draws(device: str, vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(200, vocab, generator)
    rows = torch.randint(200, (count,), generator=generator)
    parameters = random_parameters(count, vocab, generator)
    got = sampling.draw(*on(device, logits, rows, *parameters)).cpu()
    want = REFERENCE(logits, rows, *parameters)
    wrong = (got != want).nonzero().flatten().tolist()
    assert not wrong, [(int(got[i]), int(want[i]), [float(p[i]) for p in parameters]) for i in wrong[:5]]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (50, 0.95), (1000, 1.0), (0, 0.9), (0, 0.999)], ids=lambda value: str(value)
)
def test_a_large_vocabulary(device: str, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(1, 130001, generator=generator) * 2.5
    parameters = [torch.tensor([value], dtype=torch.float64) for value in (0.8, top_k, top_p, 0.0, 0.7)]
    parameters[1] = parameters[1].long()
    args = (logits, torch.zeros(1, dtype=torch.int64), *parameters)
    assert torch.equal(sampling.draw(*on(device, *args)).cpu(), REFERENCE(*args))


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_rows_lie_anywhere(device: str, start: int) -> None:
    """Neither their first element nor their distance is a multiple of 16 bytes; what lies beside them is nothing."""
    generator = torch.Generator().manual_seed(start)
    whole = torch.full((20, 707), torch.nan)
    whole[:, start : start + 698] = torch.randn(20, 698, generator=generator)
    logits = whole.to(device)[:, start : start + 698]
    rows, parameters = torch.arange(20), random_parameters(20, 698, generator)
    got = sampling.draw(logits, *on(device, rows, *parameters)).cpu()
    assert torch.equal(got, REFERENCE(logits.cpu(), rows, *parameters))


@pytest.mark.parametrize("extra", [0, 1])
def test_nucleus_sums_are_exact(device: str, extra: int) -> None:
    """top_p a little below, or above, what 20 of the 50 least likely tokens are needed for; the last one is drawn."""
    logits = torch.tensor([-1.0] * 100 + [0.0] + [-2.0] * 50)
    weights = logits.double().exp()
    top_p = weights[:121].sum() / weights.sum() * (1 + (1e-12 if extra else -1e-12))
    values = [torch.tensor([value], dtype=torch.float64) for value in (1.0, float(top_p), 0.0, 1 - 2**-53)]
    none = torch.zeros(1, dtype=torch.int64)
    token = sampling.draw(*on(device, logits[None], none, values[0], none, *values[1:]))
    assert token.item() == 120 + extra


def test_a_draw_depends_on_its_row_alone(device: str) -> None:
    generator = torch.Generator().manual_seed(8)
    logits, rows = random_logits(30, 3001, generator), torch.arange(30)
    parameters = random_parameters(30, 3001, generator)
    together = sampling.draw(*on(device, logits, rows, *parameters)).cpu()
    for i in range(0, 30, 3):
        args = on(device, logits[i : i + 1], rows[:1], *(p[i : i + 1] for p in parameters))
        assert sampling.draw(*args).item() == together[i]


def state(device: str, num_slots: int, **fields: object) -> Tensor:
    """A table of slots, each with these fields."""
    records = np.zeros(num_slots, sampling.SLOT)
    records["top_p"] = 1.0
    for name, values in fields.items():
        records[name] = values
    return torch.from_numpy(records.view(np.int64).reshape(num_slots, sampling.WORDS)).to(device)


def test_random_numbers_are_those_of_the_cpu(device: str) -> None:
    """Two tokens, the first a little more, or a little less, likely than the random share: it is drawn, or not."""
    streams = [
        (0, 0),
        (1, 0),
        (2**64 - 1, 5),
        (0x243F6A8885A308D3, 2**40 + 3),
        *((seed, seed * 7) for seed in range(40)),
    ]
    streams = [stream for stream in streams for _ in range(2)]
    logits, temperatures = [], []
    for i, stream in enumerate(streams):
        first = philox_uniform(*stream) * (1 + (1e-12 if i % 2 else -1e-12))
        ratio = first / (1 - first)
        logits.append([0.0, -1.0] if ratio > 1 else [-1.0, 0.0])
        temperatures.append(1 / abs(math.log(ratio)))
    seeds, indices = zip(*streams, strict=True)
    table = state(
        device, len(streams), temperature=temperatures, seed=np.array(seeds, np.uint64), num_outputs=np.array(indices)
    )
    tokens = torch.full((len(streams),), -9, device=device)
    slots = torch.arange(len(streams), dtype=torch.int32, device=device)
    last_token = torch.full_like(tokens, -9)
    sampling.sample(torch.tensor(logits, device=device), table, slots, last_token, tokens)
    assert tokens.tolist() == [1, 0] * (len(streams) // 2)
    assert last_token.tolist() == tokens.tolist()
    counts = table.cpu().numpy().view(sampling.SLOT)["num_outputs"][:, 0]
    assert counts.tolist() == [index + 1 for index in indices]


@pytest.mark.parametrize("vocab", [1, 5, 700, 20011])
@pytest.mark.parametrize("kernel", [sampling.argmax, sampling.sample])
def test_greedy(device: str, kernel: object, vocab: int) -> None:
    """The lowest of equals; rows that are unusable fail alone; rows without a slot are padding."""
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(24, vocab, generator)
    logits[3, vocab // 2], logits[4, vocab - 1], logits[8] = torch.nan, torch.inf, -torch.inf
    slots = torch.randperm(30, generator=generator)[:24].int()
    slots[[0, 17]] = -1
    table, last_token, tokens = state(device, 30), torch.full((30,), -9), torch.full((24,), -9)
    last_token, tokens = on(device, last_token, tokens)
    for _ in range(2):
        kernel(logits.to(device), table, slots.to(device), last_token, tokens)  # type: ignore[operator]
    want = torch.from_numpy(logits.numpy().argmax(-1))
    want[[3, 4, 8]] = -2
    want[[0, 17]] = -9
    assert tokens.tolist() == want.tolist()
    landed = {int(slot): int(token) for slot, token in zip(slots, want, strict=True) if slot >= 0}
    assert last_token.tolist() == [max(landed.get(slot, -9), 0 if slot in landed else -9) for slot in range(30)]
    counts = table.cpu().numpy().view(sampling.SLOT)["num_outputs"][:, 0]
    assert counts.tolist() == [2 * (landed.get(slot, -9) >= 0) for slot in range(30)]
    assert not module.counters(device).any()
    other = torch.full_like(tokens, -9)
    sampling.argmax(logits.to(device), table, slots.to(device), None, other)
    assert other.tolist() == want.tolist()
    after = table.cpu().numpy().view(sampling.SLOT)["num_outputs"][:, 0]
    assert after.tolist() == counts.tolist(), "without the last tokens nothing is counted"


def test_greedy_rows_and_drawn_rows_share_a_batch(device: str) -> None:
    """One kernel has the greedy ones, others those with a temperature: together they give what one launch gives, and
    none touches the others' rows."""
    generator = torch.Generator().manual_seed(3)
    logits, slots = random_logits(24, 9001, generator), torch.arange(24, dtype=torch.int32)
    logits[4], slots[[2, 3]] = torch.nan, -1
    fields = {"temperature": np.arange(24) % 3 * 0.5, "seed": np.arange(24, dtype=np.uint64), "top_k": [9, 0, 700] * 8}
    found = []
    for apart in (False, True):
        table, last_token, tokens = state(device, 24, **fields), torch.full((24,), -9), torch.full((24,), -9)
        last_token, tokens = on(device, last_token, tokens)
        args = logits.to(device), table, slots.to(device), last_token, tokens
        if apart:
            sampling.argmax(*args)
            assert (tokens.cpu() != -9).tolist() == [i % 3 == 0 and i not in (2, 3) for i in range(24)]
        sampling.sample(*args, drawn_only=apart)
        found.append((tokens.tolist(), last_token.tolist(), table.tolist()))
    assert found[0] == found[1]
    assert not module.counters(device).any()


def test_draws_follow_the_probabilities(device: str) -> None:
    """Chi-square over the numbers of one stream; with 11 degrees of freedom it is below 35 but for once in 4000."""
    logits = torch.tensor([0.3, 2.0, 1.1, -0.4, 1.9, 2.4, -1.5, 0.9, 1.4, 2.1, 0.0, 1.0])
    table = state(device, 1200, temperature=1.3, seed=7, num_outputs=np.arange(1200))
    tokens, last_token = torch.empty(1200, dtype=torch.int64), torch.empty(1200, dtype=torch.int64)
    tokens, last_token, slots = on(device, tokens, last_token, torch.arange(1200, dtype=torch.int32))
    sampling.sample(logits.expand(1200, -1).contiguous().to(device), table, slots, last_token, tokens)
    expected = 1200 * (logits.double() / 1.3).softmax(-1)
    observed = torch.bincount(tokens.cpu(), minlength=len(logits))
    assert float(((observed - expected) ** 2 / expected).sum()) < 35


def test_the_reference_takes_over_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKENDS", {})
    monkeypatch.setattr(module, "missing", lambda: "no GPU")
    assert ops.draw.select("cuda").name == "reference"
