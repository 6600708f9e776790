"""What the prompter lets through, the engine can serve."""

from pathlib import Path
from typing import Any

import pytest

from quire.client.generate_request import GenerateRequest
from quire.client.prompt import Prompter
from quire.core.errors import BadRequest, PromptTooLong
from quire.core.params import SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


def prepare(prompter: Prompter, prompt: str | list[int] = "quire", **params: Any) -> Any:
    given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt}
    return prompter.prepare(GenerateRequest(id="r", params=SamplingParams(**params), **given))


def test_a_token_the_model_lacks_is_refused_though_the_tokenizer_knows_it(tokenizer: Tokenizer) -> None:
    last = tokenizer.id_of("z") or 0
    small = Prompter(
        tokenizer, vocab_size=last, max_model_len=64
    )  # as when tokens were added and the model was not resized
    prepare(small, [last - 1])
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": [last]}),
        ("prompt", {"prompt": "z"}),
        ("prompt", {"prompt": [-1]}),
        ("logit_bias", {"logit_bias": {last: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [last]}),
        ("stop_token_ids", {"stop_token_ids": [last]}),
        ("logprob_token_ids", {"logprob_token_ids": [last]}),
        ("bad_token_ids", {"bad_token_ids": [[1, last]]}),
        ("bad_words", {"bad_words": ["z"]}),
    ]
    for field, given in wrong:
        with pytest.raises(BadRequest, match=f"{field} has token id (-1|{last})") as refused:
            prepare(small, **given)
        assert refused.value.param == field
    with pytest.raises(BadRequest, match="empty sequence"):
        prepare(small, bad_token_ids=[[]])


def test_a_token_that_only_pads_the_models_vocabulary_is_taken(tokenizer: Tokenizer) -> None:
    padded = Prompter(tokenizer, vocab_size=tokenizer.vocab_size + 8, max_model_len=64)
    assert prepare(padded, [tokenizer.vocab_size + 7]).prompt_ids == [tokenizer.vocab_size + 7]


def test_requests_without_a_seed_get_one_that_a_seeded_engine_repeats(tokenizer: Tokenizer) -> None:
    seeds = [prepare(Prompter(tokenizer, 999, 64, seed=5)).params.seed for _ in range(2)]
    assert seeds[0] == seeds[1] is not None
    assert prepare(Prompter(tokenizer, 999, 64, seed=5), seed=7).params.seed == 7
    other = Prompter(tokenizer, 999, 64)
    assert prepare(other).params.seed != prepare(other).params.seed


def test_bad_words_are_banned_at_the_start_and_inside_a_text(tokenizer: Tokenizer) -> None:
    banned = prepare(Prompter(tokenizer, 999, 64), bad_words=["ab"]).params.bad_token_ids
    assert banned == [tokenizer.encode("ab"), tokenizer.encode(" ab")]


def test_a_text_that_cannot_fit_is_not_even_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompter = Prompter(tokenizer, vocab_size=300, max_model_len=64)
    with pytest.raises(PromptTooLong, match="first 800 of 17000 characters of the prompt have 800 tokens"):
        prepare(Prompter(tokenizer, vocab_size=300, max_model_len=100), "x" * 17000)
    monkeypatch.setattr(tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(PromptTooLong, match="17000 characters, and the context holds 64 tokens"):
        prepare(prompter, "x" * 17000)


def test_a_window_bounds_the_answer_by_what_the_prompt_leaves(tokenizer: Tokenizer) -> None:
    def max_tokens(window: int | None, **params: Any) -> int | None:
        asked = GenerateRequest(id="r", params=SamplingParams(**params), prompt_ids=[1] * 10, window=window)
        return Prompter(tokenizer, 999, 64).prepare(asked).params.max_tokens

    assert [max_tokens(16), max_tokens(16, max_tokens=3), max_tokens(16, max_tokens=60)] == [6, 3, 6]
    assert max_tokens(None, max_tokens=None) is None
    with pytest.raises(PromptTooLong, match="the prompt has 10 tokens and 1 are asked for, and the context holds 10"):
        max_tokens(10)


def test_a_default_of_max_tokens_never_makes_a_prompt_too_long(tokenizer: Tokenizer) -> None:
    advised = Prompter(tokenizer, tokenizer.vocab_size, max_model_len=64, default_max_tokens=40)
    assert prepare(advised, [1] * 8, max_tokens=None).params.max_tokens == 40
    assert prepare(advised, [1] * 60, max_tokens=None).params.max_tokens == 4
    assert prepare(advised, [1] * 8, max_tokens=50).params.max_tokens == 50, "the request's own value wins"
