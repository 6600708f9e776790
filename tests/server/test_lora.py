"""Adapters over HTTP, on a real engine: asked for by name, loaded and unloaded while the server runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from models.lora_files import adapter
from quire import LLM, LoRARequest, SamplingParams
from quire.client.engine_group import new_service
from quire.client.many_models import ManyModels
from quire.client.one_model import OneModel
from quire.core.errors import BadRequest
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.launch import engine_options_per_model
from quire.server.options import ServerOptions

PROMPT = "A quire is"
NAMES = ("sql", "poems")
COUNT = 16


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, folder = AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        adapter(model, folder / name, seed, r=8, target_modules=["q_proj", "up_proj"])
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapters: dict[str, Path]) -> dict[str, str]:
    """As the same engine gives them one by one; tests/models/test_lora.py compares them with PEFT's."""
    llm, params = LLM(tiny_model, enable_lora=True), SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    lora = {"tiny": None} | {name: LoRARequest(name, 1, str(path)) for name, path in adapters.items()}
    found = {name: llm.generate(PROMPT, params, lora_request=one)[0].outputs[0].text for name, one in lora.items()}
    assert len(set(found.values())) == 3
    return found


@asynccontextmanager
async def serving(tiny_model: Path, server: ServerOptions, **engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    options = EngineOptions(model=str(tiny_model), served_model_name="tiny", **engine)
    async with new_service(options) as client:
        app = create_app(OneModel(client, client.adapters), server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as http:
            yield http


async def complete(http: httpx.AsyncClient, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
    return str(answer.json()["choices"][0]["text"])


async def change(http: httpx.AsyncClient, what: str, **body: object) -> httpx.Response:
    return await http.post(f"/v1/{what}_lora_adapter", json=body)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_adapters_are_models_that_come_and_go(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, str], num_engines: int
) -> None:
    async def main() -> None:
        allowed, given = ServerOptions(allow_runtime_lora_updating=True), (f"sql={adapters['sql']}",)
        async with serving(tiny_model, allowed, lora_modules=given, data_parallel_size=num_engines) as http:
            loaded = await change(http, "load", lora_name="poems", lora_path=str(adapters["poems"]))
            assert loaded.status_code == 200, loaded.text
            listed = {model["id"]: model["parent"] for model in (await http.get("/v1/models")).json()["data"]}
            assert listed == {"tiny": None, "sql": "tiny", "poems": "tiny"}
            names = ["sql", "poems", "tiny"] * 4
            assert await asyncio.gather(*(complete(http, name) for name in names)) == [expected[name] for name in names]

            parameters = {"max_new_tokens": COUNT, "adapter_id": "poems"}
            tgi = await http.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
            assert expected["poems"].startswith(tgi.json()["generated_text"])

            again = await change(http, "load", lora_name="poems", lora_path=str(adapters["sql"]))
            assert again.status_code == 400 and "already" in again.json()["error"]["message"]
            swapped = {"lora_name": "poems", "load_inplace": True}
            for name in ("sql", "poems"):
                assert (await change(http, "load", lora_path=str(adapters[name]), **swapped)).status_code == 200
                assert await complete(http, "poems") == expected[name]
            for path in ("/nowhere", str(tiny_model)):
                wrong = await change(http, "load", lora_name="new", lora_path=path)
                assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "lora_path", wrong.text
            assert (await change(http, "load", lora_name="tiny", lora_path=path)).status_code == 400

            assert (await change(http, "unload", lora_name="poems")).status_code == 200
            assert (await change(http, "unload", lora_name="poems")).status_code == 404
            gone = await http.post("/v1/completions", json={"model": "poems", "prompt": PROMPT})
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
            assert await complete(http, "sql") == expected["sql"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_adapters_of_several_models(tiny_model: Path, adapters: dict[str, Path], expected: dict[str, str]) -> None:
    """They follow their model when it makes room and comes back."""

    async def main() -> None:
        engine = EngineOptions(threads=1, enable_lora=True, lora_modules=(f"a:sql={adapters['sql']}",))
        each = engine_options_per_model(engine, {"a": str(tiny_model), "b": str(tiny_model)})
        async with ManyModels(each, max_loaded=1) as models:
            app = create_app(models, ServerOptions(allow_runtime_lora_updating=True))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as http:
                poems = {"lora_name": "poems", "lora_path": str(adapters["poems"])}
                unsaid = await change(http, "load", **poems)
                assert unsaid.status_code == 400 and unsaid.json()["error"]["param"] == "base_model_name"
                assert (await change(http, "load", **poems, base_model_name="a")).status_code == 200
                taken = await change(http, "load", **poems, base_model_name="b")
                assert taken.status_code == 400 and taken.json()["error"]["param"] == "lora_name"
                listed = {model["id"]: model["parent"] for model in (await http.get("/v1/models")).json()["data"]}
                assert listed == {"a": None, "sql": "a", "poems": "a", "b": None}
                assert await complete(http, "poems") == expected["poems"]
                assert await complete(http, "b") == expected["tiny"], "a has made room for it"
                for name in NAMES:
                    assert await complete(http, name) == expected[name]
                assert (await change(http, "unload", lora_name="sql")).status_code == 200
                await complete(http, "b")
                assert (await change(http, "unload", lora_name="poems")).status_code == 200, "while it is not loaded"
                await complete(http, "a")
                assert (await http.post("/v1/completions", json={"model": "sql", "prompt": "x"})).status_code == 404

    asyncio.run(asyncio.wait_for(main(), 60))
    for wrong in ("sql=x", "c:sql=x", "a:b=x"):
        with pytest.raises(BadRequest):
            engine_options_per_model(EngineOptions(lora_modules=(wrong,)), {"a": "m", "b": "m"})


def test_only_who_may_changes_adapters(tiny_model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "some", "key": "secret", "models": ["tiny"]}]}')

    async def main() -> None:
        async with serving(tiny_model, ServerOptions(), enable_lora=True) as http:
            for what in ("load", "unload"):
                refused = await change(http, what, lora_name="sql", lora_path=str(adapters["sql"]))
                assert refused.status_code == 403
                assert "--allow-runtime-lora-updating" in refused.json()["error"]["message"]
        with_keys = ServerOptions(allow_runtime_lora_updating=True, keys_file=str(keys))
        async with serving(tiny_model, with_keys) as http:
            http.headers["authorization"] = "Bearer secret"
            refused = await change(http, "load", lora_name="sql", lora_path=str(adapters["sql"]))
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_allowed"
            disabled = await change(http, "load", lora_name="tiny", lora_path=str(adapters["sql"]))
            assert disabled.status_code == 400

    asyncio.run(asyncio.wait_for(main(), 60))
