"""The counters of one key or team, and what its limits leave."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lmkit.errors import RequestError
from lmkit.proxy.accounts.account import MINUTE, PERIODS, Amount, Period, Rules, exact, shown
from lmkit.web.auth import ApiKey
from lmkit.web.rates import Meter


class Account:
    """A key's or a team's counters."""

    def __init__(self, label: str, rules: Rules) -> None:
        self.label = label  # "this key" or "the team NAME"
        self.used: dict[Period, Amount] = dict.fromkeys(PERIODS, Amount())
        self.held = Amount()  # by running requests
        self.meter: Meter | None = None
        self._limited = ApiKey(key="-")
        self.apply(rules)

    def apply(self, rules: Rules) -> None:
        self.rules = rules
        requests, tokens = (rules.limits.get(f"{kind}/minute") for kind in ("requests", "tokens"))
        limited = ApiKey(
            key="-",
            requests_per_minute=None if requests is None else int(requests),
            tokens_per_minute=None if tokens is None else int(tokens),
        )
        if limited != self._limited:  # a limit that did not change goes on counting
            self._limited, self.meter = limited, Meter(limited, whose=self.label) if limited.is_limited else None
        self.limits: list[tuple[str, Period, int]] = []
        for name, most in rules.limits.items():
            kind, _, period = name.partition("/")
            if name not in MINUTE:
                self.limits.append((kind, msgspec.convert(period, Period), exact(kind, most)))

    def check(self, wanted: Amount) -> tuple[RequestError, Period] | None:
        """The error for a request that does not fit, and the limit's period."""
        for kind, period, most in self.limits:
            used, held, more = (getattr(amount, kind) for amount in (self.used[period], self.held, wanted))
            if used + held + more > most:
                parts = [f"{shown(kind, used)} are used"]
                parts += [f"{shown(kind, held)} are reserved for running requests"] if held else []
                parts += [f"this request may use {shown(kind, more)}"] if kind != "requests" else []
                span = "in total" if period == "total" else f"a {period}"
                message = f"{self.label} may use {shown(kind, most)} {kind} {span}: {', '.join(parts)}"
                return RequestError("insufficient_quota", message), period
        return None

    def rest(self) -> Iterator[tuple[str, int]]:
        """What is left of each limit but those per minute: its kind, and how much."""
        for kind, period, most in self.limits:
            yield kind, max(0, most - getattr(self.used[period], kind) - getattr(self.held, kind))

    def left(self) -> dict[str, int | float]:
        """The same as it is shown."""
        shares = zip(self.limits, self.rest(), strict=True)
        return {
            f"{kind}/{period}": float(shown(kind, value)) if kind == "money" else value
            for (kind, period, _), (_, value) in shares
        }
