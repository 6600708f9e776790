"""The sampling flags that `run` and `chat` share."""

from dataclasses import asdict, dataclass, field

from quire.core.params import SamplingParams
from quire.engine.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """The `SamplingParams` that people set by hand, with defaults for conversation."""

    max_tokens: int | None = option(
        None, "longest answer, in tokens (default: until the model ends it or the context is full)"
    )
    temperature: float = option(0.7, "sampling temperature: 0 takes the most likely token")
    top_p: float = option(1.0, "keep the most likely tokens until their probability reaches this")
    top_k: int = option(0, "keep this many of the most likely tokens; 0 keeps all")
    min_p: float = option(0.0, "keep tokens at least this times as likely as the most likely one")
    repetition_penalty: float = option(1.0, "above 1, tokens that occurred become less likely")
    seed: int | None = option(None, "the same seed gives the same answer (default: another one each time)")
    stop: list[str] = field(default_factory=list, metadata={"help": "end the answer before this text"})

    def params(self) -> SamplingParams:
        return SamplingParams(**asdict(self))
