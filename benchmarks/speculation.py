"""Speculative decoding against plain decoding: the same requests to two engines of one model, in turns.

    python -m benchmarks.speculation [MODEL] [--batches N ...] [--rounds N] [--speculate HOW] [--own] [--json FILE]

    copy    code is given and its beginning is repeated; the answer repeats the rest
    edit    the same, and every line ends in a comment that the code lacks
    free    code goes on, greedily
    fresh   code goes on, sampled with temperature 1: little repeats itself
    json    an answer that follows a schema, whose keys its grammar forces
    again   `fresh`, asked a second time; the engine keeps its answers (`--draft-history`)
    form    a form is filled in after each text, after it was filled in after other texts; answers are kept

The demo model answers first. Its answers are the script of the other model, if one is named: that model computes every
step, and each sampled token is replaced by the script's. So a model of random weights has the demo's acceptance, and
its own costs. In `copy`, `edit` and `form` the script is the text itself. `json` has no script.

`--speculate eagle=FOLDER` names a head of the demo model. For another model its drafts are replayed too: a head of
random weights, in that model's shape, computes every step, and gives the drafts of the demo's head. `--speculate mtp`
does the same with the layer for multi-token prediction that the model itself has. With `--own` a trained MODEL, which
has the demo's tokens, answers and draft tokens for itself.

A round decodes the same prompts with both engines. The ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import report
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.quant.report.evaluate import HELDOUT_TEXT
from lmkit.text import Tokenizer
from lmkit.text.grammar import json_schema
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import NewSequence, SampledToken
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.sampler import Sampler
from lmkit.turbo.scheduling import model_speculation
from lmkit.turbo.scheduling.accounts import Account
from lmkit.turbo.scheduling.speculation import Speculation

NUM_TOKENS = 160  # of an answer
LONGEST_DRAFT = 8  # of a head whose draft tokens are replayed
HEAD_TOKENS = 8192  # of a head of random weights, at most
PROMPT_CHARACTERS, BEGINNING = 700, 60
KINDS = ("copy", "edit", "free", "fresh", "json", "again", "form")
KEPT = {"again", "form"}  # kinds with answers that were given before
HISTORY = 65536  # tokens of these that the engine keeps
FORM = """Review of the code
  reviewer: the second reader
  first word: {}
  what it is for: {}
  does it follow the style of the project: yes, with one exception, which is {}
  is each name clear to a reader who has not seen the code before: {}
  what must change before it can be merged: {}
  does each public function say what it takes, what it returns and which errors it raises: yes, except for {}
  is there a test that fails without the change, and does it pass on every machine: not for {}
  who else should read it, since they know the modules that call it: the author of {}
  verdict of the review: accepted with changes"""
TEXT, NUMBER = {"type": "string", "maxLength": 6}, {"type": "integer", "minimum": 0, "maximum": 9999}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMA = record(
    customer_name=TEXT,
    shipping_address=record(street_name=TEXT, house_number=NUMBER, postal_code=NUMBER),
    order_number=NUMBER,
    delivery_instructions=TEXT,
    is_confirmed={"type": "boolean"},
)
Prompt = tuple[int, ...]


class Script(Sampler):
    """Samples what a script says for each prompt, after it has sampled."""

    answers: dict[Prompt, list[int]]
    scripts: dict[int, list[int]]  # by slot

    def set(self, slot: int, new: NewSequence) -> None:
        super().set(slot, new)
        self.scripts[slot] = self.answers[tuple(new.token_ids[: new.num_prompt_tokens])]

    def sample(self, logits: Tensor, slots: Sequence[int], ahead: Sequence[int] | None = None) -> list[SampledToken]:
        begun = [self.num_outputs[slot] for slot in slots]
        super().sample(logits, slots, ahead)
        places = zip(slots, begun, ahead or [0] * len(slots), strict=True)
        return [SampledToken(self.scripts[slot][before + more]) for slot, before, more in places]

    @classmethod
    def put_into(cls, engine: Engine, answers: dict[Prompt, list[int]]) -> None:
        """Let the engine sample by this script."""
        runner = engine.runner
        assert isinstance(runner, CpuRunner)
        script = cls(runner.batch.block_tables.shape[1], runner.sampler.vocab_size)
        script.answers, script.scripts = answers, {}
        runner.sampler = runner._states = script


def cases(count: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By kind: prompts of the demo's held-out code, each with the answer that it asks for, or with none."""
    tokenizer = Tokenizer.from_pretrained(DEMO_FOLDER)
    text = HELDOUT_TEXT.read_text()
    found: dict[str, list[tuple[list[int], list[int]]]] = {kind: [] for kind in KINDS}
    for i in range(count):
        code = text[20_000 + 2_500 * i :][:PROMPT_CHARACTERS]
        edited = "\n".join(f"{line}  # {j}" if j % 4 == 0 else line for j, line in enumerate(code.split("\n")))
        for kind, answer in (("copy", code), ("edit", edited)):
            prompt = tokenizer.encode(f"{code}\n\n# Once more:\n{answer[:BEGINNING]}")
            wanted = tokenizer.encode(answer[BEGINNING:])
            found[kind].append((prompt, (wanted * 4)[:NUM_TOKENS]))
        filled = tokenizer.encode(FORM.format(*code.split()[1:9]))
        found["form"].append((tokenizer.encode(f"{code}\n\n# Form:\n"), (filled * 4)[:NUM_TOKENS]))
        for kind in ("free", "fresh", "json", "again"):
            found[kind].append((tokenizer.encode(code), []))
    return found


