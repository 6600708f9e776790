"""The `openai` package against the server: what its users rely on."""

from collections.abc import Iterator

import openai
import pytest

from server.fake_service import EOS, answer
from server.running import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


HELLO = [{"role": "user", "content": "Hello"}]
NUM_HELLO = len("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="fake", messages=HELLO)
    [choice] = chat.choices
    text = answer(0, NUM_HELLO)
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "stop")
    assert chat.usage.prompt_tokens == NUM_HELLO
    assert chat.usage.completion_tokens == len(text.encode()) + 1
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    assert chat.usage.prompt_tokens_details.cached_tokens == 4
    assert chat.id.startswith("chatcmpl-") and chat.object == "chat.completion" and chat.model == "fake"


def test_a_streamed_chat_is_the_full_one_in_pieces(client: openai.OpenAI) -> None:
    full = client.chat.completions.create(model="fake", messages=HELLO, n=2)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, reasons, roles = ["", ""], [None, None], [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None and chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            roles[choice.index] = choice.delta.role or roles[choice.index]
    assert texts == [choice.message.content for choice in full.choices]
    assert reasons == ["stop", "stop"] and roles == ["assistant", "assistant"]
    assert chunks[-1].choices == [] and chunks[-1].usage == full.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "fake", "messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    full = client.chat.completions.create(**asked).choices[0]
    assert [entry.token for entry in full.logprobs.content] == list("Samp")
    entry = full.logprobs.content[0]
    assert entry.logprob == -0.25 and entry.bytes == [ord("S")]
    assert [top.token for top in entry.top_logprobs] == ["S", "T", "U"]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == full.logprobs.content
    assert full.finish_reason == "length"


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI, server: Running) -> None:
    def texts(prompt: object) -> list[str]:
        return [choice.text for choice in client.completions.create(model="fake", prompt=prompt, max_tokens=99).choices]

    assert texts("abc") == [answer(0, 4)]  # with the first token that the tokenizer adds
    assert texts(["abc", "abcdef"]) == [answer(0, 4), answer(0, 7)]
    assert texts([1, 2]) == [answer(0, 2)]
    assert texts([[1, 2], [3, 4, 5]]) == [answer(0, 2), answer(0, 3)]


