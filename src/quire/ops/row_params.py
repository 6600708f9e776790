"""What the sampler must know of a row: `SamplingParams` without strings, lengths and `n`."""

from dataclasses import dataclass
from enum import IntEnum

from quire.core.dry import DryBreaker
from quire.core.watermark import Watermark

GREEDY_BELOW = 1e-5  # a temperature below it takes the most likely token


class Filter(IntEnum):
    """The FILTERS of core/sampler_order.py, in the default order. The numbers are those of the kernels."""

    TOP_N_SIGMA = 0
    TEMPERATURE = 1
    TOP_K = 2
    TOP_P = 3
    MIN_P = 4
    TYPICAL_P = 5
    XTC = 6


@dataclass(frozen=True, slots=True)
class DryParams:
    """Tokens that would go on repeating `allowed_length` or more tokens are penalized."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1  # tokens to look back; -1: all
    breakers: tuple[DryBreaker, ...] = ()


@dataclass(frozen=True, slots=True)
class MirostatParams:
    """The mirostat sampler, instead of filters."""

    version: int  # 1 or 2
    tau: float = 5.0  # the surprise to hold, in bits
    eta: float = 0.1  # how fast mu follows

    @property
    def initial_mu(self) -> float:
        return 2.0 * self.tau


@dataclass(frozen=True, slots=True)
class RowParams:
    """All that decides a row's tokens, beside its logits and the tokens so far."""

    seed: int
    sample: int  # index among the samples of one request
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences: the last token is never sampled after the others
    stop_ids: tuple[int, ...] = ()  # not sampled while the output is shorter than min_tokens
    min_tokens: int = 0
    num_logprobs: int = -1  # -1: none; 0: of the sampled token; k: and of the k most likely tokens
    logprob_ids: tuple[int, ...] = ()  # tokens whose logprobs follow those, likely or not
    num_candidates: int = 0  # beam search: no token is sampled, the best candidates are returned
    watermark: Watermark | None = None
    no_repeat_ngram: int = 0  # no n-gram of this length twice; 0: any
    dry: DryParams | None = None
    top_n_sigma: float = 0.0  # 0: off
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: MirostatParams | None = None
    order: tuple[Filter, ...] = tuple(Filter)

    @property
    def filters(self) -> list[Filter]:
        """The filters that do something, in their order. Temperature is one of them."""
        active = {
            Filter.TOP_N_SIGMA: self.top_n_sigma > 0.0,
            Filter.TEMPERATURE: self.temperature != 1.0 or self.dynatemp_range > 0.0,
            Filter.TOP_K: self.top_k > 0,
            Filter.TOP_P: self.top_p < 1.0,
            Filter.MIN_P: self.min_p > 0.0,
            Filter.TYPICAL_P: self.typical_p < 1.0,
            Filter.XTC: self.xtc_probability > 0.0,
        }
        return [filter for filter in self.order if active[filter]]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, whatever the filters are."""
        return self.temperature < GREEDY_BELOW
