"""How likely draft tokens are accepted: over all sequences of a method, and of one sequence."""

from bisect import bisect
from collections.abc import Sequence

from quire.core.draft_tree import ROOT, compared_levels
from quire.core.plan import UNKNOWN

METHOD_WEIGHT = 10.0  # of the method's prior, in draft tokens
METHOD_MEMORY = 0.995  # what a draft token leaves of the weight of those before it
POSITION_WEIGHT = 2.0  # of the position before in the rate of a position, in draft tokens
MAX_POSITIONS = 8  # later ones have the rate of the last
UNTRIED_MEMORY = 0.9997  # what a draft token leaves of the weight of later positions: they are tried again at last
STALE_TRIALS = 256  # of the method, after which a sequence that has none of its own looks at the method's rates again
MIN_ODDS_RATE, MAX_ODDS_RATE = 0.02, 0.98  # of a sequence beside its method
SEQUENCE_WEIGHT = 4.0  # of the method's rate in that of a sequence, in draft tokens
SEQUENCE_MEMORY = 0.85
RESCUE_PRIOR = 0.3  # of the tokens that the likeliest child missed, those that another child has
CONFIDENCE_BINS = (0.05, 0.15, 0.35, 0.6, 0.85)  # where the next begins
MAX_DEPTH = 4  # deeper levels count as this
CALIBRATION_WEIGHT = 2.0  # of the belief that confidences are right, in expected acceptances
MAX_NODE_RATE = 0.98
NODES_MEMORY = 0.95
MAX_UNANSWERED = 6  # after so many requests for drafts without an answer, the next is 2**6 tokens later


def expected_tokens(rate: float, count: int) -> float:
    """Tokens that a step with `count` draft tokens yields if each is accepted at `rate`, the one sampled after them
    included: (1 - r^(k+1)) / (1 - r)."""
    return count + 1.0 if rate >= 1 else float((1 - rate ** (count + 1)) / (1 - rate))


class _RunningShare:
    """The share of draft tokens that were accepted, or of acceptances among those expected; older ones count less."""

    __slots__ = ("_memory", "accepted", "trials")

    def __init__(self, accepted: float, trials: float, memory: float) -> None:
        self.accepted, self.trials, self._memory = accepted, trials, memory

    def add(self, accepted: bool, trials: float = 1.0) -> None:
        self.accepted = self.accepted * self._memory + accepted
        self.trials = self.trials * self._memory + trials

    def add_run(self, num_accepted: int, num_rejected: int) -> None:
        """So many accepted draft tokens, and then so many rejected ones: 0 or 1."""
        accepted, trials, memory = self.accepted, self.trials, self._memory
        for _ in range(num_accepted):
            accepted = accepted * memory + 1.0
            trials = trials * memory + 1.0
        for _ in range(num_rejected):
            accepted = accepted * memory
            trials = trials * memory + 1.0
        self.accepted, self.trials = accepted, trials

    def forget(self, memory: float) -> None:
        self.accepted *= memory
        self.trials *= memory

    @property
    def rate(self) -> float:
        return self.accepted / self.trials


