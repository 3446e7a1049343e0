"""The sampler against a plain oracle, and its promise that a draw depends on the request alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lmkit.kernels.reference.sampling import most_likely, nucleus
from lmkit.turbo.plan import NewSequence, SampledToken
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners import sampler as sampler_module
from lmkit.turbo.runners.sampler import Sampler, philox4x32, philox_uniform
from lmkit.turbo.sequence import FAILED_TOKEN

EOS = (0, 3)
WORD = 0xFFFFFFFF


def entry(slot: int, ids: list[int], num_prompt: int, **params: Any) -> NewSequence:
    config = SamplingParams(**({"temperature": 1.0, "seed": 0} | params))
    return NewSequence(slot, ids, num_prompt, config, () if config.ignore_eos else EOS, False)


def oracle_probabilities(logits: np.ndarray, new: NewSequence) -> np.ndarray:
    """float64 [vocab], the parameters applied one at a time as their definitions say."""
    params, outputs = new.params, new.token_ids[new.num_prompt_tokens :]
    z = logits.astype(np.float64)
    if len(outputs) < params.min_tokens:
        z[list(new.eos_token_ids + params.stop_token_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        z[token] += bias
    for token in set(new.token_ids):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token, count in Counter(outputs).items():
        z[token] -= params.presence_penalty + params.frequency_penalty * count
    ranked = sorted(range(len(z)), key=lambda token: (-z[token], token))
    p = np.zeros(len(z))
    if params.temperature == 0:
        p[ranked[0]] = 1
        return p
    ranked = ranked[: params.top_k or len(z)]
    p[ranked] = np.exp((z[ranked] - z[ranked[0]]) / params.temperature)
    p /= p.sum()
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += p[token]
        if params.top_p < 1 and mass >= params.top_p:
            break
    kept = [token for token in kept if p[token] >= params.min_p * p[ranked[0]]]
    result = np.zeros(len(z))
    result[kept] = p[kept] / p[kept].sum()
    return result


def oracle_token(logits: np.ndarray, new: NewSequence) -> int:
    p = oracle_probabilities(logits, new)
    u = philox_uniform(new.params.seed or 0, len(new.token_ids) - new.num_prompt_tokens)
    return next(token for token in range(len(p)) if p[: token + 1].sum() > u * p.sum())


def sample_one(logits: list[float] | torch.Tensor, ids: list[int] | None = None, **params: Any) -> SampledToken:
    """One row in a sampler of its own; the first of `ids` is the prompt."""
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    sampler = Sampler(1, row.shape[1])
    sampler.set(0, entry(0, ids or [1], 1, **params))
    return sampler.sample(row, [0])[0]


def random_entry(rng: random.Random, slot: int, vocab: int) -> NewSequence:
    ids = [rng.randrange(vocab) for _ in range(rng.randint(1, 30))]
    return entry(
        slot,
        ids,
        rng.randint(1, len(ids)),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, vocab - 1, 10 * vocab]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, -0.3]),
        logit_bias=rng.choice([{}, {rng.randrange(vocab): rng.uniform(-5, 5), 2: 1.5}]),
        min_tokens=rng.choice([0, 0, 10, 100]),
        stop_token_ids=rng.choice([(), (4, 5)]),
        logprobs=rng.choice([None, None, 0, 5]),
        seed=rng.randrange(1 << 64),
        max_tokens=None,
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: list[int]) -> None:
    """Vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    assert list(philox4x32(counter, key)) == expected


def test_uniforms_have_53_bits_and_use_all_of_seed_and_index() -> None:
    first = 0x6627E8D5E169C58D  # of the known answer for zeros: its two words without 5 and 6 bits
    assert philox_uniform(0, 0) == ((first >> 37 << 26) + ((first & WORD) >> 6)) * 2.0**-53
    pairs = [(0, 0), (1, 0), (1 << 32, 0), (2**64 - 1, 0), (0, 1), (0, 1 << 32), (0, 2**31)]
    assert len({philox_uniform(*pair) for pair in pairs}) == len(pairs)
    many = np.array([philox_uniform(5, i) for i in range(5000)])
    assert ((many >= 0) & (many < 1)).all()
    assert (many * 2.0**53 == np.floor(many * 2.0**53)).all()
    for bit in (1, 2, 3, 26, 27, 30, 53):  # each is as often 0 as 1
        ones = (np.floor(many * 2.0**bit) % 2).sum()
        assert abs(ones - 2500) < 4 * np.sqrt(5000) / 2, bit


