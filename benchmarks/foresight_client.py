"""A workload, sent to a server at its times, and what its clients saw."""

import asyncio
import gc
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.foresight_record import Latencies
from benchmarks.load import LoadFailed, events_of, streamed
from quire.planning.workload import Arrival

FIRST_ID = 100  # of the vocabulary: those before may be special


@dataclass(slots=True)
class Seen:
    """One answer. Times are seconds since the workload began."""

    sent: float
    pieces: list[tuple[float, bytes]]
    ended: float = 0.0
    first: float = 0.0
    num_output: int = 0
    num_cached: int = 0

    def read(self) -> list[int]:
        """-> the ids of the answer."""
        ids: list[int] = []
        for moment, event in events_of(self.pieces):
            if "error" in event:
                raise LoadFailed(f"the stream ended in {event['error']}")
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            self.num_cached = details.get("cached_tokens", self.num_cached)
            if new := [token for choice in event.get("choices", []) for token in choice.get("token_ids") or ()]:
                self.first = self.first or moment
                self.ended = moment
                ids += new
        if not ids:
            raise LoadFailed("an answer had no tokens")
        self.num_output = len(ids)
        return ids


class Client:
    """Sends prompts of a workload in the model's ids: equal tokens of it are equal ids, others random ones."""

    def __init__(self, url: str, vocab_size: int, seed: int) -> None:
        self._url, self._vocab_size = url, vocab_size
        self._rng = random.Random(seed)
        self._ids: dict[int, int] = {}

    def run(self, arrivals: list[Arrival]) -> tuple[float, list[float], Latencies]:
        """-> when it began (time.perf_counter()), when each arrival was sent since, and what was seen of all."""
        bodies = [self._body(self._translated(arrival), arrival) for arrival in arrivals]
        gc.collect()
        gc.disable()  # it would stop the clients of a small model for as long as a request takes
        try:
            seen = uvloop.run(self._serve(arrivals, bodies))
        finally:
            gc.enable()
        begin = min(chain[0].sent for chain in seen)
        answers = [answer for chain in seen for answer in chain]
        for answer in answers:
            if not answer.num_output:
                answer.read()
        latencies = Latencies(
            [answer.first - answer.sent for answer in answers],
            [answer.ended - answer.sent for answer in answers],
            [answer.num_output for answer in answers],
            max(answer.ended for answer in answers) - begin,
        )
        return begin, [chain[0].sent - begin for chain in seen], latencies

    async def _serve(self, arrivals: list[Arrival], bodies: list[bytes]) -> list[list[Seen]]:
        began = time.perf_counter() + 0.1
        first = arrivals[0].time

        async def one(arrival: Arrival, body: bytes) -> list[Seen]:
            await asyncio.sleep(began + arrival.time - first - time.perf_counter())
            chain, prompt = [], self._translated(arrival)
            while True:
                sent = time.perf_counter()
                chain.append(Seen(sent, await streamed(self._url, "/v1/completions", body)))
                if arrival.followed_by is None:
                    return chain
                answer, arrival = chain[-1].read(), arrival.followed_by
                prompt = prompt + answer + self._translated(arrival)
                body = self._body(prompt, arrival)
                await asyncio.sleep(chain[-1].ended + arrival.time - time.perf_counter())

        return await asyncio.gather(*map(one, arrivals, bodies))

    def _translated(self, arrival: Arrival) -> list[int]:
        ids, rng = self._ids, self._rng
        for token in arrival.prompt_ids:
            if token not in ids:
                ids[token] = rng.randrange(FIRST_ID, self._vocab_size)
        return [ids[token] for token in arrival.prompt_ids]

    @staticmethod
    def _body(prompt: list[int], arrival: Arrival) -> bytes:
        fields: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": arrival.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if arrival.priority:
            fields["priority"] = arrival.priority
        return json.dumps(fields).encode()
