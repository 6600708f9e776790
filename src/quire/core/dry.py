"""DRY (p-e-w, "Don't Repeat Yourself"): what ends the search for repetitions, as token ids."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DryBreaker:
    """A sequence breaker, written with one of `heads` and then all of `tail`."""

    heads: list[int]
    tail: list[int]  # empty: each head contains the whole breaker
