"""Penalties and bans of what was said before, in plain Python: the specification of native/src/repetition.cpp."""

from collections.abc import Sequence
from math import log, pow

from quire.ops.row_params import DryParams

FLOAT_MAX = 3.4028234663852886e38
FLOAT_MAX_LOG = 88.7228391  # of the greatest fp32


def ends_ngram(tokens: Sequence[int], size: int) -> set[int]:
    """The tokens that would complete an n-gram of `size` tokens that is among `tokens` already."""
    end = len(tokens) - size + 1
    suffix = list(tokens[end:]) if end >= 0 else []
    return {tokens[i + size - 1] for i in range(end) if list(tokens[i : i + size - 1]) == suffix}


def dry_penalties(dry: DryParams, tokens: Sequence[int]) -> dict[int, float]:
    """What DRY subtracts from the logit of each token that would go on repeating what was said before."""
    window = tokens if dry.last_n < 0 else tokens[max(len(tokens) - dry.last_n, 0) :]
    limit = _repeat_limit(dry, window)
    if len(window) <= dry.allowed_length or limit < dry.allowed_length:
        return {}
    longest: dict[int, int] = {}  # by token: how many tokens before it are the last ones of the window, too
    for end in range(1, len(window)):
        length = min(_common_suffix(window[:end], window), limit)
        if length >= dry.allowed_length:
            longest[window[end]] = max(longest.get(window[end], 0), length)
    breaking = {head for breaker in dry.breakers if not breaker.tail for head in breaker.heads}
    return {token: penalty(dry, length) for token, length in longest.items() if token not in breaking}


def penalty(dry: DryParams, length: int) -> float:
    exponent = length - dry.allowed_length
    if dry.base > 1.000001:
        exponent = min(exponent, int(FLOAT_MAX_LOG / log(dry.base)))
    return min(dry.multiplier * pow(dry.base, exponent), FLOAT_MAX)


def _repeat_limit(dry: DryParams, window: Sequence[int]) -> int:
    """How many of the last tokens follow the last sequence breaker. Of the breakers that begin with one token, the
    longest counts."""
    for back, token in enumerate(reversed(window)):  # `back` tokens follow it
        following = list(window[len(window) - back :])
        tails = [len(b.tail) for b in dry.breakers if token in b.heads and following[: len(b.tail)] == b.tail]
        if tails:
            return back - max(tails)
    return len(window)


def _common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length
