"""Sampling parameters of a request. Names and defaults are vLLM's."""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from quire.core.dry import DryBreaker
from quire.core.errors import BadRequest
from quire.core.sampler_order import sampler_order
from quire.core.structured import Structured
from quire.core.thinking import Thinking
from quire.core.watermark import Watermark

MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_SAMPLES = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_LISTED = 4096  # token ids in stop_token_ids, and in logit_bias
MAX_BAD_WORDS = 256  # the sampler looks for each at every step
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_COUNT = 2**31 - 1  # what the engine's arrays hold
MAX_BREAKERS = 32
MAX_BREAKER_LENGTH = 40  # characters
BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's

# Least and greatest values of fields that are numbers.
_BOUNDS: dict[str, tuple[float, float]] = {
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (0, MAX_COUNT),
    "dry_penalty_last_n": (-1, MAX_COUNT),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat": (0, 2),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 100.0),
    "top_n_sigma": (-1.0, 100.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "no_repeat_ngram_size": (0, MAX_COUNT),
}


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose each next token, and when to stop. A wrong value raises `BadRequest` naming the field."""

    n: int = 1  # completions returned
    best_of: int | None = None  # completions sampled; the n of highest mean logprob are returned
    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # keep the k most likely; 0 or -1 keeps all
    top_p: float = 1.0  # keep the most likely tokens until their probability reaches p
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    typical_p: float = 1.0  # keep the most typical tokens until their probability reaches p
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen in prompt or output
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens occurs twice, the prompt included; 0: any may
    dry_multiplier: float = 0.0  # DRY: the penalty of a token that repeats dry_allowed_length + 1 tokens; 0: none
    dry_base: float = 1.75  # each further repeated token multiplies the penalty by this
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens to look back for repetitions, the prompt included; -1: all
    dry_sequence_breakers: list[str] = field(default_factory=lambda: list(BREAKERS))  # no repetition goes across
    dry_breaker_ids: list[DryBreaker] = field(default_factory=list)  # the client makes them of the strings
    top_n_sigma: float = -1.0  # keep logits within n standard deviations of the greatest; 0 or less keeps all
    dynatemp_range: float = 0.0  # the temperature varies by this with the entropy of the tokens
    dynatemp_exponent: float = 1.0  # of the normalised entropy
    xtc_probability: float = 0.0  # of dropping all but the least likely of the tokens that reach xtc_threshold
    xtc_threshold: float = 0.1  # a probability; above 0.5, xtc does nothing
    mirostat: int = 0  # 1 or 2: hold the surprise at mirostat_tau, instead of top_k, top_p and other filters
    mirostat_tau: float = 5.0  # bits
    mirostat_eta: float = 0.1  # how fast it follows
    samplers: list[str] | None = None  # which samplers, in which order; None: all, in the default order
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)  # the client turns them into bad_token_ids
    bad_token_ids: list[list[int]] = field(default_factory=list)  # sequences of ids that are never completed
    seed: int | None = None  # None: chosen at submission
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0  # no stop token before that many
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured: Structured | None = None  # structured output; None: any text
    structured_outputs: Any = None  # `structured`, or a mapping of its fields, as scripts for vLLM give it
    guided_decoding: Any = None  # and as older ones do
    enable_in_reasoning: bool | None = None  # structured output holds from the first token; None: if text is not split
    thinking_token_budget: int | None = None  # tokens of reasoning at most; None: as many as the model takes
    thinking: Thinking | None = None  # the client makes it of these two
    watermark: Watermark | None = None  # a detectable mark in the output
    logprobs: int | None = None  # alternatives reported beside each token; 0 reports the token alone
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # tokens whose logprobs are reported beside each token, likely or not
    beam_width: int | None = None  # beam search instead of sampling
    length_penalty: float = 1.0  # a beam's score is its logprob / length ** length_penalty
    early_stopping: bool = False  # end a beam search as soon as beam_width beams have ended

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        self.bad_words = list(self.bad_words or ())
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0
        self.samplers = None if self.samplers is None else sampler_order(self.samplers)
        _at_most_many("logit_bias", self.logit_bias or (), MAX_LISTED)
        self.logit_bias = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        for name in ("structured_outputs", "guided_decoding"):
            if (given := getattr(self, name)) is not None:
                self._take_structured(name, given)
        self._check()

    def _take_structured(self, name: str, given: Structured | Mapping[str, Any]) -> None:
        if self.structured is not None:
            raise BadRequest(f"structured output is given twice, once as {name}", "give it once", param=name)
        self.structured = given if isinstance(given, Structured) else Structured.of(**given)
        setattr(self, name, None)

    @property
    def num_samples(self) -> int:
        """How many sequences the request runs."""
        return self.beam_width or self.best_of or self.n

    @property
    def needs_masks(self) -> bool:
        """Whether the tokens that were sampled decide which may follow."""
        return self.structured is not None or self.thinking is not None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _check(self) -> None:
        self._check_counts()
        self._check_samplers()
        self._check_breakers()
        self._check_token_lists()
        self._check_lengths()
        self._check_stops()
        self._check_logprobs()
        self._check_beams()
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise BadRequest(f"seed is {self.seed}, and it must fit in 64 bits", param="seed")

    def _check_counts(self) -> None:
        _at_least("n", self.n, 1)
        _at_most("n", self.num_samples, MAX_SAMPLES)
        if self.best_of is not None and self.best_of < self.n:
            raise BadRequest(
                f"best_of is {self.best_of} and n is {self.n}", "let best_of be at least n", param="best_of"
            )

    def _check_samplers(self) -> None:
        _between("temperature", self.temperature, 0.0, 100.0)
        _at_least("top_k", self.top_k, -1)
        _at_most("top_k", self.top_k, MAX_COUNT)
        _above("top_p", self.top_p, 0.0, 1.0)
        _between("min_p", self.min_p, 0.0, 1.0)
        _above("typical_p", self.typical_p, 0.0, 1.0)
        _above("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("length_penalty", self.length_penalty, -100.0, 100.0)
        for name, (least, greatest) in _BOUNDS.items():
            _between(name, getattr(self, name), least, greatest)

    def _check_token_lists(self) -> None:
        _at_most_many("stop_token_ids", self.stop_token_ids, MAX_LISTED)
        _at_most_many("bad_words", self.bad_words, MAX_BAD_WORDS)
        for bias in self.logit_bias.values():
            _between("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
            _at_most("max_tokens", self.max_tokens, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise BadRequest(
                    f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}", param="min_tokens"
                )
        if self.thinking_token_budget is not None:
            _between("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        _at_least("min_tokens", self.min_tokens, 0)
        _at_most("min_tokens", self.min_tokens, MAX_COUNT)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise BadRequest(f"{len(self.stop)} stop strings, and {MAX_STOPS} are allowed", param="stop")
        if any(not text for text in self.stop):
            raise BadRequest("a stop string is empty", param="stop")
        _at_most_long("stop", self.stop, MAX_STOP_LENGTH)
        _at_most_long("bad_words", self.bad_words, MAX_BAD_WORD_LENGTH)

    def _check_logprobs(self) -> None:
        _at_most_many("logprob_token_ids", self.logprob_token_ids or (), MAX_LOGPROB_IDS)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _between(name, count, 0, MAX_LOGPROBS)

    def _check_beams(self) -> None:
        if self.beam_width is None:
            return
        _between("beam_width", self.beam_width, 1, MAX_SAMPLES)
        if self.n > self.beam_width:
            raise BadRequest(
                f"n is {self.n}, and {self.beam_width} beams give no more results",
                "ask for a larger beam_width",
                param="n",
            )
        if self.logprob_token_ids:
            raise BadRequest(
                "logprob_token_ids is given, and a beam search knows the logprobs of its best continuations alone",
                "leave out logprob_token_ids",
                param="logprob_token_ids",
            )

    def _check_breakers(self) -> None:
        breakers = self.dry_sequence_breakers
        if len(breakers) > MAX_BREAKERS:
            raise BadRequest(
                f"{len(breakers)} sequence breakers, and {MAX_BREAKERS} are allowed", param="dry_sequence_breakers"
            )
        for breaker in breakers:
            if not 1 <= len(breaker) <= MAX_BREAKER_LENGTH:
                raise BadRequest(
                    f"a sequence breaker has {len(breaker)} characters",
                    f"it must have 1 to {MAX_BREAKER_LENGTH}",
                    param="dry_sequence_breakers",
                )


def _fail(name: str, value: float, allowed: str) -> None:
    raise BadRequest(f"{name} is {value}", f"{name} must be {allowed}", param=name)


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        _fail(name, value, f"at least {low}")


def _at_most(name: str, value: float, high: float) -> None:
    if not value <= high:
        _fail(name, value, f"at most {high}")


def _at_most_many(name: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise BadRequest(f"{name} has {len(values)} elements, and {most} are allowed", param=name)


def _at_most_long(name: str, texts: Iterable[str], most: int) -> None:
    if (longest := max(map(len, texts), default=0)) > most:
        raise BadRequest(f"{name} has a text of {longest} characters, and {most} are allowed", param=name)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        _fail(name, value, f"between {low} and {high}")


def _above(name: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        _fail(name, value, f"above {low} and at most {high}")
