"""ALiBi: instead of positions, scores that fall with the distance, for each head with another slope."""

import math


def slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """2^(-most i / n) for i = 1 .. n where the heads are a power of two. Else n is the next power of two, and the heads
    take every second of the n slopes, beginning with the second; then those left out, as many as are needed."""
    n = 1 << (heads - 1).bit_length()
    steps = [2.0 ** (-most * i / n) for i in range(1, n + 1)]
    return tuple(steps if n == heads else [*steps[1::2], *steps[::2]][:heads])


def to_bfloat16(value: float) -> float:
    """The nearest number that has 8 bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)
