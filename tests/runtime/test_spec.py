"""Ways to guess, and how they are asked for."""

import re
from typing import Any

import numpy as np
import pytest

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.plan import Admission
from quire.engine.options import EngineOptions
from quire.runtime.spec import METHODS, SpecConfig, read_config
from quire.runtime.spec.ngram import Ngram

CONTEXT: Any = None  # prompt lookup needs no model


def ngram(num_tokens: int, lookup_min: int, lookup_max: int) -> Ngram:
    return Ngram(CONTEXT, num_tokens, lookup_min, lookup_max)


def known(*tokens: int) -> dict[int, Any]:
    return {4: np.array(tokens, np.int32)}


def admission(row: int, num_prompt: int, tenant: str = "") -> Admission:
    return Admission(row, SamplingParams(), 0, [], num_prompt, [], [], namespace=(tenant, "", ""))


@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if not (one.has_model or one.has_head)])
def test_every_method_guesses_and_forgets(method: str) -> None:
    """What the runner relies on, whatever the method: ids of its rows, no more than were asked for, and no trouble with
    rows that are new, short or given up."""
    config = read_config(None, method, 3)
    assert config is not None and config.method == method
    proposer = config.proposer(CONTEXT)
    rows = {0: np.array([7], np.int32), 5: np.array([1, 2, 3, 1, 2, 3, 1, 2], np.int32)}
    proposer.admit(admission(0, 1))
    for _ in range(2):
        proposer.admit(admission(5, 4))
        guesses = proposer.propose(rows)
        assert set(guesses) <= set(rows)
        assert all(1 <= len(drafts) <= 3 and all(type(d) is int for d in drafts) for drafts in guesses.values())
        proposer.retire(5)
    assert proposer.propose({}) == {}


def test_what_followed_before_is_guessed_to_follow() -> None:
    assert ngram(3, 2, 5).propose(known(8, 9, 4, 5, 6, 7, 8, 9)) == {4: [4, 5, 6]}
    assert ngram(2, 2, 5).propose(known(1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2)) == {4: [4, 9]}  # the newest of equal matches
    assert ngram(2, 2, 5).propose(known(9, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2)) == {4: [3, 0]}  # but the longest first
    assert ngram(2, 2, 2).propose(known(9, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2)) == {
        4: [4, 9]
    }  # unless it may not be looked at
    assert ngram(4, 1, 3).propose(known(1, 2, 1)) == {4: [2, 1, 2, 1]}  # a pattern goes on
    assert ngram(3, 3, 5).propose(known(0, 8, 9, 4, 8, 9)) == {}  # the match is too short
    for tokens in ((5,), (5, 5), (1, 2, 3)):
        assert ngram(2, 3, 4).propose(known(*tokens)) == {}


def test_guesses_are_those_of_a_plain_search() -> None:
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
        expected = plain(tokens.tolist(), count, least, most)
        assert ngram(count, least, most).propose(known(*tokens)).get(4, []) == expected


def test_options_say_what_is_wanted() -> None:
    assert EngineOptions().speculation is None
    asked = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
    expected = SpecConfig("ngram", 4, {"prompt_lookup_min": 3, "prompt_lookup_max": 4})
    assert EngineOptions(speculative_config=asked).speculation == expected
    short = EngineOptions(spec_method="ngram", spec_tokens=7).speculation
    assert short == SpecConfig("ngram", 7, {"prompt_lookup_min": 2, "prompt_lookup_max": 5})
    both = EngineOptions(speculative_config='{"prompt_lookup_max": 3}', spec_method="ngram").speculation
    assert both == SpecConfig("ngram", 5, {"prompt_lookup_min": 2, "prompt_lookup_max": 3})
    drafted = EngineOptions(speculative_config='{"model": "smollm2"}').speculation
    assert drafted == SpecConfig("draft_model", 3, {"draft_tensor_parallel_size": 1}, "smollm2")
    given = EngineOptions.of({"speculative_config": {"method": "ngram", "prompt_lookup_max": 1}}).speculation
    assert given == SpecConfig("ngram", 5, {"prompt_lookup_min": 1, "prompt_lookup_max": 1})  # the other one follows


@pytest.mark.parametrize(
    "options, told",
    [
        ({"spec_method": "eagle4"}, "`eagle4`.*choose from ngram, suffix, draft_model, eagle, eagle3, medusa, mtp"),
        ({"spec_method": "medusa"}, "medusa drafts with `model`.*./head"),
        ({"speculative_config": '{"method": "mtp", "model": "smollm2"}'}, "mtp has no `model`.*leave it out"),
        ({"spec_tokens": 3}, "no method.*choose from ngram"),
        ({"speculative_config": '{"method": "ngram", "depth": 3}'}, "`depth`.*method, num_speculative_tokens, prompt_"),
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
        ({"speculative_config": '{"method": "ngram", "model": "smollm2"}'}, "ngram has no `model`.*leave it out"),
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
