"""Every key of vLLM's `speculative_config`: what it does here, and the value that is refused under its name."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.engine.options import EngineOptions
from quire.runtime.spec import METHODS
from quire.runtime.spec.config import SHARED_KEYS, SpecConfig, read_config

NGRAM, SUFFIX, MODEL = {"method": "ngram"}, {"method": "suffix"}, {"model": "smollm2"}
SYNTHETIC = {**NGRAM, "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}

Reading = Callable[[SpecConfig], Any]


def key_of_method(key: str) -> Reading:
    return lambda config: config.methods[0].keys[key]


# key: (a config to put it into, a value, where it is then found (None: among the method's keys), a refused value)
TAKEN: dict[str, tuple[dict[str, Any], Any, Reading | None, Any]] = {
    "method": ({}, "suffix", lambda c: c.method, "lookahead"),
    "model": ({"method": "draft_model"}, "smollm2", lambda c: c.model, 3),
    "num_speculative_tokens": (NGRAM, 7, lambda c: c.num_tokens, 0),
    "num_speculative_tokens_per_batch_size": (NGRAM, [[1, 4, 2]], lambda c: c.per_batch_size, [[4, 1, 2]]),
    "draft_tensor_parallel_size": (MODEL, 1, None, 2),
    "max_model_len": (MODEL, 512, None, 15),
    "prompt_lookup_min": (NGRAM, 3, None, 0),
    "prompt_lookup_max": (NGRAM, 9, None, "9"),
    "suffix_decoding_max_tree_depth": (SUFFIX, 8, None, 1),
    "suffix_decoding_max_cached_requests": (SUFFIX, 0, None, -1),
    "suffix_decoding_max_spec_factor": (SUFFIX, 2.5, None, 0),
    "suffix_decoding_min_token_prob": (SUFFIX, 0.3, None, 1.1),
    "rejection_sample_method": (NGRAM, "standard", lambda c: "synthetic" if c.synthetic_rates else "standard", "block"),
    "synthetic_acceptance_rates": (SYNTHETIC, [0.5, 0.25], lambda c: c.synthetic_rates, [0.5, 0.6]),
    "synthetic_acceptance_length": (SYNTHETIC, 2, lambda c: 1 + sum(c.synthetic_rates), 9),
    "tree_nodes": ({**SUFFIX, "num_speculative_tokens": 4}, 16, None, 64),
    "tree_top_k": ({"method": "eagle", "model": "./head", "tree_nodes": 16}, 3, None, 1),
}

# key: the value that asks for nothing, and one that is refused
WITHOUT_USE: dict[str, tuple[Any, Any]] = {
    "quantization": (None, "fp8"),
    "revision": (None, "main"),
    "code_revision": (None, "main"),
    "draft_load_config": (None, {"load_format": "dummy"}),
    "enforce_eager": (False, True),
    "parallel_drafting": (False, True),
    "draft_sample_method": ("probabilistic", "greedy"),
    "use_heterogeneous_vocab": (False, True),
    "disable_padded_drafter_batch": (True, 3),
    "use_local_argmax_reduction": (False, True),
    "enable_adaptive_verification": (True, "often"),
    "disable_by_batch_size": (None, 32),
    "speculative_token_tree": (None, "[(0,)]"),
    "attention_backend": (None, "FLASH_ATTN"),
    "moe_backend": ("auto", "triton"),
    "kv_cache_dtype": ("auto", "fp8"),
    "tensor_parallel_size": (None, 2),
    "index_share_for_mtp_iteration": (False, True),
    "disable_eagle_block_drop": (True, "often"),
    "dspark_draft_topk": (None, 8),
    "disable_logprobs": (False, True),
    "disable_log_stats": (True, "often"),
    "acceptance_method": ("rejection_sampler", "typical_acceptance_sampler"),
}


def read(config: dict[str, Any]) -> SpecConfig:
    found = read_config(json.dumps(config))
    assert found is not None
    return found


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(BadRequest) as refused:
        EngineOptions(speculative_config=json.dumps(config))
    assert refused.value.param == "speculative_config" and refused.value.hint
    return refused.value.message


@pytest.mark.parametrize("key", TAKEN)
def test_a_key_is_taken_or_its_value_is_refused_by_name(key: str) -> None:
    given, value, where, wrong = TAKEN[key]
    found = (where or key_of_method(key))(read({**given, key: value}))
    assert json.loads(json.dumps(found)) == value
    assert re.search(key, refusal({**given, key: wrong}))


@pytest.mark.parametrize("key", WITHOUT_USE)
def test_a_key_without_use_may_ask_for_nothing_and_is_refused_by_name_otherwise(key: str) -> None:
    nothing, wrong = WITHOUT_USE[key]
    assert read({**NGRAM, key: nothing}) == read(NGRAM) == read({**NGRAM, key: None})
    assert f"`{key}`" in refusal({**NGRAM, key: wrong})


def test_no_key_is_left_out() -> None:
    assert {*TAKEN} == {*SHARED_KEYS, *(key for method in METHODS.values() for key in method.keys)}


def test_every_key_may_be_null() -> None:
    """As in a configuration that was written out whole."""
    assert read({**dict.fromkeys([*TAKEN, *WITHOUT_USE]), **NGRAM}) == read(NGRAM)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B/", "eagle"),
        ("FasterDecoding/medusa-vicuna-7b-v1.3", "medusa"),
        ("./eagles/qwen2.5-0.5b", "draft_model"),
    ],
)
def test_a_model_alone_tells_its_method_by_its_name(model: str, method: str) -> None:
    assert (read({"model": model}).method, read({"model": model}).model) == (method, model)


def test_a_key_of_another_method_is_refused_by_name() -> None:
    for key, (given, value, _, _) in TAKEN.items():
        if key not in SHARED_KEYS:
            other = NGRAM if given.get("method") != "ngram" else SUFFIX
            assert f"`{key}`" in refusal({**other, key: value})
