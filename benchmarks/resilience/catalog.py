"""All cases, by group. A group is a module of this folder with a tuple `CASES`."""

from __future__ import annotations

from benchmarks.resilience import (
    budgets,
    clusters,
    connections,
    engine_faults,
    failover,
    fairness,
    front_end,
    grammars,
    money,
    names,
    network,
    proxy,
    soak,
    streams,
    strikes,
)
from benchmarks.resilience.case import Case

GROUPS: dict[str, tuple[Case, ...]] = {
    "budgets": budgets.CASES,
    "clusters": clusters.CASES,
    "connections": connections.CASES,
    "engine_faults": engine_faults.CASES,
    "failover": (*failover.CASES, *strikes.CASES),
    "fairness": fairness.CASES,
    "front_end": front_end.CASES,
    "grammars": grammars.CASES,
    "money": money.CASES,
    "names": names.CASES,
    "network": network.CASES,
    "proxy": proxy.CASES,
    "ray": clusters.RAY,
    "soak": soak.CASES,
    "streams": streams.CASES,
}
