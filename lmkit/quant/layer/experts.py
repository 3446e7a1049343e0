"""The inputs of a layer's linears. The linears of an expert see only the tokens that are routed to it."""

from __future__ import annotations

from torch import Tensor

from lmkit.log import get_logger
from lmkit.models import roles
from lmkit.models.layer_spec import LayerSpec
from lmkit.qtensor import QuantScheme
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.observe import InputStats
from lmkit.quant.layer.routed import MIN_TOKENS, RoutedStats
from lmkit.quant.report.layer_report import ExpertsReport

log = get_logger(__name__)


def empty_inputs(
    spec: LayerSpec, schemes: dict[str, QuantScheme], row_ids: Tensor, token_ids: Tensor, seed: int, at: str
) -> dict[str, InputStats]:
    """A record for each input that quantized linears read, and for a router's input, which its whole mixture of experts
    reads. They lie on the device `at`.

    The sample holds the tokens `row_ids` before attention and `token_ids` elsewhere. For an expert, it holds as
    many of the expert's own tokens.
    """
    sizes = {role: scheme.group_size for role, scheme in schemes.items()}
    readers = {spec.linears[role][1]: size for role, size in sizes.items()}  # by the width of their input
    if sizes:
        sizes |= {role: readers.get(width, -1) for role, (_, width) in spec.routers.items()}
    inputs: dict[str, InputStats] = {}
    for role, reads in spec.input_of.items():
        if role in sizes and reads not in inputs:
            in_features = spec.linear_shape(reads)[1]
            if roles.expert_of(reads) is None:
                ids = row_ids if spec.fused and reads == spec.fused[0][0] else token_ids
                inputs[reads] = InputStats.empty(in_features, sizes[role], ids, at)
            else:
                inputs[reads] = RoutedStats.of(in_features, sizes[role], len(token_ids), seed, at)
    return inputs


def experts_report(calibrated: CalibratedLayer) -> ExpertsReport | None:
    """The report on the experts of a sparse layer; None for a dense layer. The log warns about experts that are rounded
    without statistics."""
    layer = calibrated.layer
    if not layer.spec.is_sparse:
        return None
    numbers = {role: roles.expert_of(role) for role in calibrated.inputs}
    seen = {number: calibrated.inputs[role].num_tokens for role, number in numbers.items() if number is not None}
    few = tuple(sorted(number for number, num_tokens in seen.items() if num_tokens < MIN_TOKENS))
    if few:
        log.warning(
            "layer %d: %d of %d experts saw fewer than %d calibration tokens and are rounded without statistics "
            "(calibration.all_experts, or more samples, would give them some)",
            layer.index, len(few), len(seen), MIN_TOKENS,
        )  # fmt: skip
    return ExpertsReport(tokens={str(number): seen[number] for number in sorted(seen)}, without_statistics=few)
