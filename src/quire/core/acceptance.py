"""How likely draft tokens are accepted: over all sequences of a method, and of one sequence."""

from collections.abc import Sequence

METHOD_WEIGHT = 10.0  # of the method's prior, in draft tokens
METHOD_MEMORY = 0.995  # what a draft token leaves of the weight of those before it
SEQUENCE_WEIGHT = 4.0  # of the method's rate in that of a sequence, in draft tokens
SEQUENCE_MEMORY = 0.85


def expected_tokens(rate: float, count: int) -> float:
    """Tokens that a step with `count` draft tokens yields if each is accepted at `rate`, the one sampled after them
    included: (1 - r^(k+1)) / (1 - r)."""
    return count + 1.0 if rate >= 1 else float((1 - rate ** (count + 1)) / (1 - rate))


class _RunningShare:
    """The share of draft tokens that were accepted; older ones count less."""

    __slots__ = ("_memory", "accepted", "trials")

    def __init__(self, accepted: float, trials: float, memory: float) -> None:
        self.accepted, self.trials, self._memory = accepted, trials, memory

    def add(self, accepted: bool) -> None:
        self.accepted = self.accepted * self._memory + accepted
        self.trials = self.trials * self._memory + 1.0


class MethodAcceptance:
    """The acceptance rate of a method: what a new sequence starts with."""

    def __init__(self, prior: float) -> None:
        self.num_trials = 0  # draft tokens so far
        self._share = _RunningShare(prior * METHOD_WEIGHT, METHOD_WEIGHT, METHOD_MEMORY)

    @property
    def rate(self) -> float:
        return self._share.accepted / self._share.trials

    def add(self, accepted: bool) -> None:
        self.num_trials += 1
        self._share.add(accepted)


class AcceptanceRate:
    """The probability that the next draft token of a sequence is accepted, by one method."""

    __slots__ = ("_method", "_share", "num_read")

    def __init__(self, method: MethodAcceptance) -> None:
        self._method = method
        self._share = _RunningShare(0.0, 0.0, SEQUENCE_MEMORY)
        self.num_read = 0  # leading tokens of the sequence that a method which is not free has read

    @property
    def rate(self) -> float:
        share = self._share
        return (share.accepted + SEQUENCE_WEIGHT * self._method.rate) / (share.trials + SEQUENCE_WEIGHT)

    @property
    def num_trials(self) -> float:
        """Draft tokens that the rate rests on; older ones count less."""
        return self._share.trials

    def update(self, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare `drafts` with the sampled `tokens`, up to the first rejected one: those behind it teach nothing."""
        for draft, token in zip(drafts, tokens, strict=False):
            self._share.add(draft == token)
            self._method.add(draft == token)
            if draft != token:
                return
