"""The fields that limit reasoning, under the names that clients know."""

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.server.dialects.anthropic.call import parse_messages
from quire.server.dialects.dialect import Context
from quire.server.dialects.openai.chat import parse_chat
from quire.server.options import ServerOptions
from server.fake_service import CHATML, ByteTokenizer, FakeService

HELLO = [{"role": "user", "content": "Hello"}]


class ThinkingTokenizer(ByteTokenizer):
    chat_template = CHATML + "{# <think> </think> #}"

    def id_of(self, token: str) -> int | None:
        return 0 if token == "</think>" else super().id_of(token)


def context(tokenizer: Any = None, **options: Any) -> Context:
    made = Context(FakeService().info, tokenizer or ThinkingTokenizer(), model="fake")
    return replace(made, options=ServerOptions(**options)) if options else made


def budget(given: Context | None = None, **body: Any) -> int | None:
    asked = json.dumps({"messages": HELLO, **body}).encode()
    return parse_chat(asked, given or context()).requests[0].params.thinking_token_budget


@pytest.mark.parametrize(
    "body",
    [
        {"thinking_token_budget": 64},
        {"thinking_budget": 64},
        {"thinking_budget_tokens": 64},
        {"thinking": {"type": "enabled", "budget_tokens": 64}},
        {"thinking_token_budget": 64, "thinking_budget": 64},
    ],
)
def test_every_name_of_the_budget(body: dict[str, Any]) -> None:
    assert budget(**body) == 64 and budget() is None


def test_two_budgets_are_refused() -> None:
    with pytest.raises(BadRequest, match="thinking_token_budget is 1 and thinking_budget is 2"):
        budget(thinking_token_budget=1, thinking_budget=2)


def test_the_server_has_a_default_for_models_that_reason() -> None:
    assert budget(context(reasoning_budget=100)) == 100
    assert budget(context(reasoning_budget=100), thinking_token_budget=5) == 5
    assert budget(context(ByteTokenizer(), reasoning_budget=100)) is None, "this one does not"


def test_anthropics_budget_is_kept() -> None:
    def messages(given: Context, **thinking: Any) -> int | None:
        body = {"model": "fake", "max_tokens": 100, "messages": HELLO, "thinking": thinking}
        return parse_messages(json.dumps(body).encode(), given).requests[0].params.thinking_token_budget

    assert messages(context(), type="enabled", budget_tokens=1024) == 1024
    assert messages(context(), type="disabled", budget_tokens=1024) is None
    assert messages(context(ByteTokenizer()), type="enabled", budget_tokens=1024) is None