class MethodAcceptance:
    """The acceptance rate of a method: what a new sequence starts with."""

    def __init__(self, prior: float, tree_nodes: int = 0) -> None:
        self.num_trials = 0  # draft tokens so far
        self.mean_nodes = float(tree_nodes)  # that are verified of a tree
        self._share = _RunningShare(prior * METHOD_WEIGHT, METHOD_WEIGHT, METHOD_MEMORY)
        # Of a draft token whose predecessors are accepted, by position: later ones are often worse.
        self._positions = [_RunningShare(prior * METHOD_WEIGHT, METHOD_WEIGHT, METHOD_MEMORY)]
        self.position_rates = [prior]  # a later position has the last of them
        self._rescued = _RunningShare(RESCUE_PRIOR * METHOD_WEIGHT, METHOD_WEIGHT, METHOD_MEMORY)
        # Of the nodes of a tree, from the likeliest on: how likely they were, on average.
        self._tree: list[float] = []
        # By depth and bin of confidence, acceptances and the sum of the confidences.
        self._calibration: dict[tuple[int, int], _RunningShare] = {}

    @property
    def rate(self) -> float:
        return self._share.rate

    @property
    def rescue_rate(self) -> float:
        """Of a verified tree: how often a token is a child of a node if it is not the likeliest child."""
        return self._rescued.rate

    def add(self, num_accepted: int, num_rejected: int, first: int = 0) -> None:
        """So many accepted draft tokens from position `first` on, and then so many rejected ones: 0 or 1."""
        self.num_trials += num_accepted + num_rejected
        self._share.add_run(num_accepted, num_rejected)
        rates, end = self.position_rates, first + num_accepted + num_rejected
        while len(rates) < min(end, MAX_POSITIONS):
            self._positions.append(_RunningShare(0.0, 0.0, METHOD_MEMORY))
            rates.append(rates[-1])
        for position in range(first, len(rates)):
            share = self._positions[position]
            if position < end:
                share.add(position < first + num_accepted)
            else:
                share.forget(UNTRIED_MEMORY)
            if position:
                weight = POSITION_WEIGHT + share.trials
                rates[position] = (share.accepted + POSITION_WEIGHT * rates[position - 1]) / weight
            else:
                rates[0] = share.rate

    def node_rate(self, depth: int, confidence: float) -> float:
        """How likely a node of that confidence is accepted after its parent."""
        share = self._calibration.get(_bin(depth, confidence))
        rate = confidence * share.rate if share else confidence
        return rate if rate < MAX_NODE_RATE else MAX_NODE_RATE

    def add_node(self, depth: int, confidence: float, accepted: bool) -> None:
        key = _bin(depth, confidence)
        if key not in self._calibration:
            self._calibration[key] = _RunningShare(CALIBRATION_WEIGHT, CALIBRATION_WEIGHT, METHOD_MEMORY)
        self._calibration[key].add(accepted, confidence)

    def probabilities_of_unknown(self, count: int) -> list[float]:
        """Of the nodes of a tree that is not known, from the likeliest on: as of those before. The first is certain, so
        that it is verified."""
        known = self._tree[:count]
        return known + (known[-1:] or [1.0]) * (count - len(known))

    def add_probabilities(self, probabilities: Sequence[float]) -> None:
        """Of the nodes of a tree."""
        ranked = sorted(probabilities, reverse=True)
        for place, (mean, one) in enumerate(zip(self._tree, ranked, strict=False)):
            self._tree[place] = mean + (one - mean) * (1 - NODES_MEMORY)
        self._tree += ranked[len(self._tree) :]

    def add_tree(self, drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Of a tree, these nodes were verified."""
        self.mean_nodes += (len(drafts) - self.mean_nodes) * (1 - NODES_MEMORY)
        for level, node in compared_levels(drafts, parents, tokens):
            if node != level[0]:
                self._rescued.add(node is not None)


class AcceptanceRate:
    """The probability that the next draft token of a sequence is accepted, by one method."""

    __slots__ = (
        "_expected", "_method", "_nodes", "_num_unanswered", "_positions", "_share", "ask_at", "asked_step", "num_read",
    )  # fmt: skip

    def __init__(self, method: MethodAcceptance) -> None:
        self._method = method
        self._share = _RunningShare(0.0, 0.0, SEQUENCE_MEMORY)
        self._expected = 0.0  # of the trials of the share, those that the method's rates of positions expect to succeed
        self._positions: tuple[int, list[float]] = -STALE_TRIALS, []  # trials of the method when they were computed
        # Accepted nodes of trees, among those that the method's rates expect.
        self._nodes = _RunningShare(CALIBRATION_WEIGHT, CALIBRATION_WEIGHT, SEQUENCE_MEMORY)
        # Of a method that is not free:
        self.num_read = 0  # leading tokens of the sequence that it has read
        self.asked_step = -1  # the last step after which drafts were asked for
        self.ask_at = 0  # tokens of the sequence before which drafts are not asked for
        self._num_unanswered = 0

    @property
    def rate(self) -> float:
        """Of the likeliest draft token."""
        share = self._share
        return (share.accepted + SEQUENCE_WEIGHT * self._method.rate) / (share.trials + SEQUENCE_WEIGHT)

    def position_rates(self, count: int) -> list[float]:
        """Of the first draft tokens of a chain, each after those before it: the method's, shifted (in log odds) as this
        sequence differs from what the method expected of it."""
        trials, known = self._positions
        if count > len(known) or self._method.num_trials >= trials + STALE_TRIALS:
            known = self._shifted_rates(count)
            self._positions = self._method.num_trials, known
        return known[:count]

    def _shifted_rates(self, count: int) -> list[float]:
        weight, rates = self._share.trials + SEQUENCE_WEIGHT, self._method.position_rates
        prior = SEQUENCE_WEIGHT * self._method.rate
        found = min(max((self._share.accepted + prior) / weight, MIN_ODDS_RATE), MAX_ODDS_RATE)
        expected = min(max((self._expected + prior) / weight, MIN_ODDS_RATE), MAX_ODDS_RATE)
        odds = found * (1 - expected) / (expected * (1 - found))
        last = rates[-1]
        padded = rates[:count] + [last] * (count - len(rates))
        return [rate * odds / (1 + rate * (odds - 1)) for rate in padded]

    def accepted_tokens(self, count: int) -> float:
        """Of a chain of so many draft tokens, how many are expected to be accepted."""
        total, together = 0.0, 1.0
        for rate in self.position_rates(count):
            together *= rate
            total += together
        return total

    @property
    def level_rate(self) -> float:
        """Of the level of a tree: that one of its nodes is accepted."""
        return self.rate + (1 - self.rate) * self._method.rescue_rate

    @property
    def num_trials(self) -> float:
        """Draft tokens that the rate rests on; older ones count less."""
        return self._share.trials

    def note_answer(self, has_drafts: bool, num_known: int) -> None:
        """Whether there were drafts when they were asked for. A method may have left a sequence alone for too long: to
        ask for its drafts again and again would make every step wait for none."""
        self._num_unanswered = 0 if has_drafts else min(self._num_unanswered + 1, MAX_UNANSWERED)
        self.ask_at = num_known + (1 << self._num_unanswered) if self._num_unanswered else 0

    def forget_answers(self) -> None:
        self._num_unanswered = self.ask_at = 0

    def probabilities(self, parents: Sequence[int], confidences: Sequence[float]) -> list[float]:
        """Of each node of a tree: that it and its ancestors are accepted."""
        depths: list[int] = []
        found: list[float] = []
        node_rate, own_rate = self._method.node_rate, self._nodes.rate
        for parent, confidence in zip(parents or range(ROOT, len(confidences) - 1), confidences, strict=True):
            depth, before = (1, 1.0) if parent == ROOT else (depths[parent] + 1, found[parent])
            depths.append(depth)
            found.append(before * min(node_rate(depth, confidence) * own_rate, MAX_NODE_RATE))
        return found

    def probabilities_of_unknown(self, count: int) -> list[float]:
        """The same of a tree that is not known yet, from the likeliest node on."""
        return self._method.probabilities_of_unknown(count)

    def update(self, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare `drafts` with the sampled `tokens`, up to the first rejected one: those behind it teach nothing. Of
        drafts that are UNKNOWN, all but the last token were accepted."""
        compared = min(len(drafts), len(tokens))
        num_accepted = 0
        while num_accepted < compared and (
            drafts[num_accepted] == tokens[num_accepted]
            if drafts[num_accepted] != UNKNOWN
            else num_accepted + 1 < len(tokens)
        ):
            num_accepted += 1
        self._add(num_accepted, int(num_accepted < compared))

    def update_tree(
        self, drafts: Sequence[int], parents: Sequence[int], confidences: Sequence[float], tokens: Sequence[int]
    ) -> None:
        """The same for nodes with confidences: what was sampled also tells of those that were not verified."""
        self._method.add_probabilities(self.probabilities(parents, confidences))
        for depth, (level, accepted) in enumerate(compared_levels(drafts, parents, tokens), 1):
            self._add(int(accepted == level[0]), int(accepted != level[0]), depth - 1)
            expected = sum(self._method.node_rate(depth, confidences[node]) for node in level)
            self._nodes.add(accepted is not None, min(expected, 1.0))
            for node in level:
                self._method.add_node(depth, confidences[node], node == accepted)

    def _add(self, num_accepted: int, num_rejected: int, first: int = 0) -> None:
        rates = self._method.position_rates
        for position in range(first, first + num_accepted + num_rejected):
            self._expected = self._expected * SEQUENCE_MEMORY + rates[min(position, len(rates) - 1)]
        self._share.add_run(num_accepted, num_rejected)
        self._method.add(num_accepted, num_rejected, first)
        self._positions = -STALE_TRIALS, []


def _bin(depth: int, confidence: float) -> tuple[int, int]:
    return depth if depth < MAX_DEPTH else MAX_DEPTH, bisect(CONFIDENCE_BINS, confidence)