def test_choices_are_numbered_by_prompt_then_sample(client: openai.OpenAI) -> None:
    full = client.completions.create(model="fake", prompt=["a", "bb"], n=2, max_tokens=99)
    expected = [answer(0, 2), answer(1, 2), answer(0, 3), answer(1, 3)]
    assert [choice.text for choice in full.choices] == expected
    assert [choice.index for choice in full.choices] == [0, 1, 2, 3]
    texts = [""] * 4
    for chunk in client.completions.create(model="fake", prompt=["a", "bb"], n=2, max_tokens=99, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_completions_give_16_tokens_unless_told(client: openai.OpenAI) -> None:
    full = client.completions.create(model="fake", prompt="abc")
    assert full.usage.completion_tokens == 16 and full.choices[0].finish_reason == "length"


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    asked = {"model": "fake", "prompt": "a cat sat", "echo": True, "logprobs": 2, "max_tokens": 3}
    full = client.completions.create(**asked).choices[0]
    assert full.text == "a cat satSam"
    assert full.logprobs.tokens == ["<s>", *"a cat satSam"]
    assert full.logprobs.token_logprobs == [None] + [-0.25] * 12
    assert full.logprobs.top_logprobs[0] is None and full.logprobs.top_logprobs[1] == {"a": -0.25, "b": -2.0}
    assert full.logprobs.text_offset == [0, *range(12)], "<s> is not in the text"
    text, tokens, offsets = "", [], []
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.text
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
    assert (text, tokens, offsets) == (full.text, full.logprobs.tokens, full.logprobs.text_offset)


def test_echo_alone_draws_nothing_that_is_seen(client: openai.OpenAI) -> None:
    full = client.completions.create(model="fake", prompt="a cat", echo=True, logprobs=0, max_tokens=0)
    assert full.choices[0].text == "a cat" and len(full.choices[0].logprobs.tokens) == 6
    assert full.usage.completion_tokens == 0
    streamed = list(client.completions.create(model="fake", prompt="a cat", echo=True, max_tokens=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == "a cat"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(client: openai.OpenAI, server: Running, stream: bool) -> None:
    asked = {"model": "fake", "messages": HELLO, "stop": [" tok", "nowhere"]}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        last = client.chat.completions.create(**asked).choices[0]
        text = last.message.content
    assert text == f"Sample 0 read {NUM_HELLO}"
    assert last.finish_reason == "stop" and last.stop_reason == " tok"
    assert not server.service.open, "a stop string has to end the request in the engine"


def test_extras_of_vllm(client: openai.OpenAI, server: Running) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [ord("p")],
        "include_stop_str_in_output": True,
        "priority": 3,
        "cache_salt": "mine",
        "bad_words": ["bad"],
        "allowed_token_ids": [1, 2],
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 3,
    }
    full = client.completions.create(model="fake", prompt="Hello", logit_bias={"7": -1.5}, seed=9, extra_body=extra)
    choice = full.choices[0].model_dump()
    assert choice["text"] == "Samp" and choice["stop_reason"] == ord("p")
    assert choice["token_ids"] == list(b"Samp") and choice["prompt_token_ids"] == list(b"llo")
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 3
    assert choice["prompt_logprobs"][1][str(ord("l"))] == {"logprob": -0.25, "rank": 1, "decoded_token": "l"}
    request = server.service.seen[-1]
    params = request.params
    assert (params.top_k, params.min_p, params.typical_p, params.repetition_penalty) == (5, 0.1, 0.9, 1.1)
    assert (params.min_tokens, params.bad_words, params.allowed_token_ids) == (2, ["bad"], [1, 2])
    assert (params.logit_bias, params.seed) == ({7: -1.5}, 9)
    assert (request.priority, request.salt) == (3, "mine")


def test_extras_of_llama_cpp(client: openai.OpenAI, server: Running) -> None:
    extra = {
        "no_repeat_ngram_size": 3,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n", "##"],
        "top_n_sigma": 1.5,
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 1.2,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
    }
    messages = [{"role": "user", "content": "Hello"}]
    client.completions.create(model="fake", prompt="Hello", extra_body={**extra, "samplers": "kt"})
    client.chat.completions.create(model="fake", messages=messages, extra_body={**extra, "samplers": ["top_k", "temp"]})
    client.responses.create(model="fake", input="Hello", extra_body={**extra, "samplers": "kt"})
    for request in server.service.seen[-3:]:
        assert {name: getattr(request.params, name) for name in extra} == extra
        assert request.params.samplers == ["top_k", "temperature"]
    with pytest.raises(openai.BadRequestError, match="xtc_probability is 2"):
        client.completions.create(model="fake", prompt="Hello", extra_body={"xtc_probability": 2})


def test_tokens_may_be_named_by_their_ids(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True}
    full = client.completions.create(model="fake", prompt="Hi", echo=True, logprobs=1, max_tokens=1, extra_body=extra)
    shown = full.choices[0].logprobs
    assert shown.tokens == [f"token_id:{token}" for token in (256, *b"HiS")]
    assert shown.text_offset == [0, 0, 1, 2], "of the text, not of the names"
    assert shown.top_logprobs[1].keys() == {f"token_id:{ord('H')}"}
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, top_logprobs=1, max_tokens=1, extra_body=extra
    )
    [token] = chat.choices[0].logprobs.content
    assert token.token == token.top_logprobs[0].token == f"token_id:{ord('S')}" and token.bytes == [ord("S")]


def test_beam_search_is_as_wide_as_n(client: openai.OpenAI, server: Running) -> None:
    extra = {"use_beam_search": True, "length_penalty": 0.5}
    assert len(client.completions.create(model="fake", prompt="x", n=3, extra_body=extra).choices) == 3
    params = server.service.seen[-1].params
    assert (params.beam_width, params.length_penalty) == (3, 0.5)
    client.completions.create(model="fake", prompt="x", n=1, best_of=4)
    assert server.service.seen[-1].params.best_of == 4


def test_a_message_is_continued(client: openai.OpenAI, server: Running) -> None:
    messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "I say"}]
    extra = {"continue_final_message": True, "chat_template_kwargs": {"mood": "good"}, "return_token_ids": True}
    full = client.chat.completions.create(model="fake", messages=messages, extra_body=extra).model_dump()
    assert bytes(full["prompt_token_ids"]).endswith(b"<|im_start|>assistant\nI say")
    assert full["choices"][0]["token_ids"][-1] == EOS
    assert server.service.seen[-1].template_options["mood"] == "good"


def test_content_parts_are_joined(client: openai.OpenAI, server: Running) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
    assert server.service.seen[-1].messages == [{"role": "user", "content": "one\ntwo"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_errors_are_the_exceptions_users_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean `fake`"):
        client.chat.completions.create(model="fakee", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_request_error"
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="fake", prompt="!full")
    assert full.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="fake", prompt="!down")
    assert down.value.status_code == 503
    with pytest.raises(openai.BadRequestError, match="context") as long:
        client.completions.create(model="fake", prompt="x" * 1000)
    assert long.value.code == "context_length_exceeded"


def test_an_error_in_the_middle_of_a_stream_is_raised(client: openai.OpenAI) -> None:
    seen = ""
    with pytest.raises(openai.APIError, match="failed on purpose"):
        for chunk in client.completions.create(model="fake", prompt="!fail", stream=True):
            seen += chunk.choices[0].text
    assert seen == "Sam"
    with pytest.raises(openai.InternalServerError, match="failed on purpose"):
        client.completions.create(model="fake", prompt="!fail")
