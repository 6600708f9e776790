"""The reasoning of one completion, in tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """How reasoning is marked, and how long it may be. Before structured output it is free: the grammar holds behind
    its end."""

    begin_id: int  # the token, or the first one, that begins reasoning
    end_ids: tuple[int, ...]  # the tokens that end it, in this order
    begun: bool  # the completion begins with reasoning
    tokens: int | None = None  # once so many are sampled, only its end may follow; None: no limit
