"""The sampling flags that `run` and `chat` share."""

from dataclasses import asdict, dataclass, field
from typing import Any

from quire.core.params import SamplingParams


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """Those of `SamplingParams` one sets by hand, with defaults for reading rather than for benchmarks."""

    max_tokens: int | None = _flag(
        None, "longest answer, in tokens (default: until the model ends it or the context is full)"
    )
    temperature: float = _flag(0.7, "how daring: 0 always takes the most likely token")
    top_p: float = _flag(1.0, "keep the most likely tokens until their probability reaches this")
    top_k: int = _flag(0, "keep that many of the most likely tokens; 0 keeps all")
    min_p: float = _flag(0.0, "keep tokens at least this times as likely as the most likely one")
    repetition_penalty: float = _flag(1.0, "above 1, words already said become less likely")
    seed: int | None = _flag(None, "the same seed gives the same answer (default: another one each time)")
    stop: list[str] = field(default_factory=list, metadata={"help": "end the answer before this text"})

    def params(self) -> SamplingParams:
        return SamplingParams(**asdict(self))
