"""Beam search: which continuations survive. It decides as transformers' `generate(num_beams=k, do_sample=False)` does.

The continuations of all beams are ranked together, best first. A continuation that ends, with a stop token or at the
last position, is a result only if it is among the first k. The first k that do not end are the next beams."""

from dataclasses import dataclass, field

from quire.core.request import IdLogprob


@dataclass(slots=True)
class Beam:
    """One hypothesis. `tokens` is its output, without the prompt."""

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0  # the sum over `tokens`
    logprobs: list[list[IdLogprob]] = field(default_factory=list)  # for each token: itself, then the best alternatives
    score: float = 0.0  # of an ended beam: logprob / length ** length_penalty
    stop_token: int | None = None  # the token that ended the beam; None: it reached its maximum length


class BeamSearch:
    """The search for one prompt. Give it the continuations of `beams`, in that order, until it is `done`."""

    def __init__(
        self,
        width: int,
        *,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        num_logprobs: int = 0,
        num_start_tokens: int = 0,
        forced_eos_id: int | None = None,
    ) -> None:
        self.width = width
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.min_tokens = min_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.num_logprobs = num_logprobs  # alternatives that are kept for each token
        self.num_start_tokens = num_start_tokens  # that every beam begins with, and that count in its length
        self.forced_eos_id = forced_eos_id  # the last token of beams that reach their maximum length
        self.beams = [Beam()]  # at first the prompt alone
        self.results: list[Beam] = []  # the best `width` ended beams, best first
        self.done = False

    def advance(self, continuations: list[list[IdLogprob]]) -> list[int]:
        """Replace `beams` by their best continuations; returns for each new beam the index of its parent."""
        assert not self.done and len(continuations) == len(self.beams), "every beam needs its continuations"
        length = len(self.beams[0].tokens) + 1
        forced = self.forced_eos_id if length == self.max_tokens else None
        if forced is not None:
            continuations = [[IdLogprob(forced, 0.0, 1)] for _ in self.beams]
        scale = (length + self.num_start_tokens) ** self.length_penalty
        candidates = [
            (beam.logprob + each.logprob, parent, each)
            for parent, (beam, best) in enumerate(zip(self.beams, continuations, strict=True))
            for each in best
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: the earlier beam, then its more likely token
        beams: list[Beam] = []
        parents: list[int] = []
        for rank, (logprob, parent, chosen) in enumerate(candidates):
            if len(beams) == self.width:
                break
            stops = chosen.token in self.stop_ids and length >= self.min_tokens and forced is None
            if not stops and length < self.max_tokens:
                beams.append(self._continue(parent, chosen, logprob, continuations[parent]))
                parents.append(parent)
            elif rank < self.width:
                beam = self._continue(parent, chosen, logprob, continuations[parent])
                beam.score = logprob / scale
                beam.stop_token = chosen.token if stops else None
                self.results.append(beam)
        self.results.sort(key=lambda beam: -beam.score)  # stable: among equals the earlier result is kept
        del self.results[self.width :]
        self.beams = beams
        self.done = not beams or self._decided(beams[0].logprob / scale)
        return parents

    def _continue(self, parent: int, chosen: IdLogprob, logprob: float, best: list[IdLogprob]) -> Beam:
        old = self.beams[parent]
        return Beam([*old.tokens, chosen.token], logprob, [*old.logprobs, [chosen, *best[: self.num_logprobs]]])

    def _decided(self, best_live: float) -> bool:
        """Whether no live beam can displace a result, judged by the best one's score at its present length."""
        if len(self.results) < self.width:
            return False
        return self.early_stopping or best_live <= self.results[-1].score
