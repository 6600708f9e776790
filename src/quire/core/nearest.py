"""The known names that look like a wrong one, for hints."""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_NAME = 64  # characters; comparing takes time that grows with the square of the length


def nearest(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most `n` of them, the nearest first. A name longer than any real one is near to none."""
    return get_close_matches(name, list(known), n, cutoff) if len(name) <= MAX_NAME else []
