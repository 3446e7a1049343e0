"""The process that tests a GPU's kernels. A fault ends it, not the engine that has started it (self_test.py).

    python -m lmkit.turbo.engine.self_test_process < query.json

It loads a layer of each kind and the head, and computes with them: products for every number of tokens that has a plan,
then steps of an engine, each call beside torch. Then whole steps: with the host's sampler and the GPU's, with kernels
that overlap and those that wait, captured and not. What is wrong is left out, and all begins anew without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from lmkit import log
from lmkit.config import EngineConfig
from lmkit.environment import calm_openmp, environment
from lmkit.errors import LMKitError
from lmkit.turbo.engine.self_test import LAST, At, Done, Failed, Off, Query, Said

if TYPE_CHECKING:
    from lmkit.kv_dtype import KVDtype  # noqa: F401
    from lmkit.models.decoder import Decoder
    from lmkit.models.kv_storage import KVStorage
    from lmkit.models.resolved import ResolvedModel
    from lmkit.turbo.engine.self_test_checks import Checks, Wrong
    from lmkit.turbo.request import Request, StepOutput
    from lmkit.turbo.runners.cuda_device import CudaDevice

CONTEXT, NEW_TOKENS = 192, 3
MOST_SEQUENCES, MOST_STEP_TOKENS = 32, 512
BATCHES = 1, 3, 8
PRODUCTS = 0.5  # of the time, after which no more products are tested by themselves
ROUNDS = 64  # of tests, each without one thing more than the one before it
Outputs = dict[str, list[Any]]


def say(message: Said) -> None:
    """Tell the engine, before anything can go wrong."""
    os.write(1, msgspec.json.encode(message) + b"\n")


def main(device: CudaDevice | None = None) -> int:
    """Test what the query names. `device`: another one than torch's GPU."""
    calm_openmp()
    log.setup("WARNING" if environment().log_level == "INFO" else environment().log_level, process="self-test")
    query = msgspec.json.decode(sys.stdin.buffer.read(), type=Query)
    time = Time(query.seconds)
    from lmkit.kernels.cuda.switches import turn_off
    from lmkit.turbo.engine.self_test_checks import Wrong
    from lmkit.turbo.runners.cuda_device import CudaDevice

    for name, reason in query.off.items():
        turn_off(name, reason)
    try:
        for _ in range(ROUNDS):
            try:
                say(Done(_test(query, device or CudaDevice(), time), tuple(time.lacked)))
                return 0
            except Wrong as wrong:
                if wrong.lost:
                    say(At(wrong.names[0], str(wrong)))
                    return 1
                _leave_out(wrong)
        raise LMKitError("no end of what has to be left out")
    except LMKitError as error:
        say(Failed(str(error), broken=isinstance(error, NothingLeftError)))
        return 2


