"""Fields that users of vLLM send, and keys that they read."""

import openai
import pytest

from quire.core.request import DraftUsage
from server.running import Running

HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_text_offsets_index_the_text(client: openai.OpenAI, server: Running) -> None:
    """Tokens here are bytes: three of them are the dash."""
    server.service.says = "é — x"
    for asked in ({}, {"echo": True}, {"stop": ["x"]}):
        choice = client.completions.create(model="fake", prompt="ä1", logprobs=0, max_tokens=40, **asked).choices[0]
        shown = choice.logprobs
        for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
            told = choice.text[offset : offset + 1]
            assert token in ("<s>", "</s>", "�") or token == told or asked.get("stop"), (token, offset, choice.text)
        assert max(shown.text_offset) <= len(choice.text)
        chunks = client.completions.create(
            model="fake", prompt="ä1", logprobs=0, max_tokens=40, stream=True, **{**asked, "stop": None}
        )
        offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
        assert asked.get("stop") or offsets == shown.text_offset


def test_a_prompt_is_cut_at_either_end(server: Running) -> None:
    def seen(**asked: object) -> str:
        assert server.complete(prompt="abcdef", return_token_ids=True, **asked).status_code == 200
        assert server.chat(**asked).status_code == 200
        return server.complete(prompt="abcdef", echo=True, max_tokens=1, **asked).json()["choices"][0]["text"][:-1]

    assert seen(truncate_prompt_tokens=3) == seen(truncate_prompt_tokens=3, truncation_side="left") == "def"
    assert seen(truncate_prompt_tokens=3, truncation_side="right") == "ab", "after <s>"
    assert seen(truncate_prompt_tokens=-1) == "abcdef"
    long = server.complete(prompt="x" * 5000, max_tokens=96, truncate_prompt_tokens=-1).json()
    assert long["usage"]["prompt_tokens"] == 4000, "what the context holds beside the answer"
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "middle"}):
        assert server.complete(**wrong).json()["error"]["param"] in wrong


def test_special_tokens_are_added_to_a_chat_on_demand(server: Running) -> None:
    def size(**asked: object) -> int:
        return int(server.chat(**asked).json()["usage"]["prompt_tokens"])

    assert size() == size(add_special_tokens=False) == len(RENDERED) and size(add_special_tokens=True) == size() + 1
    asked = {"messages": HELLO, "add_special_tokens": True}
    assert server.http.post("/tokenize", json=asked).json()["tokens"][0] == 256


def test_an_answer_that_continues_a_message_may_begin_with_it(client: openai.OpenAI, server: Running) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Once "}]
    server.service.says = "upon"
    extra = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    asked = {"model": "fake", "messages": begun, "extra_body": extra}
    assert client.chat.completions.create(**asked).choices[0].message.content == "Once upon"
    parts = client.chat.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Once upon"
    alone = server.chat(echo=True).json()["choices"][0]["message"]["content"]
    assert alone == "upon", "there is nothing to begin with"


def test_usage_comes_with_every_chunk_on_demand(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunks in (
        client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options=options),
        client.completions.create(model="fake", prompt="Hello", stream=True, stream_options=options),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] > counts[0]


def test_keys_that_clients_read_are_there(client: openai.OpenAI, server: Running) -> None:
    chat = server.chat().json()
    assert chat["prompt_logprobs"] is None and chat["choices"][0]["message"]["reasoning"] is None
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert server.complete().json()["choices"][0]["prompt_logprobs"] is None
    usage = client.responses.create(model="fake", input="Hello").usage
    assert usage is not None and usage.input_tokens_details.cache_write_tokens == 0


def test_an_answer_tells_what_was_accepted(client: openai.OpenAI, server: Running) -> None:
    plain = server.chat().json()
    assert "metrics" not in plain and "completion_tokens_details" not in plain["usage"]
    server.service.drafts = DraftUsage()
    for num_tokens, num_accepted in ((3, 3), (3, 0), (2, 1), (3, 3)):
        server.service.drafts.add(num_tokens, num_accepted)
    expected = {
        "mean_acceptance_length": 1 + 7 / 4,
        "draft_acceptance_rate": 7 / 11,
        "acceptance_histogram": [1, 1, 0, 2],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 11,
    }
    for answer in (server.chat().json(), server.complete().json()):
        assert answer["metrics"] == {"speculative_decoding": expected}
        assert answer["usage"]["completion_tokens_details"] == {
            "accepted_prediction_tokens": 7,
            "rejected_prediction_tokens": 4,
        }
    usage = {"include_usage": True}
    *_, last = client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options=usage)
    assert last.usage is not None and last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == 7
    assert last.model_extra == {"metrics": {"speculative_decoding": expected}}
    assert server.complete(prompt=["a", "b"]).json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 22


def test_token_strs_are_those_of_the_vocabulary(server: Running) -> None:
    asked = {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}
    assert server.http.post("/tokenize", json=asked).json()["token_strs"] == ["a", "Ġ", "b"]


@pytest.mark.parametrize("field", ["session_id", "request_id"])
def test_ids_of_sessions_are_taken(server: Running, field: str) -> None:
    assert server.chat(**{field: "x"}).status_code == 200
    assert server.complete(**{field: "x"}).status_code == 200


def test_a_proxy_in_front_of_prefill_and_decode_servers_asks_for_nothing_new(server: Running) -> None:
    """It tells the first to keep the blocks, and the second what the first said of them: here, nothing."""
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    for ask in (server.complete, server.chat):
        reply = ask(kv_transfer_params=prefill, max_tokens=1)
        assert reply.status_code == 200 and reply.headers["x-quire-ignored"] == "kv_transfer_params"
        assert reply.json().get("kv_transfer_params") is None
        assert ask(kv_transfer_params={}).status_code == 200
        refused = ask(kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": [1]})
        assert refused.status_code == 400 and "kv_consumer" in refused.text


def test_logprobs_of_listed_tokens(client: openai.OpenAI, server: Running) -> None:
    listed = {"logprob_token_ids": [ord("x"), ord("y")]}
    asked = {"model": "fake", "messages": HELLO, "max_tokens": 1, "extra_body": listed}
    for more, others in (({}, ["S"]), ({"logprobs": True, "top_logprobs": 2}, ["S", "T"])):
        [token] = client.chat.completions.create(**asked, **more).choices[0].logprobs.content
        assert [top.token for top in token.top_logprobs] == [*others, "x", "y"]
    shown = client.completions.create(model="fake", prompt="a", max_tokens=1, extra_body=listed).choices[0].logprobs
    assert shown.top_logprobs == [{"S": -0.25, "x": -9.0, "y": -9.0}]
    for wrong in (list(range(129)), "x"):
        assert server.chat(logprob_token_ids=wrong).json()["error"]["param"] == "logprob_token_ids"
    assert server.chat(logprob_token_ids=[]).json()["choices"][0]["logprobs"] is None


def test_a_beam_search_has_no_listed_tokens(server: Running) -> None:
    refused = server.complete(use_beam_search=True, n=2, logprob_token_ids=[1])
    assert refused.json()["error"]["param"] == "logprob_token_ids"
