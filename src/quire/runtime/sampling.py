"""From a user's `SamplingParams` to the sampler's `RowParams`."""

from collections.abc import Sequence

from quire.core.params import SamplingParams
from quire.ops.opset import RowParams


def row_params(params: SamplingParams, sample: int, stop_ids: Sequence[int]) -> RowParams:
    """The seed was chosen at submission, so that a resumed request keeps it."""
    assert params.seed is not None
    return RowParams(
        seed=params.seed,
        sample=sample,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        banned=tuple(tuple(sequence) for sequence in params.bad_token_ids),
        stop_ids=tuple(stop_ids),
        min_tokens=params.min_tokens,
        num_logprobs=_num_logprobs(params),
        num_candidates=2 * (params.beam_width or 0),  # of 2b continuations of b beams, at least b go on
        watermark=params.watermark,
    )


def _num_logprobs(params: SamplingParams) -> int:
    if params.logprobs is not None:
        return params.logprobs
    ranked = params.beam_width is not None or (params.best_of or 0) > params.n  # completions are compared by logprob
    return 0 if ranked else -1
