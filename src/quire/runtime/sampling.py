"""From a user's `SamplingParams` to the sampler's `RowParams`."""

from collections.abc import Sequence

from quire.core.params import SamplingParams
from quire.core.sampler_order import EDITS, SAMPLERS
from quire.ops.row_params import DryParams, Filter, MirostatParams, RowParams


def row_params(params: SamplingParams, sample: int, stop_ids: Sequence[int]) -> RowParams:
    """The seed was chosen at submission, so that a resumed request keeps it. A sampler that `samplers` does not name
    has no effect."""
    assert params.seed is not None
    order = _order(params)
    penalized, tempered = "penalties" in order, "temperature" in order
    return RowParams(
        seed=params.seed,
        sample=sample,
        temperature=params.temperature if tempered else 1.0,
        top_k=max(params.top_k, 0) if "top_k" in order else 0,
        top_p=params.top_p if "top_p" in order else 1.0,
        min_p=params.min_p if "min_p" in order else 0.0,
        typical_p=params.typical_p if "typical_p" in order else 1.0,
        repetition_penalty=params.repetition_penalty if penalized else 1.0,
        presence_penalty=params.presence_penalty if penalized else 0.0,
        frequency_penalty=params.frequency_penalty if penalized else 0.0,
        logit_bias=tuple(params.logit_bias.items()),
        allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        banned=tuple(tuple(sequence) for sequence in params.bad_token_ids),
        stop_ids=tuple(stop_ids),
        min_tokens=params.min_tokens,
        num_logprobs=_num_logprobs(params),
        logprob_ids=tuple(dict.fromkeys(params.logprob_token_ids or ())),
        num_candidates=2 * (params.beam_width or 0),  # of 2b continuations of b beams, at least b go on
        watermark=params.watermark,
        no_repeat_ngram=params.no_repeat_ngram_size,
        dry=_dry(params) if "dry" in order else None,
        top_n_sigma=max(params.top_n_sigma, 0.0) if "top_n_sigma" in order else 0.0,
        dynatemp_range=params.dynatemp_range if tempered and not params.mirostat else 0.0,
        dynatemp_exponent=params.dynatemp_exponent,
        xtc_probability=params.xtc_probability if "xtc" in order and params.xtc_threshold <= 0.5 else 0.0,
        xtc_threshold=params.xtc_threshold,
        mirostat=_mirostat(params),
        order=tuple(Filter[name.upper()] for name in order if name not in EDITS),
    )


def _order(params: SamplingParams) -> Sequence[str]:
    order = SAMPLERS if params.samplers is None else params.samplers
    if params.mirostat:
        return [*(name for name in order if name in EDITS), "temperature"]
    return order


def _dry(params: SamplingParams) -> DryParams | None:
    if params.dry_multiplier == 0.0 or params.dry_penalty_last_n == 0:
        return None
    return DryParams(
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_penalty_last_n,
        tuple(params.dry_breaker_ids),
    )


def _mirostat(params: SamplingParams) -> MirostatParams | None:
    return MirostatParams(params.mirostat, params.mirostat_tau, params.mirostat_eta) if params.mirostat else None


def _num_logprobs(params: SamplingParams) -> int:
    if params.logprobs is not None:
        return params.logprobs
    ranked = params.beam_width is not None or (params.best_of or 0) > params.n  # completions are compared by logprob
    return 0 if ranked else -1
