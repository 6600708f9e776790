"""The sampling flags that `run` and `chat` share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.core.params import BREAKERS, SamplingParams
from quire.core.sampler_order import SAMPLERS
from quire.engine.option import option

_BREAKERS_SHOWN = " ".join(repr(breaker)[1:-1] for breaker in BREAKERS)
DEFAULT_TEMPERATURE = 0.7  # for conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """The `SamplingParams` that people set by hand. What is not given is the model's advice, else a default."""

    max_tokens: int | None = option(
        None, "longest answer, in tokens (default: until the model ends it or the context is full)"
    )
    temperature: float | None = option(
        None, "sampling temperature: 0 takes the most likely token (default: what the model advises, else 0.7)"
    )
    top_p: float | None = option(None, "keep the most likely tokens until their probability reaches this")
    top_k: int | None = option(None, "keep this many of the most likely tokens; 0 keeps all")
    min_p: float | None = option(None, "keep tokens at least this times as likely as the most likely one")
    typical_p: float | None = option(
        None, "keep the most typical tokens until their probability reaches this", aliases=("--typical",)
    )
    repetition_penalty: float | None = option(None, "above 1, tokens that occurred become less likely")
    no_repeat_ngram_size: int = option(0, "no sequence of this many tokens occurs twice; 0 lets any")
    dry_multiplier: float = option(0.0, "DRY: the penalty for going on with a repetition; 0 is none")
    dry_base: float = option(1.75, "DRY: every further repeated token multiplies the penalty by this")
    dry_allowed_length: int = option(2, "DRY: tokens that may be repeated without a penalty")
    dry_penalty_last_n: int = option(-1, "DRY: tokens to look back; -1 looks at all")
    dry_sequence_breakers: list[str] = field(
        default_factory=list,
        metadata={
            "help": f"DRY: no repetition goes across this text; none for no such text (default: {_BREAKERS_SHOWN})",
            "aliases": ("--dry-sequence-breaker",),
        },
    )
    top_n_sigma: float = option(
        -1.0,
        "keep logits within this many standard deviations of the greatest; -1 keeps all",
        aliases=("--top-nsigma",),
    )
    dynatemp_range: float = option(0.0, "let the temperature vary by this, with the entropy of the tokens")
    dynatemp_exponent: float = option(1.0, "exponent of the entropy in that", aliases=("--dynatemp-exp",))
    xtc_probability: float = option(0.0, "XTC: how often the likeliest tokens are dropped but for one")
    xtc_threshold: float = option(0.1, "XTC: the probability that makes a token one of these; above 0.5 none is")
    mirostat: int = option(0, "1 or 2: hold the surprise of tokens, instead of top-k and other filters")
    mirostat_tau: float = option(5.0, "mirostat: the surprise, in bits", aliases=("--mirostat-ent",))
    mirostat_eta: float = option(0.1, "mirostat: how fast it follows", aliases=("--mirostat-lr",))
    samplers: str | None = option(
        None, f"which samplers, in which order, with `;` between (default: {';'.join(SAMPLERS)})"
    )
    seed: int | None = option(None, "the same seed gives the same answer (default: another one each time)")
    stop: list[str] = field(default_factory=list, metadata={"help": "end the answer before this text"})

    def params(self, advised: Mapping[str, Any] | None = None) -> SamplingParams:
        """`advised`: by the model."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.samplers is not None:
            given["samplers"] = [name for name in self.samplers.split(";") if name]
        if not self.dry_sequence_breakers:
            del given["dry_sequence_breakers"]
        elif self.dry_sequence_breakers == ["none"]:
            given["dry_sequence_breakers"] = []
        return SamplingParams(**{"max_tokens": None, "temperature": DEFAULT_TEMPERATURE, **(advised or {}), **given})
