"""When requests are sent."""

import math
import random
from itertools import accumulate

from quire.cli.bench.serve.flags import LoadFlags


def arrival_times(flags: LoadFlags, count: int, seed: int) -> list[float]:
    """Seconds after the start. With one rate, the last comes after exactly count / rate seconds, as in vLLM."""
    rates = [_rate(flags, index / max(count - 1, 1)) for index in range(count)]
    rng = random.Random(seed)
    times = list(accumulate(_pause(rng, rate, flags.burstiness) for rate in rates))
    if flags.ramp_up_strategy is None and times[-1] > 0:
        scale = count / flags.request_rate / times[-1]
        return [time * scale for time in times]
    return times


def _rate(flags: LoadFlags, progress: float) -> float:
    start, end = flags.ramp_up_start_rps, flags.ramp_up_end_rps
    if flags.ramp_up_strategy is None or start is None or end is None:
        return flags.request_rate
    if flags.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)


def _pause(rng: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1 / rate
    return rng.gammavariate(burstiness, 1 / (rate * burstiness))