class Time:
    """The time that tests may take. `lacked`: tests that it did not allow."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._begin = seconds, monotonic()
        self.lacked: list[str] = []

    def allows(self, test: str, share: float = 1.0) -> bool:
        """Whether a test may begin: less than that share of the time has gone."""
        if self._seconds is None or monotonic() - self._begin < share * self._seconds:
            return True
        self.lacked.append(test)
        return False


class NothingLeftError(LMKitError):
    """Results are wrong without everything that could be left out."""


def _leave_out(wrong: Wrong) -> None:
    from lmkit.kernels.cuda import module
    from lmkit.kernels.cuda.switches import turn_off, turned_off

    new = [name for name in wrong.names if name not in turned_off()]
    if not new:
        raise NothingLeftError(f"{wrong}, and nothing else computes it")
    for name in new:
        turn_off(name, str(wrong))
        say(Off(name, str(wrong)))
    module.load_anew()


def _test(query: Query, device: CudaDevice, time: Time) -> int:
    """Test once. Returns the number of calls that were compared. Raises Wrong."""
    time.lacked.clear()
    from lmkit.models.resolved import resolved
    from lmkit.turbo.engine.loading import load_options
    from lmkit.turbo.engine.self_test_checks import Checks

    config = _small(query.config)
    with resolved(query.model_path, **load_options(query.config)) as model:
        checks = Checks(device, lambda name: say(At(name)))
        checks.replace_ops()
        try:
            decoder = _decoder(model)
            checks.dtype = decoder.dtype
            for tokens in _buckets(config):
                if time.allows(f"products of {tokens} tokens", PRODUCTS):
                    _products(decoder, checks, tokens, device)
            if time.allows("each call of steps"):
                with _without("capture"):
                    _outputs(decoder, config, model.storages, device)
        except LMKitError as error:
            raise checks.wrong or error from error
        finally:
            checks.restore()
        _whole_steps(decoder, config, model.storages, device, time)
        return checks.count


def _small(config: EngineConfig) -> EngineConfig:
    """What an engine of a few short sequences needs of a configuration."""
    sequences = min(config.sequences_per_step, MOST_SEQUENCES)
    return EngineConfig(
        device="cuda", kv_dtype=config.kv_dtype, attention_sinks=config.attention_sinks,
        deterministic=config.deterministic, block_size=config.tokens_per_block, prefix_cache=False,
        max_batch_size=sequences, max_step_tokens=max(sequences, min(config.tokens_per_step, MOST_STEP_TOKENS)),
        max_model_len=min(CONTEXT, config.max_model_len or CONTEXT),
    )  # fmt: skip


def _decoder(model: ResolvedModel) -> Decoder:
    """A decoder with the first layer of each kind, and the last."""
    from lmkit.models import loader

    kinds = {layer: index for index, layer in reversed(list(enumerate(model.spec.layers)))}
    layers = []
    for index in sorted({*kinds.values(), model.spec.num_layers - 1}):
        layer = model.layer(index)
        layer.pack(model.packing.activations)
        loader.to_device(layer.linears, model.packing.device)
        layers.append(layer)
    head = model.lm_head()
    head.pack(model.head_activations)
    loader.to_device((head,), model.packing.device)
    return loader.decoder_of(model, layers, head)


def _buckets(config: EngineConfig) -> Iterator[int]:
    """Numbers of tokens of products: those that plans are for, and the largest step's."""
    from lmkit.kernels.cuda.gemm_table import BUCKETS

    most = config.tokens_per_step
    yield from (tokens for tokens in BUCKETS if tokens < most)
    yield most


def _products(decoder: Decoder, checks: Checks, tokens: int, device: CudaDevice) -> None:
    """Compute the product of each kind of packed weight in all the ways that a step may ask for."""
    import torch

    from lmkit.kernels.ops import Norm

    seen = set[tuple[Any, ...]]()
    generator = torch.Generator().manual_seed(tokens)
    for linear in decoder.linears:
        for packed in linear.packed or ():
            weight = getattr(checks.twin(packed.weight), "weight", None)
            if weight is None:
                continue
            outputs, inputs = getattr(weight, "codes", weight).shape
            activation = getattr(packed.weight, "activation", None)
            kind = packed.implementation.name, outputs, inputs, activation, getattr(weight, "scheme", None)
            if kind in seen:
                continue
            seen.add(kind)
            stream = torch.randn(tokens, inputs, generator=generator).to(device.tensors)
            x, impl = stream.to(decoder.dtype), packed.implementation
            norm = Norm(torch.ones(inputs, device=stream.device), 1e-5, None, decoder.dtype)
            impl(x, packed.weight, packed.bias, None)
            impl(stream, packed.weight, packed.bias, norm)
            if impl.epilogue and activation is None:
                impl(x, packed.weight, packed.bias, None, dtype=torch.float32)
                impl(x, packed.weight, packed.bias, None, residual=stream.new_zeros(tokens, outputs))


