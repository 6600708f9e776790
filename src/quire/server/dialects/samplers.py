"""Fields of samplers that llama.cpp's server has, under its names; `no_repeat_ngram_size` is that of transformers."""

from msgspec import Struct

from quire.server.dialects.fields import Int


class SamplerFields(Struct, kw_only=True):
    """Null is the same as absent. The meanings are those of SamplingParams."""

    no_repeat_ngram_size: Int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: list[str] | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: Int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: str | list[str] | None = None


SAMPLER_FIELDS = SamplerFields.__struct_fields__
