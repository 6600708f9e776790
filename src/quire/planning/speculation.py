"""When speculative decoding pays: the tokens that a step is expected to give, over what the step costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.core.acceptance import expected_tokens

ACCEPTANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NUM_DRAFTS = (1, 2, 3, 4, 5, 8)


def speedup(acceptance: float, num_drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Against plain decoding. `draft_cost`: seconds of one draft token, `verify_cost`: of a step that verifies, both as
    shares of a plain step."""
    return expected_tokens(acceptance, num_drafts) / (verify_cost + num_drafts * draft_cost)


@dataclass(frozen=True, slots=True)
class SpeculationTable:
    """Speedups over acceptance a and k draft tokens, for one model and load."""

    draft_cost: float  # of one draft token, as a share of a plain step; 0: prompt lookup
    verify_costs: Mapping[int, float]  # by k, of the step that verifies them
    missed: float = 0.0  # steps that a sequence misses while it waits for its drafts: they have to gain more tokens

    def speedup(self, acceptance: float, num_drafts: int) -> float:
        """1: the engine does not draft."""
        if expected_tokens(acceptance, num_drafts) - 1 <= self.missed:
            return 1.0
        return speedup(acceptance, num_drafts, self.draft_cost, self.verify_costs[num_drafts])

    def best(self, acceptance: float) -> tuple[int, float]:
        """-> how many draft tokens pay best, and the speedup; (0, 1.0) where none does."""
        gain, k = max((self.speedup(acceptance, k), k) for k in self.verify_costs)
        return (k, gain) if gain > 1 else (0, 1.0)

    def lines(self) -> list[str]:
        """The table as text: a row for each acceptance rate, a column for each k."""
        head = "  acceptance" + "".join(f"{f'k={k}':>8}" for k in self.verify_costs)
        rows = [
            f"  {acceptance:>10.0%}" + "".join(f"{self.speedup(acceptance, k):>7.2f}x" for k in self.verify_costs)
            for acceptance in ACCEPTANCES
        ]
        return [head, *rows]
