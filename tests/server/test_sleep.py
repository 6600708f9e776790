"""vLLM's sleep mode: no engine runs, requests are refused, and what they answer afterwards is the same."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.client.many_models import ManyModels
from quire.core.errors import BadRequest
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.options import ServerOptions
from server.running import Running

ASKED = {"prompt": "Words", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
WORDS = {"input": "Words"}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 90))


def client(models: ManyModels, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(models, ServerOptions(**options))), base_url="http://quire", timeout=60
    )


def models_at(*paths: Path, may_sleep: bool = True) -> ManyModels:
    each = {name: EngineOptions(model=str(path), threads=1) for name, path in zip("ab", paths, strict=False)}
    return ManyModels(each, max_loaded=2, may_sleep=may_sleep)


async def status(http: httpx.AsyncClient, method: str, path: str) -> int:
    return (await http.request(method, path)).status_code


def test_asleep_no_engine_runs_and_awake_answers_are_the_same(tiny_model: Path) -> None:
    async def main() -> None:
        async with models_at(tiny_model) as models, client(models) as http:
            expected = (await http.post("/v1/completions", json=ASKED)).json()["choices"]
            engine = models._slots["a"].client
            assert engine is not None and Path(f"/proc/{engine.engine_pid}").exists()
            under_way = asyncio.create_task(http.post("/v1/completions", json=ASKED))
            while not engine.busy:
                await asyncio.sleep(0.001)
            asleep = await asyncio.gather(*(http.post("/sleep", params={"level": level}) for level in (1, 2)))
            assert [answer.status_code for answer in asleep] == [200, 200]
            assert (await under_way).json()["choices"] == expected, "what is in flight ends first"
            assert not Path(f"/proc/{engine.engine_pid}").exists(), "all of its memory is free"
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert await status(http, "GET", "/ready") == 503 and await status(http, "GET", "/health") == 200
            for path, body in (("/v1/completions", ASKED), ("/generate", {"text": "Words"}), ("/v1/embeddings", WORDS)):
                refused = await http.post(path, json=body)
                assert refused.status_code == 503 and "asleep" in refused.text, path
            for _ in range(2):
                assert await status(http, "POST", "/wake_up") == 200
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
            assert await status(http, "GET", "/ready") == 200
            assert (await http.post("/v1/completions", json=ASKED)).json()["choices"] == expected

    run(main())


def test_where_one_model_cannot_be_loaded_again_all_stay_asleep(tiny_model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "model"
    moved.symlink_to(tiny_model)

    async def main() -> None:
        async with models_at(tiny_model, moved) as models, client(models) as http:
            await models.find("b")
            assert await status(http, "POST", "/sleep") == 200
            moved.unlink()
            failed = await http.post("/wake_up")
            assert failed.status_code == 404 and "model" in failed.text
            assert models.state == "asleep" and not any(offer.info for offer in models.offers())
            moved.symlink_to(tiny_model)
            assert await status(http, "POST", "/wake_up") == 200 and models.state == "ready"

    run(main())


@pytest.mark.parametrize("path", ["/sleep?level=0", "/sleep?level=deep", "/wake_up?tags=weights"])
def test_what_cannot_be_asked_is_named(server: Running, path: str) -> None:
    refused = server.http.post(path)
    name = path.partition("?")[2].partition("=")[0]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_a_server_sleeps_only_where_its_operator_allows_it(server: Running, tiny_model: Path) -> None:
    for path in ("/sleep", "/wake_up?tags=weights&tags=kv_cache"):
        refused = server.http.post(path)
        assert refused.status_code == 400 and "--enable-sleep-mode" in refused.json()["error"]["message"]
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    for change in (models_at(tiny_model, may_sleep=False).sleep, models_at(tiny_model, may_sleep=False).wake_up):
        with pytest.raises(BadRequest, match="does not sleep"):
            asyncio.run(change())


def test_a_key_for_some_models_puts_none_to_sleep(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "some", "key": "secret", "models": ["b"]}]}')

    async def main() -> None:
        async with client(models_at(tiny_model), keys_file=str(keys)) as http:
            http.headers["authorization"] = "Bearer secret"
            for path in ("/sleep", "/wake_up"):
                assert await status(http, "POST", path) == 403

    run(main())
