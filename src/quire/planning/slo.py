"""Limits on latency that a service promises: service level objectives."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from quire.core.errors import BadRequest

NAMES = {"ttft": "first token", "tpot": "a further token", "e2e": "whole answer"}
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds that 99 of 100 requests must keep, by name."""

    limits: Mapping[str, float]

    def excess(self, p99: Mapping[str, float]) -> float:
        """How many times its limit the worst of them is."""
        return max(p99[name] / limit for name, limit in self.limits.items())

    def misses(self, p99: Mapping[str, float]) -> list[str]:
        """The measures that are beyond their limits, as words."""
        return [
            f"{name} p99 {_words(p99[name])} > {_words(limit)}" for name, limit in self.limits.items()
            if p99[name] > limit
        ]  # fmt: skip


def read_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=40ms,e2e=10s`: any of them."""
    limits: dict[str, float] = {}
    for entry in text.split(","):
        name, _, value = (part.strip().lower() for part in entry.partition("="))
        if name not in NAMES:
            near = get_close_matches(name, NAMES, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(NAMES)}"
            raise BadRequest(f"slo has `{entry.strip()}`", hint, param="slo")
        match = _TIME.fullmatch(value)
        if match is None or float(match[1]) == 0:
            raise BadRequest(f"{name} of slo is `{value}`", "write a time above 0, such as 500ms or 2s", param="slo")
        if name in limits:
            raise BadRequest(f"slo has {name} twice", "give each limit once", param="slo")
        limits[name] = float(match[1]) * _UNITS[match[2]]
    return Slo(limits)


def _words(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
