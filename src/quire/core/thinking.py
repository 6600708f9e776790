"""A limit on the tokens of reasoning before an answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Once so many tokens of reasoning are sampled, only the token that ends it may follow."""

    tokens: int
    begin_id: int  # the token, or the first one, that begins reasoning
    end_id: int
    begun: bool  # the completion begins with reasoning
