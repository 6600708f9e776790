"""Speculative methods, and how they are asked for."""

import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run
from quire.engine.options import EngineOptions
from quire.ops.opset import Int32
from quire.runtime.spec import METHODS
from quire.runtime.spec.config import MethodConfig, SpecConfig, read_config
from quire.runtime.spec.ngram import Ngram
from quire.runtime.spec.proposer import Proposer, Verified
from quire.runtime.spec.proposers import Proposers

CONTEXT: Any = None  # prompt lookup needs no model


def ngram(count: int, lookup_min: int, lookup_max: int, *tokens: int) -> list[int]:
    method = Ngram(CONTEXT, count, lookup_min, lookup_max)
    return method.propose({4: np.array(tokens, np.int32)}, {4: count}).get(4, [])


def admission(row: int, num_prompt: int, tenant: str = "") -> Admission:
    return Admission(row, SamplingParams(), 0, [], num_prompt, [], [], namespace=(tenant, "", ""))


@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if not (one.has_model or one.has_head)])
def test_every_method_proposes_and_forgets(method: str) -> None:
    """What the runner relies on, whatever the method: ids of its rows, no more than were asked for, and no trouble with
    rows that are new, short or given up."""
    config = read_config(None, method, 3)
    assert config is not None and config.method == method
    proposers = config.proposers(CONTEXT)
    rows = {0: np.array([7], np.int32), 5: np.array([1, 2, 3, 1, 2, 3, 1, 2], np.int32)}
    runs = {row: Run(row, 0, 1) for row in rows}
    proposers.admit(admission(0, 1))
    for _ in range(2):
        proposers.admit(admission(5, 4))
        proposals = proposers.propose(rows, runs)
        assert set(proposals) <= set(rows)
        for [proposal] in proposals.values():
            assert proposal.method == method and 1 <= len(proposal.tokens) <= 3 and not proposal.parents
            assert all(type(draft) is int for draft in proposal.tokens)
        proposers.retire(5)
    assert proposers.propose({}, {}) == {}


class Counting(Proposer):
    """Proposes the numbers from 1 on, as many as are wanted."""

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        return {row: list(range(1, counts[row] + 1)) for row in known if row != 2}


def test_methods_that_are_not_free_are_asked_where_free_drafts_are_not_enough() -> None:
    proposers = Proposers([("model", Counting()), ("free", Counting())], {"free": 3})
    known = {row: np.array([9], np.int32) for row in range(4)}
    runs = {
        0: Run(0, 0, 1),  # no quota
        1: Run(1, 0, 1, quotas={"model": 2}),  # whatever is free
        2: Run(2, 0, 1, quotas={"model": 2}, num_enough=3),  # nothing is free there
        3: Run(3, 0, 1, quotas={"model": 2}, num_enough=3),  # three are enough
    }
    found = {
        row: [(one.method, len(one.tokens)) for one in each] for row, each in proposers.propose(known, runs).items()
    }
    assert found == {0: [("free", 3)], 1: [("free", 3), ("model", 2)], 3: [("free", 3)]}
    runs[3].num_enough = 4
    assert [one.method for one in proposers.propose(known, runs)[3]] == ["free", "model"]
    seconds, steps, is_timed = proposers.take_times()
    assert seconds > 0 and steps == {} and is_timed and proposers.take_times()[0] == 0


class Ahead(Counting):
    """Takes long to queue drafts, the first time."""

    is_untimed = False

    def propose_ahead(self, verified: Mapping[int, Verified], counts: Mapping[int, int]) -> None:
        self.is_untimed = True
        time.sleep(0.05)

    def take_untimed(self) -> bool:
        is_untimed, self.is_untimed = self.is_untimed, False
        return is_untimed