def run(engine: Engine, prompts: list[list[int]], kind: str, salt: str = "") -> tuple[float, list[list[int]]]:
    """(seconds of decoding, the answers). The clock starts when all prompts are computed."""
    answers: dict[str, list[int]] = {}
    how: dict[str, Any] = {"grammar": json_schema(SCHEMA)} if kind == "json" else {"ignore_eos": True}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=float(kind in ("fresh", "again")), seed=i, **how)
        engine.add(Request(request_id=str(i), prompt_ids=prompt, params=params, cache_salt=salt))
        answers[str(i)] = []
    start = 0.0
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        if not start and all(answers.values()):
            start = time.perf_counter()
    return time.perf_counter() - start, list(answers.values())


def drafts_of(
    head: str, kind: str, script: dict[Prompt, list[int]], options: dict[str, Any]
) -> dict[tuple[Prompt, int], list[int]]:
    """What the demo model's head drafts at each place of the script: by prompt and the number of tokens so far."""
    known: dict[tuple[Prompt, int], list[int]] = {}
    engine = Engine(str(DEMO_FOLDER), EngineConfig(**options, speculate=head))
    assert engine._drafter is not None
    Script.put_into(engine, script)
    draft = engine._drafter.draft

    def recorded(lengths: dict[Any, int]) -> Any:
        found, steps = draft(dict.fromkeys(lengths, LONGEST_DRAFT))
        known.update(((tuple(seq.request.prompt_ids), seq.num_tokens), tokens) for seq, tokens in found.items())
        return {}, steps

    with (
        patch.object(engine._drafter, "draft", recorded),
        patch.object(model_speculation, "PROBE_SHARE", 1e9),
        patch.object(Account, "book"),
        patch.object(Speculation, "_rests", return_value=False),
    ):
        run(engine, [list(prompt) for prompt in script], kind)
    engine.close()
    return known


def replay(engine: Engine, known: dict[tuple[Prompt, int], list[int]]) -> None:
    """Let the engine's head compute, and draft what another head has drafted."""
    assert engine._drafter is not None
    draft = engine._drafter.draft

    def replayed(lengths: dict[Any, int]) -> Any:
        found, steps = draft(lengths)
        by_text = {seq: known.get((tuple(seq.request.prompt_ids), seq.num_tokens), []) for seq in found}
        return {seq: tokens[: lengths[seq]] for seq, tokens in by_text.items() if tokens}, steps

    engine._drafter.draft = replayed  # type: ignore[method-assign]


