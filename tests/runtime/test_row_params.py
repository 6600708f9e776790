"""What a request asks for, as samplers take it."""

from quire.core.params import SamplingParams
from quire.ops.row_params import Filter, MirostatParams, RowParams
from quire.runtime.sampling import row_params


def asked(**params) -> RowParams:
    return row_params(SamplingParams(seed=5, **params), 3, [2])


def test_row_params_of_a_request():
    params = asked(top_k=-1, logit_bias={3: 1.5}, allowed_token_ids=[1, 3], bad_token_ids=[[1, 2]], min_tokens=1)
    assert params == RowParams(
        seed=5, sample=3, logit_bias=((3, 1.5),), allowed=(1, 3), banned=((1, 2),), stop_ids=(2,), min_tokens=1
    )


def test_samplers_that_are_not_named_have_no_effect():
    named = asked(samplers=["temperature", "top_k"], top_k=3, temperature=0.5, min_p=0.2, dry_multiplier=1.0)
    assert named.filters == [Filter.TEMPERATURE, Filter.TOP_K] and named.dry is None
    assert asked(samplers=[], temperature=0.0, repetition_penalty=2.0, xtc_probability=1.0).filters == []
    assert not asked(samplers=[], temperature=0.0).is_greedy
    assert asked(xtc_probability=1.0, xtc_threshold=0.6, top_n_sigma=-1.0).filters == []


def test_mirostat_replaces_the_filters_and_keeps_penalties():
    params = asked(mirostat=2, top_k=3, top_p=0.5, xtc_probability=1.0, dynatemp_range=1.0, temperature=0.7,
                   dry_multiplier=1.0, repetition_penalty=1.2, samplers=["penalties", "dry", "min_p"])  # fmt: skip
    assert params.filters == [Filter.TEMPERATURE] and params.mirostat == MirostatParams(2)
    assert params.dry is not None and params.repetition_penalty == 1.2 and params.dynatemp_range == 0.0


def test_completions_that_compete_need_logprobs():
    assert asked().num_logprobs == -1
    assert asked(n=2, best_of=2).num_logprobs == -1
    assert asked(best_of=2).num_logprobs == 0
    assert asked(logprobs=4, best_of=2).num_logprobs == 4
    beams = asked(beam_width=3)
    assert (beams.num_logprobs, beams.num_candidates) == (0, 6)