def test_what_is_queued_while_the_device_verifies_takes_no_time_of_the_step() -> None:
    """Else a step with drafts would seem to take next to nothing, and the next one to be dear. One in which drafts are
    compiled or captured tells nothing."""
    proposers = Proposers([("head", Ahead())], {})
    proposers.propose_ahead({0: 3}, {0: [7]}, {0: Run(0, 0, 1, quotas={"head": 2})})
    assert proposers.take_times() == (0.0, {}, False)
    assert proposers.take_times() == (0.0, {}, True)


def test_what_followed_before_is_proposed_to_follow() -> None:
    assert ngram(3, 2, 5, 8, 9, 4, 5, 6, 7, 8, 9) == [4, 5, 6]
    assert ngram(2, 2, 5, 1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2) == [4, 9]  # the newest of equal matches
    assert ngram(2, 2, 5, 9, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2) == [3, 0]  # but the longest first
    assert ngram(2, 2, 2, 9, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2) == [4, 9]  # unless it may not be looked at
    assert ngram(4, 1, 3, 1, 2, 1) == [2, 1, 2, 1]  # a pattern goes on
    assert ngram(3, 3, 5, 0, 8, 9, 4, 8, 9) == []  # the match is too short
    for tokens in ((5,), (5, 5), (1, 2, 3)):
        assert ngram(2, 3, 4, *tokens) == []


def test_drafts_are_those_of_a_plain_search() -> None:
    def plain(tokens: list[int], count: int, least: int, most: int) -> list[int]:
        for length in range(most, least - 1, -1):
            for end in range(len(tokens) - 1, length - 1, -1):
                if tokens[end - length : end] == tokens[len(tokens) - length :]:
                    found = tokens[end : end + count]
                    return [found[i % len(found)] for i in range(count)]
        return []

    chance = np.random.default_rng(0)
    for _ in range(300):
        tokens = chance.integers(0, 4, size=chance.integers(1, 40))
        least, count = int(chance.integers(1, 4)), int(chance.integers(1, 5))
        most = least + int(chance.integers(0, 3))
        assert ngram(count, least, most, *tokens) == plain(tokens.tolist(), count, least, most)


def only(name: str, num_tokens: int, **keys: float) -> tuple[MethodConfig, ...]:
    return (MethodConfig(name, num_tokens, keys),)


def test_options_say_what_is_wanted() -> None:
    assert EngineOptions().speculation is None
    asked = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
    expected = SpecConfig(only("ngram", 4, prompt_lookup_min=3, prompt_lookup_max=4))
    assert EngineOptions(speculative_config=asked).speculation == expected
    short = EngineOptions(spec_method="ngram", spec_tokens=7).speculation
    assert short == SpecConfig(only("ngram", 7, prompt_lookup_min=2, prompt_lookup_max=5))
    model = EngineOptions(spec_method="draft_model", spec_model="smollm2", spec_tokens=2).speculation
    assert (
        model == EngineOptions.of({"speculative_config": {"model": "smollm2", "num_speculative_tokens": 2}}).speculation
    )
    both = EngineOptions(speculative_config='{"prompt_lookup_max": 3}', spec_method="ngram").speculation
    assert both == SpecConfig(only("ngram", 5, prompt_lookup_min=2, prompt_lookup_max=3))
    drafted = EngineOptions(speculative_config='{"model": "smollm2", "max_model_len": 512}').speculation
    assert drafted == SpecConfig(only("draft_model", 3, draft_tensor_parallel_size=1, max_model_len=512), "smollm2")
    given = EngineOptions.of({"speculative_config": {"method": "ngram", "prompt_lookup_max": 1}}).speculation
    assert given == SpecConfig(only("ngram", 5, prompt_lookup_min=1, prompt_lookup_max=1))  # the other one follows