@pytest.mark.parametrize("vocab", [17, 300])
def test_draws_are_the_oracles(vocab: int) -> None:
    rng = random.Random(vocab)
    news = [random_entry(rng, slot, vocab) for slot in range(400)]
    logits = torch.randn(400, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    sampler = Sampler(400, vocab)
    for new in news:
        sampler.set(new.slot, new)
    order = rng.sample(range(400), 400)
    got = sampler.sample(logits[order], order)
    want = [oracle_token(logits[slot].numpy(), news[slot]) for slot in order]
    assert [result.token_id for result in got] == want


def distribution_cases() -> Iterator[Any]:
    context = [5, 5, 6, 7, 8, 7, 7, 9]
    yield pytest.param({}, id="plain")
    yield pytest.param({"temperature": 0.5}, id="cold")
    yield pytest.param({"temperature": 2.5}, id="hot")
    yield pytest.param({"top_k": 4}, id="top_k")
    yield pytest.param({"top_p": 0.7}, id="top_p")
    yield pytest.param({"top_p": 0.7, "temperature": 2.0}, id="top_p hot")
    yield pytest.param({"top_k": 5, "top_p": 0.8}, id="top_k then top_p")
    yield pytest.param({"min_p": 0.2}, id="min_p")
    yield pytest.param({"logit_bias": {2: 3.0, 11: -100.0}}, id="logit_bias")
    yield pytest.param({"min_tokens": 9, "max_tokens": 9, "stop_token_ids": (2,)}, id="min_tokens")
    for name, value in (("repetition_penalty", 1.8), ("presence_penalty", 1.1), ("frequency_penalty", 0.6)):
        yield pytest.param({name: value, "ids": context, "prompt": 3}, id=name)
    everything = {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2}
    yield pytest.param(everything | {"presence_penalty": 0.3, "ids": context, "prompt": 2}, id="everything")


def assert_follows(tokens: list[int], p: np.ndarray) -> None:
    """Chi-square test; Wilson-Hilferty: its cube root is nearly normal."""
    observed = np.bincount(tokens, minlength=len(p))
    assert observed[p == 0].sum() == 0
    expected = len(tokens) * p[p > 0]
    chi_square, freedom = ((observed[p > 0] - expected) ** 2 / expected).sum(), len(expected) - 1
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert deviation < 3.5, (observed[p > 0], expected)


LOGITS = torch.tensor([0.3, 2.0, 1.1, -0.4, 1.9, 2.4, -1.5, 0.9, 1.4, 2.1, 0.0, 1.0])


@pytest.mark.parametrize("params", distribution_cases())
def test_distributions_over_many_seeds(params: dict[str, Any]) -> None:
    params = dict(params)
    new = entry(0, params.pop("ids", [1]), params.pop("prompt", 1), **params)
    sampler = Sampler(3000, len(LOGITS))
    for slot in range(3000):
        sampler.set(slot, new)
    sampler.seed = list(range(3000))
    drawn = sampler.sample(LOGITS.expand(3000, -1).contiguous(), range(3000))
    assert_follows([result.token_id for result in drawn], oracle_probabilities(LOGITS.numpy(), new))


def test_distribution_over_the_tokens_of_one_seed() -> None:
    sampler, new = Sampler(1, len(LOGITS)), entry(0, [1], 1, seed=7)
    sampler.set(0, new)
    tokens = [sampler.sample(LOGITS[None], [0])[0].token_id for _ in range(3000)]
    p = oracle_probabilities(LOGITS.numpy(), new)
    assert_follows(tokens, p)
    # Successive tokens are independent too.
    pairs = [a * len(p) + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_follows(pairs, np.outer(p, p).ravel())


@pytest.mark.parametrize(("vocab", "threads"), [(517, 1), (32003, 2), (151936, 2)])
def test_a_row_does_not_depend_on_its_company(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rng, num = random.Random(vocab), 8
        news = [random_entry(rng, slot, vocab) for slot in range(num)]
        logits = torch.randn(num, vocab, generator=torch.Generator().manual_seed(1)) * 2
        alone = []
        for new in news:
            sampler = Sampler(1, vocab)
            sampler.set(0, new)
            alone.append(sampler.sample(logits[new.slot : new.slot + 1].clone(), [0])[0])
        assert len({result.token_id for result in alone}) > 1
        for size in (2, 5, 8):
            sampler, order = Sampler(num, vocab), rng.sample(range(num), size)
            slots = rng.sample(range(num), size)
            for row, slot in zip(order, slots, strict=True):
                sampler.set(slot, news[row])
            assert sampler.sample(logits[order], slots) == [alone[row] for row in order]
    finally:
        torch.set_num_threads(before)


def test_a_sequence_goes_on_the_same_after_a_preemption() -> None:
    generator, vocab = torch.Generator().manual_seed(3), 40
    logits = torch.randn(20, vocab, generator=generator)
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 8, "top_p": 0.95, "seed": 99}
    whole, ids = Sampler(1, vocab), [7, 8, 9]
    whole.set(0, entry(0, ids, 3, **params))
    for row in logits:
        ids = [*ids, whole.sample(row[None], [0])[0].token_id]
    for cut in (3, 4, 9, 15):
        again = Sampler(4, vocab)
        again.set(2, entry(2, [1, 1, 1], 1, presence_penalty=2.0))  # another sequence had the slot before
        again.sample(logits[:1], [2])
        again.clear(2)
        again.set(2, entry(2, ids[:cut], 3, **params))
        assert [again.sample(row[None], [2])[0].token_id for row in logits[cut - 3 :]] == ids[cut:]


def test_greedy_takes_the_lowest_of_equals_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: object) -> None:
        raise AssertionError("greedy rows compute no probabilities")

    monkeypatch.setattr(sampler_module, "philox_uniform", unexpected)
    sampler = Sampler(3, 40)
    monkeypatch.setattr(sampler, "_op", unexpected)
    for slot in range(3):
        sampler.set(slot, entry(slot, [1], 1, temperature=0.0, top_k=3, top_p=0.5, seed=None))
    logits = torch.zeros(3, 40)
    logits[1, [33, 20, 39]] = 5.0
    logits[2, 39] = 1e-30
    assert [result.token_id for result in sampler.sample(logits, [0, 1, 2])] == [0, 20, 39]


def test_the_first_token_whose_cumulative_probability_exceeds_the_random_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for share, logits, want in [
        (0.0, [-1000.0, 0.0, 0.0], 1),  # not the token of probability 0
        (0.5, [0.0, 0.0], 1),
        (0.5 - 2**-53, [0.0, 0.0], 0),
        (1 - 2**-53, [0.0, 0.0, -1000.0], 1),
    ]:
        monkeypatch.setattr(sampler_module, "philox_uniform", lambda seed, index, share=share: share)
        assert sample_one(logits).token_id == want


def test_greedy_with_penalties_and_bias() -> None:
    logits = [0.0, 1.0, 4.0, 3.0]
    assert sample_one(logits, temperature=0.0).token_id == 2
    assert sample_one(logits, [2], temperature=0.0, repetition_penalty=2.0).token_id == 3
    assert sample_one(logits, [3], temperature=0.0, repetition_penalty=1e-7).token_id == 3  # the least of requests
    assert sample_one(logits, [2], temperature=0.0, presence_penalty=2.0).token_id == 2  # the prompt does not count
    assert sample_one(logits, [1, 2], temperature=0.0, presence_penalty=2.0).token_id == 3
    assert sample_one(logits, [1, 2, 2, 3], temperature=0.0, frequency_penalty=0.6).token_id == 2
    assert sample_one(logits, [1, 2, 2, 2, 3], temperature=0.0, frequency_penalty=0.6).token_id == 3
    assert sample_one(logits, temperature=0.0, logit_bias={1: 3.5}).token_id == 1


def test_a_new_sequence_inherits_nothing_from_the_slot() -> None:
    sampler, row = Sampler(1, 4), torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    sampler.set(0, entry(0, [1, 3, 3], 1, logit_bias={0: 50.0}, frequency_penalty=2.0, logprobs=2, top_k=1))
    sampler.sample(row, [0])
    sampler.set(0, entry(0, [1], 1, temperature=0.0))
    assert sampler.sample(row, [0]) == [SampledToken(3)]


def test_stops_are_held_back_until_min_tokens() -> None:
    logits = [9.0, 0.0, 1.0, 8.0, 7.0]
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert [sample_one(logits, [1] * n, **params).token_id for n in (1, 2, 3)] == [2, 2, 0]
    assert sample_one(logits, ignore_eos=True, **params).token_id == 0


def test_top_k_keeps_exactly_k() -> None:
    values = np.array([0.125, 0.5, 0.25, 0.125, -np.inf], np.float32)
    assert [most_likely(values, k).tolist() for k in range(1, 6)] == [
        [1], [1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4],  # of equals the lower id
    ]  # fmt: skip
    assert most_likely(np.zeros(9), 4).tolist() == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    weights = np.array([0.125, 0.5, 0.25, 0.125])
    for top_p, want in [
        (0.01, [1]),
        (0.5, [1]),
        (0.74, [1, 2]),
        (0.75, [1, 2]),
        (0.76, [0, 1, 2]),
        (0.99, [0, 1, 2, 3]),
    ]:
        assert nucleus(weights, top_p).tolist() == want
    assert nucleus(np.ones(8), 0.5).tolist() == [0, 1, 2, 3]
    assert nucleus(np.ones(8), 0.51).tolist() == [0, 1, 2, 3, 4]
    assert nucleus(np.array([1.0, 0.0, 0.0]), 1 - 2**-53).tolist() == [0]


def test_top_p_sorts_no_more_than_it_must_and_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.0, 0.1, 1.0, 5.0, 30.0):
        weights = np.exp(rng.normal(size=4000) * spread)
        for top_p in (1e-9, 0.3, 0.95, 0.999999, 1 - 2**-53):
            order = np.argsort(-weights, kind="stable")
            count = int((weights[order].cumsum() < top_p * weights.sum()).sum()) + 1
            got = nucleus(weights, top_p)
            if top_p < 0.9999999:
                assert got.tolist() == sorted(order[:count].tolist())
            assert weights[got].sum() >= top_p * weights.sum() * (1 - 1e-12)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    tokens = {sample_one([1.0, 3.0, 2.9], temperature=temperature, seed=seed).token_id for seed in range(60)}
    assert tokens == ({0, 1, 2} if temperature > 1 else {1})


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = torch.tensor([0.5, 2.0, 2.0, -1.0, 2.0])
    want = logits.log_softmax(-1).tolist()
    result = sample_one(logits, [1], temperature=0.0, logit_bias={3: 50.0}, logprobs=2)
    assert result.token_id == 3
    assert result.logprob == pytest.approx(want[3])
    assert [token for token, _ in result.top] == [1, 2]  # of equals the lower id
    assert [value for _, value in result.top] == pytest.approx([want[1], want[2]])
    assert [token for token, _ in sample_one(logits, logprobs=20).top] == [1, 2, 4, 0, 3]
    assert sample_one(logits, logprobs=0).top == []
    shown = sample_one(logits, [1], temperature=0.0, logit_bias={3: 50.0}, logprobs=2, logprob_token_ids=(0, 4)).top
    assert shown == [(token, pytest.approx(want[token])) for token in (4, 0, 3)]  # these and the chosen one
    assert sample_one(logits) == SampledToken(sample_one(logits).token_id)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_p": 0.9, "logprobs": 3}, {"repetition_penalty": 1.5}]
)
@pytest.mark.parametrize("damage", ["nan", "inf", "all -inf", "nan where an edit hides it"])
def test_unusable_logits_fail_their_own_row_only(params: dict[str, Any], damage: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    sampler, whole = Sampler(3, 50), Sampler(3, 50)
    for slot in range(3):
        held = {"min_tokens": 1} if damage.endswith("hides it") else {}
        sampler.set(slot, entry(slot, [1], 1, **params, **held))
        whole.set(slot, entry(slot, [1], 1, **params, **held))
    want = whole.sample(logits, [0, 1, 2])
    if damage == "all -inf":
        logits[1] = -torch.inf
    else:
        logits[1, EOS[0]] = torch.inf if damage == "inf" else torch.nan
    got = sampler.sample(logits, [0, 1, 2])
    assert got == [want[0], SampledToken(FAILED_TOKEN), want[2]]


def test_a_row_with_nothing_left_to_choose_fails() -> None:
    held_back: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": (1, 2)}
    assert sample_one([1.0, 2.0, 3.0], ignore_eos=True, **held_back).token_id == 0
    assert sample_one([-np.inf, 2.0, 3.0], ignore_eos=True, **held_back).token_id == FAILED_TOKEN


def test_the_logits_are_left_alone() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    before, sampler, rng = logits.clone(), Sampler(4, 30), random.Random(0)
    for slot in range(4):
        sampler.set(slot, random_entry(rng, slot, 30))
    with torch.inference_mode():
        sampler.sample(logits, list(range(4)))
    assert torch.equal(logits, before)