def _outputs(decoder: Decoder, config: EngineConfig, storages: list[KVStorage], device: CudaDevice) -> Outputs:
    """What an engine gives for the same requests: batches of several sizes, prompts beside sequences that decode."""
    from lmkit.turbo.engine.engine import Engine

    engine = Engine.of(decoder, config, storages=storages, device=device)
    found: Outputs = {}
    for batch in sorted({*(n for n in BATCHES if n < config.sequences_per_step), config.sequences_per_step}):
        late = [_request(engine, f"{batch}.{index}", 5 + 17 * index % 60) for index in range(batch)]
        first = late[: max(1, batch // 2)]
        for request in first:
            engine.add(request)
        _step(engine, found, 2)
        for request in late[len(first) :]:
            engine.add(request)
        _step(engine, found, 1000)
    engine.close()
    return found


def _step(engine: Any, found: Outputs, steps: int) -> None:
    while steps and engine.has_work():
        steps -= 1
        outputs: list[StepOutput] = engine.step()
        for output in outputs:
            if output.error:
                raise LMKitError(f"an engine of a few layers cannot compute: {output.error}")
            of_request = found.setdefault(output.request_id, [])
            of_request += output.token_ids
            of_request += [(scored.token_id, scored.logprob) for scored in output.logprobs]
            of_request += [output.embedding] if output.embedding else []


def _request(engine: Any, name: str, length: int) -> Request:
    """One request in four is drawn, one has scores; an encoder gives embeddings."""
    from lmkit.turbo.request import Request, SamplingParams

    info, number = engine.info, int(name.partition(".")[2])
    length = min(length, info.max_model_len - NEW_TOKENS - 1)
    ids = [(7 + 31 * place + 13 * number) % info.vocab_size for place in range(length)]
    params = SamplingParams(
        max_tokens=NEW_TOKENS if info.has_head else 0,
        ignore_eos=True,
        logprobs=5 if number % 4 == 2 else None,
        temperature=1.0 if number % 4 == 3 else 0.0,
        top_k=20,
        seed=number,
    )
    return Request(request_id=name, prompt_ids=ids, params=params, pooling=None if info.has_head else "mean")


def _whole_steps(
    decoder: Decoder, config: EngineConfig, storages: list[KVStorage], device: CudaDevice, time: Time
) -> None:
    """Compare engines that differ in one part, which is right if both give the same. All of them pad their steps to the
    same sizes, so that their numbers are the same, bit for bit. Raises Wrong."""
    from lmkit.kernels.cuda import module
    from lmkit.kernels.cuda.switches import off, switches
    from lmkit.turbo.engine.self_test_checks import Wrong

    def outputs(tested: str, *names: str, captured: bool = False) -> Outputs:
        """Of an engine without some switches or files. If it cannot compute, `tested` is wrong."""
        say(At(tested or LAST))
        with _without(*names), nullcontext() if captured else _launch_by_launch(device):
            module.load_anew()
            try:
                return _outputs(decoder, config, storages, device)
            except LMKitError as error:
                # A kernel's fault may have ended this process's use of the GPU: what follows would be blamed for it.
                raise Wrong([tested], str(error), lost=True) if tested else error from None

    if samples := off("sampling.cu", "edit_logits.cu") is None and time.allows("sampling"):
        by_host = outputs("", "overlap", "sampling.cu")
        sampled = outputs("sampling.cu", "overlap", "argmax")
        if not _agree(by_host, sampled):
            raise Wrong(["sampling.cu"], "sampled tokens are not the host's")
    if not time.allows("captured steps, and programmatic launch"):
        return
    chooses = samples and switches().argmax
    want = outputs("argmax" if chooses else "", "overlap")
    if chooses and not _agree(want, sampled):
        raise Wrong(["argmax"], "greedy tokens are not those of sampling")
    if device.overlaps() and outputs("overlap") != want:
        raise Wrong(["overlap"], "steps with programmatic launch give something else")
    if switches().capture and outputs("capture", captured=True) != want:
        overlaps = device.overlaps() and outputs("", "overlap", captured=True) == want
        raise Wrong(["overlap" if overlaps else "capture"], "captured steps give something else than their launches")
    module.load_anew()
    say(At(LAST))


@contextmanager
def _launch_by_launch(device: CudaDevice) -> Iterator[None]:
    """What is captured meanwhile is launched at every replay."""
    device.capture = lambda launch: launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.capture  # type: ignore[method-assign]


def _agree(one: Outputs, other: Outputs) -> bool:
    """Whether two samplers gave the same tokens. Their log-probabilities are rounded in other places."""
    if one.keys() != other.keys() or any(len(one[name]) != len(other[name]) for name in one):
        return False
    pairs = [(x, y) for name in one for x, y in zip(one[name], other[name], strict=True)]
    return all(abs(x[1] - y[1]) < 1e-3 and x[0] == y[0] if isinstance(x, tuple) else x == y for x, y in pairs)


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Without several switches or files."""
    from contextlib import ExitStack

    from lmkit.kernels.cuda.switches import without

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(without(name))
        yield


if __name__ == "__main__":
    sys.exit(main())
