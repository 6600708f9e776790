"""The most recent requests and token latencies, for the live view. Histograms cover the time since the start."""

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec

from quire.core.records import RequestRecord
from quire.planning.percentiles import percentile

NUM_REQUESTS = 512
NUM_TOKEN_LATENCIES = 2048


class Percentiles(msgspec.Struct):
    """Seconds."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Recent:
    """Appends for each token and each request. Percentiles are computed when the live view asks for them."""

    def __init__(self) -> None:
        self.num_finished = 0
        self._requests: deque[RequestRecord] = deque(maxlen=NUM_REQUESTS)
        self._token_latencies: deque[float] = deque(maxlen=NUM_TOKEN_LATENCIES)  # seconds

    def tokens(self, seconds: Iterable[float]) -> None:
        self._token_latencies.extend(seconds)

    def request(self, record: RequestRecord) -> None:
        self.num_finished += 1
        self._requests.append(record)

    def since(self, num_seen: int) -> list[RequestRecord]:
        """The requests that finished after the first `num_seen`, as far as they are kept."""
        num_new = min(self.num_finished - num_seen, len(self._requests))
        return list(islice(self._requests, len(self._requests) - num_new, None))

    def latencies(self) -> dict[str, Percentiles]:
        requests = list(self._requests)
        return {
            "first_token": percentiles(ttft for record in requests if (ttft := record.ttft) is not None),
            "next_token": percentiles(self._token_latencies),
            "whole": percentiles(record.finished - record.arrival for record in requests),
        }


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return Percentiles(0)
    return Percentiles(len(ordered), *(percentile(ordered, share) for share in (50, 90, 99)))
