"""ALiBi: no position embedding; attention scores fall linearly with the distance, with a slope for each head."""

import math


def alibi_slopes(heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """2^(-max_bias i / n) for i = 1 .. n, where n is the number of heads, if that is a power of two.

    If not, n is the next power of two, and the heads take slopes 2, 4, 6, ... of the n, then 1, 3, 5, ..."""
    n = 1 << (heads - 1).bit_length()
    steps = [2.0 ** (-max_bias * i / n) for i in range(1, n + 1)]
    return tuple(steps if n == heads else [*steps[1::2], *steps[::2]][:heads])


def to_bfloat16(value: float) -> float:
    """The nearest bf16, which has 8 bits of significand."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)
