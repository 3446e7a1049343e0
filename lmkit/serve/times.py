"""The times of one choice of an answer, as llama.cpp and vLLM show them."""

from __future__ import annotations

from lmkit.serve.parts import RequestMetrics, Timings
from lmkit.turbo.transport.output import RequestOutput


def timings(output: RequestOutput) -> Timings:
    """Of a choice up to this output."""
    computed, prompt_ms = output.num_prompt_tokens - output.num_cached_tokens, 1e3 * output.prompt_seconds
    later, decode_ms = max(output.num_output_tokens - 1, 0), 1e3 * output.decode_seconds
    return Timings(
        cache_n=output.num_cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / max(computed, 1),
        prompt_per_second=1e3 * computed / prompt_ms if prompt_ms else 0.0,
        predicted_n=output.num_output_tokens,
        predicted_ms=decode_ms,
        predicted_per_token_ms=decode_ms / max(later, 1),
        predicted_per_second=1e3 * later / decode_ms if decode_ms else 0.0,
    )


def request_metrics(output: RequestOutput, queue_seconds: float) -> RequestMetrics:
    """Of a choice up to this output."""
    tokens, first, later = output.num_output_tokens, output.prompt_seconds, output.decode_seconds
    metrics = RequestMetrics(
        time_to_first_token_ms=1e3 * first,
        generation_time_ms=1e3 * later,
        queue_time_ms=1e3 * queue_seconds,
        tokens_per_second=tokens / (first + later) if first + later else 0.0,
    )
    if tokens > 1:
        metrics.mean_itl_ms = 1e3 * later / (tokens - 1)
    return metrics
