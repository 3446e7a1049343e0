"""From a look at a module to a ModelSpec: the linears of each layer by their names, and what it keeps of a sequence."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from lmkit.layers.blocks.base import Heads, Residual
from lmkit.layers.blocks.state import PagedKV, Recurrent
from lmkit.models.flexible.blocks import ForeignBlock
from lmkit.models.flexible.linears import all_sites
from lmkit.models.flexible.site import Site
from lmkit.models.flexible.trace import AttentionCall, Trace
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
UNBOUNDED = 1 << 15  # the context of a model whose config.json names none
NORM_EPS = 1e-5  # norms are transformers'; nobody reads it
NUMBERED = re.compile(r"(.+?)\.(\d+)\.(.+)")


def spec_of(module: Any, seen: Trace, config: Any, architecture: str, dtype: str, tied: bool) -> ModelSpec:
    """The specification of a module on which `trace` has looked."""
    text = config.get_text_config(decoder=True)
    prefix, linears = _linears(module, seen.language)
    by_layer = {call.layer: call for call in (*seen.calls, *seen.stored)}
    count = max([text.num_hidden_layers, *(index + 1 for index in (*linears, *by_layer))])
    blocks = [_block(linears.get(index, {}), by_layer.get(index)) for index in range(count)]
    for call in seen.stored:  # how they are read is transformers' matter
        blocks[call.layer] = replace(blocks[call.layer], attention=None)
    _keep_own(blocks, seen)
    hidden, names = text.hidden_size, {role: role for each in linears.values() for role in each}
    layers = (LayerSpec(hidden, (Residual(block),), NORM_EPS, prefix=prefix, names=names) for block in blocks)
    return ModelSpec(
        architecture=architecture,
        layers=tuple(layers),
        vocab_size=module.get_output_embeddings().out_features,
        max_position=next((value for name in CONTEXTS if (value := getattr(text, name, None))), UNBOUNDED),
        dtype=dtype,
        tie_embeddings=tied,
        foreign=True,
        reusable=not seen.token_bytes,
    )


def _linears(module: nn.Module, language: str) -> tuple[str, dict[int, dict[str, Site]]]:
    """The path of the list of layers in the part `language`, and the linears in each by their names there."""
    sites = {name: site for name, site in all_sites(module).items() if name.startswith(language)}
    found = [(match, site) for name, site in sites.items() if (match := NUMBERED.fullmatch(name))]
    prefix = Counter(match[1] for match, _ in found).most_common(1)[0][0] if found else "layers"
    layers: dict[int, dict[str, Site]] = {}
    for match, site in found:
        if match[1] == prefix:
            layers.setdefault(int(match[2]), {})[match[3]] = site
    return prefix, layers


def _block(linears: dict[str, Site], call: AttentionCall | None) -> ForeignBlock:
    biased = frozenset(role for role, site in linears.items() if site.has_bias)
    block = ForeignBlock(tuple((role, site.shape) for role, site in linears.items()), biased)
    if call is None:
        return block
    kv = PagedKV(call.num_kv_heads, call.dim, False, call.source, call.spec.window)
    heads = Heads(call.num_heads, call.num_kv_heads, call.dim)
    return replace(block, of_heads=heads, attention=call.spec, kept=kv)


def _keep_own(blocks: list[ForeignBlock], seen: Trace) -> None:
    """Give layers without keys and values what transformers' own cache keeps of a sequence: all layers' together. Its
    memory is planned as that of states and of keys and values; the tensors of the plan stay unused."""
    if not (seen.fixed_bytes or seen.token_bytes):
        return
    _give(blocks, Recurrent((max(1, seen.fixed_bytes // 4), 1), (0, 0, 0), 0))
    if seen.token_bytes:
        _give(blocks, PagedKV(1, -(-seen.token_bytes // 8 // 2) * 2))


def _give(blocks: list[ForeignBlock], state: Recurrent | PagedKV) -> None:
    free = next((index for index, block in enumerate(blocks) if block.kept is None), len(blocks))
    blocks[free : free + 1] = [replace(blocks[free], kept=state) if free < len(blocks) else ForeignBlock(kept=state)]
