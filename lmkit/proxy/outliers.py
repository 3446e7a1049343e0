"""Finds nodes that are much worse than the others, and says how fast a node that has come gets its share.

Pure functions over what the registry knows. A breaker sees only its own node; these compare nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Protocol, TypeVar

MIN_SAMPLES = 10  # first bytes, before a node is judged
MAX_SAMPLES = 20  # the last ones
MIN_OTHERS = 2  # nodes to compare with
MIN_FAILED = 0.2  # share of a node's last requests
FIRST_SHARE = 0.1  # of its weight, that a node has when it comes


class Judged(Protocol):
    """What is read of a node."""

    @property
    def firsts(self) -> Collection[tuple[float, int]]: ...  # of its last first bytes: seconds, and tokens before

    @property
    def failed_share(self) -> float: ...  # of its last requests, 0 to 1


N = TypeVar("N", bound=Judged)


def outlier(node: Judged, others: Iterable[Judged], factor: float) -> str:
    """Why the node is much worse than most of the others, which serve the same model. An empty text: it is not.

    A node is slow if its first bytes take `factor` times as long, and if it computes so many times fewer tokens a
    second. One of both only says that it gets longer prompts, or shorter ones. Of each node the better quarter of
    requests counts, because a few long prompts delay all that wait behind them.
    """
    peers = [other for other in others if len(other.firsts) >= MIN_SAMPLES]
    if len(peers) < MIN_OTHERS:
        return ""
    failed = median(other.failed_share for other in peers)
    if node.failed_share >= max(MIN_FAILED, factor * failed):
        return f"{node.failed_share:.0%} of its last requests failed, of others' {failed:.0%}"
    if len(node.firsts) < MIN_SAMPLES:
        return ""
    seconds, usual = _seconds(node), median(map(_seconds, peers))
    if seconds > factor * usual and _pace(node) < median(map(_pace, peers)) / factor:
        return f"its first bytes take {seconds:.3g} s, those of others {usual:.3g} s"
    return ""


def _seconds(node: Judged) -> float:
    return sorted(seconds for seconds, _ in node.firsts)[len(node.firsts) // 4]


def _pace(node: Judged) -> float:
    return sorted(tokens / max(seconds, 1e-6) for seconds, tokens in node.firsts)[-1 - len(node.firsts) // 4]


def worst(nodes: Sequence[N], resting: int, factor: float, most: float) -> dict[N, str]:
    """The outliers among nodes of one model, and why. With the `resting` ones they are at most the share `most`.

    `nodes` are those that get requests; `resting` others of the model do not, because their breakers are open.
    """
    room = int(most * (len(nodes) + resting)) - resting
    found = {node: why for node in nodes if (why := outlier(node, [n for n in nodes if n is not node], factor))}
    by_harm = sorted(found, key=lambda node: (node.failed_share, _seconds(node) if node.firsts else 0.0), reverse=True)
    return {node: found[node] for node in by_harm[: max(0, room)]}


def ramps(ages: Mapping[N, float], seconds: float) -> dict[N, float]:
    """The share of its weight that a node has so many seconds after it came, for those that have not all of it.

    It grows from FIRST_SHARE to 1 within `seconds`. Nodes that all came at one time have their weights at once.
    """
    if seconds <= 0 or min(ages.values(), default=seconds) >= seconds:
        return {}
    shares = {node: min(1.0, max(FIRST_SHARE, age / seconds)) for node, age in ages.items()}
    most = max(shares.values())
    return {node: share / most for node, share in shares.items() if share < most}
