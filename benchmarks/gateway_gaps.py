"""What the gap of a stream consists of whose server was killed: from its last token to the kill, until the gateway has
noticed, until another server has the request, until that computes it, and until the client has the next token.

The times are those of the logs: the audit log of the gateway, and the access log of the servers."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

PARTS = ("before the kill", "noticed", "asked", "received", "admitted", "computed")
NUM_SHOWN = 8  # of the longest gaps
MAX_SECONDS_TO_RECEIVE = 1.0  # a request, after the gateway has sent it


@dataclass(frozen=True, slots=True)
class Kill:
    time: float  # time.time()
    worker: str


@dataclass(frozen=True, slots=True)
class Gap:
    """`parts` have the seconds of each of PARTS behind the last time that the stream was broken off. They are empty
    where a log does not tell them."""

    request: str
    seconds: float
    num_broken: int  # how often, within the gap
    parts: dict[str, float]


class GapTrace:
    def __init__(self, kills: Sequence[Kill], audit: Iterable[str], access: Iterable[str]) -> None:
        self._kills = kills
        self._decisions: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by request
        for line in map(_json, audit):
            self._decisions[line.get("request", "")].append(line)
        self._served: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by request: of the server that ended it
        for line in map(_json, access):
            if "admitted" in line:
                self._served[line["request_id"]].append(line)

    def resumed(self, longest: Iterable[tuple[str, float, float]]) -> list[Gap]:
        """Of the longest gaps of streams, by time.monotonic(): those in which they went on at another server."""
        offset, gaps = time.time() - time.monotonic(), list[Gap]()
        for request, begin, end in longest:
            if (gap := self._gap(request, begin + offset, end + offset)) is not None:
                gaps.append(gap)
        return gaps

    def _gap(self, request: str, begin: float, end: float) -> Gap | None:
        within = [each for each in self._decisions[request] if begin < each["time"] < end]
        asked = [each for each in within if each["decision"] == "resumed"]
        if not asked:
            return None
        moments = [begin, *self._moments(request, within, asked[-1]), end]
        seconds = [later - earlier for earlier, later in pairwise(moments)]
        parts = (
            dict(zip(PARTS, (round(each, 3) for each in seconds), strict=True)) if len(seconds) == len(PARTS) else {}
        )
        return Gap(request, round(end - begin, 3), len(asked), parts)

    def _moments(self, request: str, within: list[dict[str, Any]], asked: dict[str, Any]) -> list[float]:
        """When the worker was killed, that was noticed, another was asked, had the request, and began to compute it."""
        failed = [each["time"] for each in within if each["decision"] == "attempt_failed"]
        killed = [kill.time for kill in self._kills if kill.worker == asked["lost"] and kill.time <= asked["time"]]
        if not failed or not killed or not self._served[request]:
            return []
        served = self._served[request][-1]
        received = datetime.fromisoformat(served["time"]).timestamp() - served["seconds"]
        if received > asked["time"] + MAX_SECONDS_TO_RECEIVE:
            return []  # the stream was broken off again later, by a server that has logged nothing of it
        return [killed[-1], failed[-1], asked["time"], received, received + served["admitted"]]

    def table(self, gaps: Sequence[Gap]) -> list[str]:
        """Median, p90 and most of each part, and the parts of the longest gaps."""
        traced = [gap for gap in gaps if gap.parts]
        again = sum(gap.num_broken > 1 for gap in gaps)
        lines = [f"  {len(gaps)} gaps of streams that went on, {again} of them broken off more than once"]
        for name in PARTS if traced else ():
            ordered = sorted(gap.parts[name] for gap in traced)
            p50, p90 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.9))
            lines.append(f"    {name:<16} {p50:6.3f} {p90:6.3f} {ordered[-1]:6.3f}")
        for gap in sorted(gaps, key=lambda gap: -gap.seconds)[:NUM_SHOWN]:
            shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in gap.parts.items())
            lines.append(f"    {gap.seconds:.2f} s, broken off {gap.num_broken} times: {shown or 'not traced'}")
        return lines


def _json(line: str) -> dict[str, Any]:
    """Nothing, of a line that is no object: one that its process did not end."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
