"""Tests marked `trial` draw at random. `make trials` runs them alone, at least LENGTH times as long as `make test`."""

import os

LENGTH = int(os.environ.get("QUIRE_TRIAL_LENGTH", "1"))


def rounds(count: int) -> int:
    """`count` for each unit of LENGTH, and half as many in `make test`."""
    return count * LENGTH if LENGTH > 1 else count // 2