@pytest.mark.parametrize("method", ["suffix,draft_model", ["suffix", "draft_model"]])
def test_several_methods_at_once(method: Any) -> None:
    config = EngineOptions.of({"speculative_config": {"method": method, "model": "smollm2"}}).speculation
    assert config is not None and config.method == "suffix,draft_model" and config.num_tokens == 24
    policy = config.policy(on_gpu=False, model_cost=0.25)
    assert [(one.name, one.max_tokens, one.is_free, one.cost) for one in policy.methods] == [
        ("suffix", 24, True, 0.0),
        ("draft_model", 3, False, 0.25),
    ]
    short = EngineOptions(spec_method="suffix, ngram", spec_tokens=4).speculation
    assert short is not None and [one.num_tokens for one in short.methods] == [4, 4]


def test_a_policy_knows_what_trees_take() -> None:
    def trees(**config: Any) -> list[tuple[int, tuple[int, ...]]]:
        found = EngineOptions.of({"speculative_config": {"model": "./head", **config}}).speculation
        assert found is not None
        return [(one.tree_nodes, one.tree_steps) for one in found.policy(on_gpu=True).methods]

    assert trees(method="eagle3", tree_nodes=16) == [(16, (1, 4, 4))]
    assert trees(method="medusa", tree_nodes=16, tree_top_k=8) == [(16, (1, 1, 1))]
    assert trees(method="eagle") == [(0, ())]


def test_the_number_of_drafts_can_be_fixed_by_batch_size() -> None:
    asked = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 32, 2]]}
    config = EngineOptions.of({"speculative_config": asked}).speculation
    assert config is not None
    policy = config.policy(on_gpu=True)
    assert [policy.fixed_length(size) for size in (1, 4, 5, 32, 33)] == [5, 5, 2, 2, 0]


def test_synthetic_acceptance_is_rates_or_a_mean_length() -> None:
    def rates(**keys: Any) -> tuple[float, ...]:
        config = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", **keys}
        found = EngineOptions.of({"speculative_config": config}).speculation
        assert found is not None
        return found.synthetic_rates

    assert rates(synthetic_acceptance_rates=[0.7, 0.5, 0.4]) == (0.7, 0.5, 0.4)
    assert rates(synthetic_acceptance_length=2.9) == pytest.approx((1.0, 0.9, 0.0))
    assert rates(synthetic_acceptance_length=1) == (0.0, 0.0, 0.0)


def test_keys_of_vllm_that_ask_for_nothing_are_taken() -> None:
    asked = {"method": "ngram", "quantization": None, "parallel_drafting": False, "rejection_sample_method": "standard"}
    found = EngineOptions.of({"speculative_config": asked}).speculation
    assert found is not None and found.method == "ngram" and not found.synthetic_rates


