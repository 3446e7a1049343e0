"""The GPU's sampler, emulated and on a GPU, against the CPU's: the same tokens from the same logits."""

# ruff: noqa: F401, F811 - `device` is a fixture of the kernels' tests

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmkit.kernels.cuda import module, sampling
from lmkit.text import Tokenizer
from lmkit.text.grammar import grammar_of
from lmkit.turbo.plan import NewSequence, SampledToken
from lmkit.turbo.runners.gpu_sampler import GpuSampler
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.sampler import LogitEdits, Sampler
from lmkit.turbo.sequence import FAILED_TOKEN
from tests.kernels.cuda.conftest import device
from tests.serve.fake_engine import DEMO
from tests.turbo.runners.test_sampler import EOS, entry, random_entry


class Both:
    """A sequence for each slot, in both samplers."""

    def __init__(
        self, device: str, news: Sequence[NewSequence], vocab: int, tokenizer: Tokenizer | None = None
    ) -> None:
        self.device = device
        guides = Guides(None if tokenizer is None else lambda: tokenizer, vocab)
        self.cpu, self.gpu = Sampler(len(news), vocab, guides), GpuSampler(len(news), vocab, device, guides)
        for new in news:
            self.set(new)

    def set(self, new: NewSequence) -> None:
        self.cpu.set(new.slot, new)
        self.gpu.set(new.slot, new)

    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[SampledToken]:
        """What both give."""
        got = self.gpu.sample(logits.to(self.device, copy=True), slots).result()
        want = self.cpu.sample(logits, slots)
        assert [result.token_id for result in got] == [result.token_id for result in want]
        for g, w in zip(got, want, strict=True):
            assert g.logprob == pytest.approx(w.logprob, abs=1e-6)
            assert [token for token, _ in g.top] == [token for token, _ in w.top]
            assert [value for _, value in g.top] == pytest.approx([value for _, value in w.top], abs=1e-6)
        return got


@pytest.mark.parametrize(("vocab", "count"), [(17, 100), (300, 80), (3001, 50)])
def test_tokens_and_logprobs_are_the_cpus(device: str, vocab: int, count: int) -> None:
    """Of all parameters together, for as many steps as the counts of penalties take to matter."""
    rng, generator = random.Random(vocab), torch.Generator().manual_seed(vocab)
    both = Both(device, [random_entry(rng, slot, vocab) for slot in range(count)], vocab)
    for _ in range(4):
        logits = torch.randn(count, vocab, generator=generator) * 3
        both.sample(logits, rng.sample(range(count), count))


def test_sequences_go_on_the_same_after_a_preemption(device: str) -> None:
    generator, vocab = torch.Generator().manual_seed(3), 40
    logits = torch.randn(20, vocab, generator=generator)
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 8, "top_p": 0.95, "seed": 99}
    ids = [7, 8, 9]
    both = Both(device, [entry(0, ids, 3, **params), entry(1, [1], 1, presence_penalty=2.0)], vocab)
    for row in logits:
        ids.append(both.sample(row[None], [0])[0].token_id)
    for cut in (3, 4, 9, 15):
        both.sample(logits[:1], [1])
        both.gpu.clear(1)
        both.set(entry(1, ids[:cut], 3, **params))
        assert [both.sample(row[None], [1])[0].token_id for row in logits[cut - 3 :]] == ids[cut:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequences_follow_their_grammars(device: str, temperature: float) -> None:
    """Two of three rows. One comes back after a preemption, while its last token is on its way."""
    tokenizer, vocab = Tokenizer.from_pretrained(DEMO), 4100
    params = {"temperature": temperature, "repetition_penalty": 1.2}
    grammar = grammar_of("regex", "[a-f]{2,30}[0-9]{8}", "f")
    both = Both(
        device,
        [entry(slot, [1], 1, grammar=grammar if slot else "", **params, seed=slot) for slot in range(3)],
        vocab,
        tokenizer,
    )
    texts: list[list[int]] = [[], [], []]
    for step in range(6):
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(step)) * 3
        for slot, token in enumerate(both.sample(logits, [0, 1, 2])):
            texts[slot].append(token.token_id)
        if step == 2:
            both.gpu.clear(1)
            both.set(entry(1, [1, *texts[1]], 1, grammar=grammar, **params, seed=1))
    for slot in (1, 2):
        assert re.fullmatch("[a-f]*[0-9]*", tokenizer.decode(texts[slot]))


