"""The sampling flags that `run` and `chat` share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.core.params import SamplingParams
from quire.engine.options import option

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
    repetition_penalty: float | None = option(None, "above 1, tokens that occurred become less likely")
    seed: int | None = option(None, "the same seed gives the same answer (default: another one each time)")
    stop: list[str] = field(default_factory=list, metadata={"help": "end the answer before this text"})

    def params(self, advised: Mapping[str, Any] | None = None) -> SamplingParams:
        """`advised`: by the model."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return SamplingParams(**{"max_tokens": None, "temperature": DEFAULT_TEMPERATURE, **(advised or {}), **given})
