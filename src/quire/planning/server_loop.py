"""The server of a GPU's engine on a virtual clock: one thread, whose event loop takes in turns what has come."""

from collections import deque
from dataclasses import dataclass
from math import inf

from quire.planning.simulated_request import SimulatedRequest
from quire.planning.step_times import SHARES, ServingCosts
from quire.planning.workload import Arrival


@dataclass(slots=True)
class Incoming:
    """A request on its way to the engine."""

    time: float  # when it came, and at last when the engine has it
    number: int
    arrival: Arrival


@dataclass(slots=True)
class Message:
    """What an engine tells of a step."""

    time: float
    num_sampled: int
    begun: list[SimulatedRequest]  # that have their first token by it
    ended: list[SimulatedRequest]


class ServerLoop:
    """A turn begins as soon as the one before has ended and something has come. It takes all that has: so messages that
    came together are one write for each stream, and a request that comes among many messages waits for some of them
    more than once."""

    def __init__(self, costs: ServingCosts) -> None:
        self._costs = costs
        self._free = 0.0  # when the last turn has ended
        self._coming: deque[Incoming] = deque()
        self._messages: deque[Message] = deque()
        self._taking: list[list[Incoming]] = [[] for _ in SHARES[1:]]  # by what the next turn does
        self._num_begun = 0  # requests whose answers begin in the next turn
        self._num_ended = 0  # requests that messages tell of
        self._submitted: list[Incoming] = []
        self._ended: list[SimulatedRequest] = []

    def receive(self, asked: Incoming) -> None:
        self._coming.append(asked)

    def tell(self, message: Message) -> None:
        self._messages.append(message)
        self._num_ended += len(message.ended)

    @property
    def is_awaited(self) -> bool:
        """Whether an engine or a client waits for what it does next."""
        return bool(self._coming or any(self._taking) or self._num_ended)

    @property
    def next_turn(self) -> float:
        if self._num_begun or any(self._taking):
            return self._free
        coming = self._coming[0].time if self._coming else inf
        told = self._messages[0].time if self._messages else inf
        return max(self._free, min(coming, told))

    def run(self, until: float) -> None:
        """Take all turns that begin by then."""
        while (now := self.next_turn) <= until:
            self._turn(now)

    def take_submitted(self) -> list[Incoming]:
        """Those that the engine was given since the last call."""
        submitted, self._submitted = self._submitted, []
        return submitted

    def take_ended(self) -> list[SimulatedRequest]:
        ended, self._ended = self._ended, []
        return ended

    def _turn(self, now: float) -> None:
        """Answers begin, then messages are passed on, then requests are taken."""
        costs, ends = self._costs, now + self._num_begun * (1 - sum(SHARES)) * self._costs.taken
        ends = self._send(now, ends)
        come: list[Incoming] = []
        while self._coming and self._coming[0].time <= now:
            come.append(self._coming.popleft())
        *earlier, submitted = come, *self._taking
        ends += costs.taken * sum(share * len(taken) for share, taken in zip(SHARES, earlier, strict=False))
        for asked in submitted:
            ends += SHARES[-1] * costs.taken + costs.prompt_token * len(asked.arrival.prompt_ids)
            asked.time = ends
        self._taking, self._num_begun, self._free = earlier, len(submitted), ends
        self._submitted += submitted

    def _send(self, now: float, ends: float) -> float:
        """Send what messages have brought by `now`. -> when all is sent"""
        messages = []
        while self._messages and self._messages[0].time <= now:
            messages.append(self._messages.popleft())
        if not messages:
            return ends
        sampled = [message.num_sampled for message in messages]
        costs = self._costs
        ends += costs.message * len(messages) + costs.stream * sum(sampled) + costs.write * max(sampled)
        for message in messages:
            for request in message.begun:
                request.first_token = ends
            for request in message.ended:
                request.finished = ends
            self._ended += message.ended
            self._num_ended -= len(message.ended)
        return ends
