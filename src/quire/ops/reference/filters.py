"""Which tokens of a row may be sampled, and how much each weighs: the filters in plain torch, the specification of
native/src/survivors.cpp.

Probabilities are integer weights. A token weighs round(2**44 * exp((logit - max) / temperature)), and sums of integers
are exact in any order. So a row's token does not depend on how a device splits its sums."""

from collections.abc import Callable
from math import ceil, exp, exp2, factorial, inf, log, pow, sqrt

import torch
from torch import Tensor

from quire.ops.row_params import GREEDY_BELOW, Filter, MirostatParams, RowParams

MAX_WEIGHT = 1 << 44  # of the most likely token
MIN_DISTANCE = -32.0  # exp(-32) * 2**44 = 0.22: a token this far below the greatest logit weighs 0
FLOAT_MAX = torch.finfo(torch.float32).max
MAX_DEVIATION = 2.0**14  # logits further below the greatest do not count in a standard deviation
MIROSTAT_TOKENS = 100  # the most likely tokens, of which mirostat 1 estimates how fast probabilities fall


def greatest_of(logits: Tensor) -> float:
    return float(logits.max().clamp(max=FLOAT_MAX))


def distances(logits: Tensor, temperature: float) -> Tensor:
    """(logit - max) / temperature, fp64 from MIN_DISTANCE to 0."""
    return _distances_from(greatest_of(logits), logits, temperature)


def _distances_from(greatest: float, logits: Tensor, temperature: float) -> Tensor:
    return ((logits.double() - greatest) * (1.0 / temperature)).clamp(max=0.0).clamp(min=MIN_DISTANCE)


def weights(distance: Tensor) -> Tensor:
    """round(2**44 * exp(distance)), to a relative 1e-11: a polynomial of single multiplications and additions, which
    every device rounds alike. distance [n] fp64 in [-32, 0] -> [n] int64"""
    power = (distance * 1.4426950408889634).round()
    r = distance - power * 0.6931471805599453  # |r| <= ln(2) / 2
    e = torch.full_like(r, 1.0 / factorial(9))
    for n in range(8, -1, -1):
        e = e * r + 1.0 / factorial(n)
    scaled = (e.view(torch.int64) + (power.long() + 44 << 52)).view(torch.float64)  # e * 2 ** (power + 44)
    return scaled.round().long()