def random_head(model: Path, folder: Path) -> None:
    """A head of random weights for a model of the Llama family."""
    shape = json.loads((model / "config.json").read_text())
    hidden, inner, tokens = shape["hidden_size"], shape["intermediate_size"], min(HEAD_TOKENS, shape["vocab_size"])
    size = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    q, kv = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    sizes = {"fc": (hidden, 3 * hidden), "lm_head": (tokens, hidden), "norm": (hidden,)}
    layer = {"self_attn.q_proj": (q, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, q)}
    layer |= {"self_attn.v_proj": (kv, 2 * hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    norms = dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (hidden,))
    sizes |= {f"midlayer.{name}": of for name, of in (layer | norms).items()}
    weights = {f"{name}.weight": (torch.randn(of) * 0.02).bfloat16() for name, of in sizes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights | {"d2t": torch.zeros(tokens, dtype=torch.int64)}, folder / "model.safetensors")
    config = shape | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": tokens}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))


def compare(model: str, kind: str, batch: int, rounds: int, speculate: str, own: bool = False) -> dict[str, Any]:
    """One row. `own`: nothing is replayed."""
    pairs = cases(2 * batch)[kind]
    prompts, wanted = [prompt for prompt, _ in pairs[:batch]], [answer for _, answer in pairs[:batch]]
    options: dict[str, Any] = {"max_batch_size": batch, "max_model_len": 2048, "prefix_cache": False}
    asked_before = {"again": prompts, "form": [prompt for prompt, _ in pairs[batch:]]}.get(kind, [])
    if not wanted[0]:
        engine = Engine(model if own or kind == "json" else str(DEMO_FOLDER), EngineConfig(**options))
        _, wanted = run(engine, prompts, kind)
        engine.close()
    replays = not own and speculate.startswith(("eagle=", "mtp")) and model != str(DEMO_FOLDER) and kind != "json"
    asked = {tuple(prompt): answer for prompt, answer in zip(prompts, wanted, strict=True)}
    script = {tuple(prompt): answer for prompt, answer in pairs} | asked
    head = "eagle=demo" if speculate == "mtp" else speculate
    known = drafts_of(head, kind, asked, options) if replays else {}
    with TemporaryDirectory() as folder:
        mine = speculate
        if replays and speculate != "mtp":
            random_head(Path(model), Path(folder))
            mine = f"eagle={folder}"
        drafts = EngineConfig(**options, speculate=mine, draft_history=HISTORY if kind in KEPT else 0)
        engines = [Engine(model, config) for config in (EngineConfig(**options), drafts)]
    if replays:
        replay(engines[1], known)
    for engine in engines if kind != "json" else []:
        Script.put_into(engine, script)
    times: list[tuple[float, float]] = []
    steps = [0, 0]
    for turn in range(rounds + 1):  # the first warms up
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            run(engines[which], asked_before, kind, salt=str(turn))
            before = engines[which].stats().steps
            seconds[which], answers = run(engines[which], prompts, kind, salt=str(turn))
            steps[which] = engines[which].stats().steps - before
            assert answers == wanted, "speculation changed a token"
        times += [(seconds[0], seconds[1])] if turn else []
    stats = engines[1].stats()
    for engine in engines:
        engine.close()
    plain, drafted = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "kind": kind,
        "batch": batch,
        "plain_tokens_per_s": sum(map(len, wanted)) / plain,
        "drafting_tokens_per_s": sum(map(len, wanted)) / drafted,
        "ratio": statistics.median(a / b for a, b in times),
        "steps": steps[0],
        "draft_steps": steps[1],
        "tokens_a_step": sum(map(len, wanted)) / batch / steps[1],
        "accepted": stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speculative decoding against plain decoding.")
    parser.add_argument("model", nargs="?", default=str(DEMO_FOLDER))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--speculate", default="ngram", help="ngram, draft=FOLDER, eagle=FOLDER or mtp")
    parser.add_argument("--own", action="store_true", help="nothing of the demo model is replayed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = [
        compare(given.model, kind, batch, given.rounds, given.speculate, given.own)
        for batch in given.batches
        for kind in given.kinds
    ]
    report.show(rows)
    if given.json:
        report.save(given.json, "speculation", rows, model=given.model)


if __name__ == "__main__":
    main()