@pytest.mark.parametrize(
    "options, told",
    [
        ({"speculative_config": '{"method": "lookahead"}'}, "`lookahead`.*choose from ngram, suffix, draft_model"),
        ({"spec_method": "medusa"}, "medusa drafts with `model`.*./head"),
        ({"speculative_config": '{"method": "mtp", "model": "smollm2"}'}, "mtp has no `model`.*leave it out"),
        ({"spec_method": "mtp,eagle3"}, "eagle3 drafts with `model`"),
        ({"speculative_config": '{"method": "mtp,draft_model", "model": "smollm2"}'}, "both draft with weights"),
        ({"spec_method": "sufix"}, "`sufix`.*did you mean suffix"),
        ({"spec_method": "suffix,suffix"}, "each once"),
        ({"speculative_config": '{"method": []}'}, "method is .*choose from"),
        ({"speculative_config": '{"method": 3}'}, "method is 3.*choose from"),
        ({"spec_tokens": 3}, "no method.*choose from ngram"),
        ({"speculative_config": '{"method": "ngram", "depth": 3}'}, "`depth`.*method, model, num_speculative_tokens, "),
        ({"speculative_config": '{"method": "ngram", "prompt_lookup": 3}'}, "did you mean prompt_lookup_m"),
        (
            {"speculative_config": '{"method": "ngram", "suffix_decoding_max_tree_depth": 3}'},
            "which is of suffix.*method is ngram",
        ),
        (
            {"speculative_config": '{"model": "smollm2", "quantization": "fp8"}'},
            '`quantization`: "fp8".*as its checkpoint is',
        ),
        ({"speculative_config": '{"model": "smollm2", "max_model_len": 8}'}, "is 8.*at least 16"),
        ({"speculative_config": '{"model": ["smollm2"]}'}, "model is .*name or the path"),
        ({"speculative_config": '{"method": "ngram", "speculative_token_tree": "[(0,)]"}'}, "tree.*set tree_nodes"),
        ({"speculative_config": '{"method": "ngram", "tree_nodes": 16}'}, "tree_nodes.*which is of suffix"),
        ({"speculative_config": '{"method": "suffix", "tree_nodes": 16}'}, "has 24 draft tokens.*25 to 63"),
        ({"speculative_config": '{"method": "eagle", "model": "./head", "tree_nodes": 64}'}, "is 64.*at most 63"),
        ({"speculative_config": '{"method": "eagle", "model": "./head", "tree_top_k": 3}'}, "no tree.*tree_nodes"),
        (
            {
                "speculative_config": '{"method": "eagle3", "model": "./head", "num_speculative_tokens": 9, '
                '"tree_nodes": 32, "tree_top_k": 8}'
            },
            "top_k is 8.*is 9.*compute 64 nodes.*at most 63",
        ),
        (
            {
                "speculative_config": '{"method": "ngram", '
                '"num_speculative_tokens_per_batch_size": [[1, 4, 5], [4, 8, 1]]}'
            },
            "has .4, 8, 1.*follow each other",
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4]]}'},
            "has .1, 4.*follow each other",
        ),
        (
            {"speculative_config": '{"method": "ngram", "synthetic_acceptance_length": 2.9}'},
            '`synthetic_acceptance_length`.*"synthetic"',
        ),
        (
            {"speculative_config": '{"method": "ngram", "rejection_sample_method": "synthetic"}'},
            "needs rates, or a length",
        ),
        (
            {"speculative_config": '{"method": "ngram", "rejection_sample_method": "block"}'},
            'is "block".*drawn as without drafts',
        ),
        (
            {
                "speculative_config": '{"method": "ngram", "rejection_sample_method": "synthetic", '
                '"synthetic_acceptance_rates": [0.5, 0.6]}'
            },
            "write 5 numbers",
        ),
        (
            {
                "speculative_config": '{"method": "ngram", "rejection_sample_method": "synthetic", '
                '"synthetic_acceptance_length": 7}'
            },
            "is 7.*1 to 6",
        ),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 0}'}, "is 0.*at least 1"),
        ({"speculative_config": '{"method": "ngram", "prompt_lookup_min": true}'}, "is true.*whole number"),
        ({"spec_method": "ngram", "spec_tokens": 0}, "spec_tokens is 0|num_speculative_tokens is 0"),
        ({"speculative_config": '{"method": "ngram"'}, "not JSON"),
        (
            {"speculative_config": '{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}'},
            "is 1.5.*at least 0 and at most 1",
        ),
        ({"speculative_config": "[1]"}, "a JSON object"),
        ({"speculative_config": '{"method": "draft_model"}'}, "drafts with `model`.*name one"),
        ({"speculative_config": '{"method": "ngram", "model": "smollm2"}'}, "ngram has no `model`.*ngram,draft_model"),
        (
            {"speculative_config": '{"model": "smollm2", "draft_tensor_parallel_size": 2}'},
            "size is 2.*at least 1 and at most 1",
        ),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}', "spec_tokens": 5}, "say it once"),
        (
            {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}'},
            "min is 4 and .*max is 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest) as refused:
        EngineOptions(**options)
    assert re.search(told, f"{refused.value.message} {refused.value.hint}", re.DOTALL), str(refused.value)
