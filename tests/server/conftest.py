"""One server a module, whose engine says what a test wants it to, and OpenAI's package to ask it."""

from collections.abc import Iterator

import openai
import pytest

from server.fake_service import CHATML
from server.running import Running, running


@pytest.fixture(scope="module")
def running_server() -> Iterator[Running]:
    with running() as server:
        server.service.info.max_model_len = 4096
        yield server


@pytest.fixture
def server(running_server: Running) -> Iterator[Running]:
    yield running_server
    running_server.service.says = running_server.service.drafts = None
    running_server.service.tokenizer.chat_template = CHATML


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