def test_edits_are_the_cpus_to_the_bit(device: str) -> None:
    """Over several chunks of a vocabulary, whose length is no multiple of anything."""
    rng, vocab, count = random.Random(0), 4133, 24
    logits = torch.randn(count + 6, vocab, generator=torch.Generator().manual_seed(0)) * 5
    logits[2, ::5], logits[3, ::2], logits[4, ::2] = -torch.inf, 0.0, -0.0
    sampler, want = GpuSampler(count, vocab, device), logits.numpy().copy()
    rows = rng.sample(range(count + 6), count)
    slots = np.full(count + 6, -1, np.int32)
    for slot, row in enumerate(rows):
        ids, num_prompt = [rng.randrange(60) for _ in range(200)] + [vocab - 1], rng.randint(1, 150)
        new = entry(
            slot, ids, num_prompt, repetition_penalty=rng.choice([1.0, 1.3, 0.7]),
            presence_penalty=rng.choice([0.0, 0.7, -0.5]), frequency_penalty=rng.choice([0.0, 0.1, -0.3]),
            logit_bias={rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(300)} | {3: 1.0},
            min_tokens=rng.choice([0, len(ids) - num_prompt, 1000]), stop_token_ids=(5, vocab - 1), max_tokens=None,
        )  # fmt: skip
        sampler.set(slot, new)
        LogitEdits.of(new, vocab, None).apply(want[row], len(ids) - new.num_prompt_tokens)
        slots[row] = slot
    got = logits.to(device, copy=True)
    row_ids, slot_ids = torch.tensor(rows, dtype=torch.int32, device=device), torch.from_numpy(slots).to(device)
    sampling.edit_logits(got, row_ids, slot_ids, sampler.table)
    # What was -0 and is not edited stays so: compare the bits.
    assert np.array_equal(got.cpu().numpy().view(np.int32), want.view(np.int32))


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_p": 0.9, "logprobs": 3}, {"repetition_penalty": 1.5}]
)
@pytest.mark.parametrize("damage", ["nan", "inf", "all -inf", "nan where an edit hides it"])
def test_unusable_logits_fail_their_own_row_only(device: str, params: dict[str, Any], damage: str) -> None:
    held = {"min_tokens": 1} if damage.endswith("hides it") else {}
    both = Both(device, [entry(slot, [1], 1, **params, **held) for slot in range(3)], 50)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    if damage == "all -inf":
        logits[1] = -torch.inf
    else:
        logits[1, EOS[0]] = torch.inf if damage == "inf" else torch.nan
    for _ in range(2):  # what has failed is not counted
        got = both.sample(logits, [0, 1, 2])
        assert [result.token_id == FAILED_TOKEN for result in got] == [False, True, False]
        assert both.gpu.last_token.tolist() == [got[0].token_id, 0, got[2].token_id]


def test_nothing_left_to_choose_fails(device: str) -> None:
    held: dict[str, Any] = {"min_tokens": 9, "stop_token_ids": (1, 2), "ignore_eos": True, "temperature": 0.0}
    both = Both(device, [entry(0, [1], 1, **held)], 3)
    assert both.sample(torch.tensor([[1.0, 2.0, 3.0]]), [0])[0].token_id == 0
    assert both.sample(torch.tensor([[-torch.inf, 2.0, 3.0]]), [0])[0].token_id == FAILED_TOKEN


def test_logprobs_are_of_the_unmodified_logits(device: str) -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0, 2.0]]).expand(4, -1).contiguous()
    params: list[dict[str, Any]] = [{"logit_bias": {3: 50.0}, "logprobs": 2}, {"logprobs": 20}, {}]
    params.append({"logit_bias": {3: 50.0}, "logprobs": 2, "logprob_token_ids": (0, 4)})
    both = Both(device, [entry(slot, [1], 1, temperature=0.0, **p) for slot, p in enumerate(params)], 5)
    want = logits[0].log_softmax(-1).tolist()
    edited, whole, plain, shown = both.sample(logits, [0, 1, 2, 3])
    assert edited.token_id == 3
    assert edited.logprob == pytest.approx(want[3])
    assert [token for token, _ in edited.top] == [1, 2]  # of equals the lower id
    assert [token for token, _ in whole.top] == [1, 2, 4, 0, 3]
    assert plain == SampledToken(1)
    assert shown.top == [(token, pytest.approx(want[token])) for token in (4, 0, 3)]  # these and the chosen one


def test_a_new_sequence_inherits_nothing_from_the_slot(device: str) -> None:
    row = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    first = entry(0, [1, 3, 3], 1, logit_bias={0: 50.0}, frequency_penalty=2.0, logprobs=2, top_k=1)
    both = Both(device, [first], 4)
    both.sample(row, [0])
    both.set(entry(0, [1], 1, temperature=0.0))
    assert both.sample(row, [0]) == [SampledToken(3)]
    both.set(entry(0, [1], 1, temperature=0.0, min_tokens=1))
    assert both.sample(row, [0]) == [SampledToken(2)]


def test_greedy_rows_need_one_kernel_and_no_copy_of_their_own(device: str) -> None:
    """`argmax` with the same tensors again and again is what a captured graph repeats."""
    both = Both(device, [entry(slot, [1], 1, temperature=0.0) for slot in range(4)], 40)
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(device)
    slots = torch.tensor([2, 0, 3, -1], dtype=torch.int32, device=device)
    tokens = torch.full((4,), -9, device=device)
    launches = getattr(module.backend(device), "launches", None)
    for _ in range(2):
        both.gpu.argmax(logits, slots, tokens)
        want = logits.argmax(-1)[:3].tolist()
        assert both.gpu.fetch(tokens).result()[:3] == [SampledToken(token) for token in want]
        assert both.gpu.last_token.tolist() == [want[1], 0, want[0], want[2]]
        logits.copy_(torch.randn(4, 40, generator=torch.Generator().manual_seed(2)))
    both.sample(logits.cpu(), [0, 1, 2, 3])
    assert launches is None or launches == ["argmax"] * 3


def test_the_host_may_be_steps_ahead(device: str) -> None:
    """Results are read in order, but later than the next steps are launched."""
    rng, vocab = random.Random(9), 60
    news = [random_entry(rng, slot, vocab) for slot in range(5)]
    both = Both(device, news, vocab)
    steps = torch.randn(6, 5, vocab, generator=torch.Generator().manual_seed(6))
    pending = [both.gpu.sample(logits.to(device, copy=True), range(5)) for logits in steps]
    for logits, launched in zip(steps, pending, strict=True):
        want = both.cpu.sample(logits, range(5))
        assert [result.token_id for result in launched.result()] == [result.token_id for result in want]