class Survivors:
    """The tokens that may still be sampled. Each filter sees what the one before it leaves."""

    def __init__(self, logits: Tensor) -> None:
        """logits [vocab], edited; there is one above -inf."""
        order = logits.argsort(descending=True, stable=True)  # the most likely first; among equals the lowest id
        self.ids = order[logits[order] > -inf]
        self._logits = logits
        self._weigh(1.0)

    def _weigh(self, temperature: float) -> None:
        """The greatest logit that is left has the greatest weight."""
        self._distance = _distances_from(greatest_of(self._logits[self.ids]), self._logits, temperature)
        self._weight = weights(self._distance)

    @property
    def weight(self) -> Tensor:
        """[n], of the ids."""
        return self._weight[self.ids]

    @property
    def total(self) -> int:
        return int(self.weight.sum())

    def filter(self, params: RowParams, xtc_chance: float) -> None:
        """The row's filters in its order. `xtc_chance`: uniform in [0, 1)"""
        steps: dict[Filter, Callable[[], None]] = {
            Filter.TOP_N_SIGMA: lambda: self.top_n_sigma(params.top_n_sigma),
            Filter.TEMPERATURE: lambda: self.temperature(params),
            Filter.TOP_K: lambda: self.top_k(params.top_k),
            Filter.TOP_P: lambda: self._keep_share(params.top_p, self.ids),
            Filter.MIN_P: lambda: self.min_p(params.min_p),
            Filter.TYPICAL_P: lambda: self.typical_p(params.typical_p),
            Filter.XTC: lambda: self.xtc(params.xtc_threshold) if xtc_chance < params.xtc_probability else None,
        }
        for filter in params.filters:
            steps[filter]()

    def top_k(self, k: int) -> None:
        self.ids = self.ids[:k]

    def min_p(self, share: float) -> None:
        self.ids = self.ids[self.weight.double() >= share * float(self.weight.max())]

    def typical_p(self, share: float) -> None:
        ids = self.ids[self.weight > 0].sort().values
        untypical = (self._mean_distance(ids) - self._distance[ids]).abs()  # = |surprisal - entropy|
        self._keep_share(share, ids[untypical.argsort(stable=True)])
        ids = self.ids.sort().values
        self.ids = ids[self._logits[ids].argsort(descending=True, stable=True)]

    def top_n_sigma(self, n: float) -> None:
        """Keep logits at most n standard deviations below the greatest. Deviations are rounded to 2**-16, and summed as
        integers."""
        logits = self._logits[self.ids]
        below = (greatest_of(logits) - logits.double()).clamp(min=0.0)
        steps = [int(step) for step in (below[below <= MAX_DEVIATION] * 2.0**16).round().tolist()]
        mean = float(sum(steps)) / len(steps)
        variance = float(sum(step * step for step in steps)) / len(steps) - mean * mean
        self.ids = self.ids[below <= n * sqrt(max(variance, 0.0)) * 2.0**-16]

    def temperature(self, params: RowParams) -> None:
        temperature = params.temperature
        if params.dynatemp_range > 0.0 and len(self.ids) > 1:
            temperature = self._dynamic_temperature(params)
        if temperature < GREEDY_BELOW:
            self.ids = self.ids[:1]
        else:
            self._weigh(temperature)

    def _dynamic_temperature(self, params: RowParams) -> float:
        """From temperature - range, where one token is certain, to temperature + range, where all are as likely."""
        low, high = max(params.temperature - params.dynatemp_range, 0.0), params.temperature + params.dynatemp_range
        entropy = log(self.total / MAX_WEIGHT) - self._mean_distance(self.ids)
        return low + (high - low) * pow(max(entropy, 0.0) / log(len(self.ids)), params.dynatemp_exponent)

    def xtc(self, threshold: float) -> None:
        """Drop the tokens whose probability reaches the threshold, but for the least likely of them."""
        reaching = (self.weight.double() >= threshold * float(self.total)) & (self.weight > 0)
        self.ids = self.ids[max(int(reaching.sum()) - 1, 0) :]

    def mirostat(self, mirostat: MirostatParams, mu: float, vocab: int) -> None:
        if mirostat.version == 1:
            self.top_k(self._mirostat_k(mu, vocab))
            return
        kept = (self.weight.double() >= float(self.total) * exp2(min(-mu, 1000.0))) & (self.weight > 0)
        self.ids = self.ids[: max(int(kept.sum()), 1)]

    def _mirostat_k(self, mu: float, vocab: int) -> int:
        """The k of which Zipf's law, with the exponent of the most likely tokens, expects a surprise of mu."""
        distance = self._distance[self.ids[:MIROSTAT_TOKENS]].tolist()
        above = below = 0.0
        for i in range(len(distance) - 1):
            t = log((i + 2) / (i + 1))
            above += t * (distance[i] - distance[i + 1])
            below += t * t
        exponent = above / below if below else 0.0
        if exponent <= 0.0:  # all are as likely
            return vocab
        epsilon = exponent - 1.0
        spread = epsilon / (1.0 - pow(float(vocab), -epsilon)) if epsilon else 1.0 / log(float(vocab))
        log_k = (log(spread) + mu * log(2.0)) / exponent
        return vocab if log_k >= log(float(vocab)) else max(int(exp(log_k)), 1)

    def _keep_share(self, share: float, ids: Tensor) -> None:
        """The smallest prefix of `ids` that has `share` of their weight: the token that reaches it is kept."""
        running = self._weight[ids].cumsum(0)
        total = int(running[-1])
        need = min(ceil(share * total), total)
        self.ids = ids[running - self._weight[ids] < need]

    def _mean_distance(self, ids: Tensor) -> float:
        """The weighted mean, with distances rounded to 2**-40: summed in integers, so that the order does not
        matter."""
        weight = self._weight[ids]
        fixed_point = (self._distance[ids] * 2.0**40).round().long()
        weighted: int = sum(w * d for w, d in zip(weight.tolist(), fixed_point.tolist(), strict=True))
        return float(weighted) / float(int(weight.sum())) / 2.0**40
