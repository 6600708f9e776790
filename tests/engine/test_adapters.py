"""Adapters in an engine: together, loaded and unloaded while others run, preempted, and after a crash."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.lora_files import adapter
from quire import LLM, AsyncEngine, LoRARequest, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, QuireError, UnknownModel
from quire.engine.options import EngineOptions

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = "A quire is a gathering of pages, and this one has been bound with"
NAMES = ("sql", "poems", "odd")
TARGETS = [
    ["q_proj", "v_proj"],
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ["down_proj"],
]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of ranks 4, 8 and 12."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    folder = tmp_path_factory.mktemp("adapters")
    for number, (name, targets) in enumerate(zip(NAMES, TARGETS, strict=True), start=1):
        adapter(model, folder / name, number, r=4 * number, lora_alpha=16, target_modules=targets)
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapters: dict[str, Path]) -> dict[str, list[int]]:
    """What PEFT's merged models continue PROMPT with, and ("") the model itself."""
    from peft import PeftModel

    prompt = torch.tensor([LLM(tiny_model).tokenizer.encode(PROMPT)])
    found = {}
    for name, path in {"": None, **adapters}.items():
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        merged = model if path is None else PeftModel.from_pretrained(model, path).merge_and_unload()
        with torch.inference_mode():
            ids = merged.generate(
                prompt, max_new_tokens=GREEDY.max_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        found[name] = ids[0, prompt.shape[1] :].tolist()
    assert len(set(map(tuple, found.values()))) == len(found), "adapters that change nothing test nothing"
    return found


def lora(name: str, paths: dict[str, Path]) -> LoRARequest | None:
    return LoRARequest(name, 1, str(paths[name])) if name else None


def test_llm_gives_each_prompt_its_adapter(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    llm = LLM(tiny_model, enable_lora=True, max_loras=2, kv_cache_dtype="float32")
    order = ["", "sql", "poems", "odd", "sql", ""]  # more than there are slots
    outputs = llm.generate([PROMPT] * 6, GREEDY, lora_request=[lora(name, adapters) for name in order])
    assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in order]
    for name in order:  # alone, and from the prefixes that are cached now: of each adapter its own
        (output,) = llm.generate(PROMPT, GREEDY, lora_request=lora(name, adapters))
        assert output.outputs[0].token_ids == expected[name]
        assert output.num_cached_tokens and output.num_cached_tokens > 0
    several = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=8, seed=4), lora_request=lora("poems", adapters))
    assert len(several[0].outputs) == 3
    with pytest.raises(BadRequest, match="called `sql` already"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("sql", 1, str(adapters["odd"])))


def test_preempted_requests_keep_their_adapter(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    llm = LLM(
        tiny_model,
        lora_modules=tuple(f"{name}={path}" for name, path in adapters.items()),
        max_loras=1,
        max_model_len=128,
        kv_cache_dtype="float32",
        kv_cache_memory_bytes=12 * 2 * 2 * 3 * 16 * 16 * 4,  # twelve blocks: two prompts, and not two answers
        enable_prefix_caching=False,
        max_num_seqs=4,
    )
    order = ["sql", "sql", "poems", "", "odd", "poems"]
    longer = replace(GREEDY, max_tokens=56)
    outputs = llm.generate([PROMPT] * 6, longer, lora_request=[lora(name, adapters) for name in order])
    assert [output.outputs[0].token_ids[:24] for output in outputs] == [expected[name] for name in order]
    assert llm.engine._scheduler.num_preemptions > 0


def test_without_adapters_they_are_refused(tiny_model: Path, adapters: dict[str, Path]) -> None:
    llm = LLM(tiny_model)
    with pytest.raises(BadRequest, match="adapters are not enabled"):
        llm.generate(PROMPT, GREEDY, lora_request=lora("sql", adapters))
    with pytest.raises(UnknownModel, match="no adapter `sql`"):
        list(llm.stream(GenerateRequest(id="1", params=GREEDY, prompt=PROMPT, adapter="sql")))
    for wrong in ("sql", "=x", "a=b,a=c"):
        with pytest.raises(BadRequest, match="lora_modules has"):
            EngineOptions(lora_modules=(wrong,))


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def options(tiny_model: Path, **given: Any) -> EngineOptions:
    return EngineOptions(model=str(tiny_model), kv_cache_dtype="float32", threads=2, **given)


async def tokens(client: EngineClient, name: str, request_id: str, **params: Any) -> list[int]:
    wanted = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **params})
    stream = await client.submit(GenerateRequest(id=request_id, params=wanted, prompt=PROMPT, adapter=name))
    try:
        return [token async for event in stream for token in event.token_ids]
    finally:
        await stream.aclose()


def test_adapters_come_and_go_while_others_run(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    async def in_flight_when_unloaded() -> bool:
        given = options(tiny_model, enable_lora=True, lora_modules=(f"sql={adapters['sql']}",), max_loras=2)
        async with EngineClient(given) as client:
            assert client.adapters.names() == ["sql"]
            long = asyncio.create_task(tokens(client, "sql", "long", max_tokens=300))
            assert await tokens(client, "sql", "1") == expected["sql"]
            for name in ("poems", "odd"):
                await client.adapters.load(name, str(adapters[name]))
            names = ["", *NAMES]
            found = await asyncio.gather(*(tokens(client, name, f"2 {name}") for name in names))
            assert found == [expected[name] for name in names]
            with pytest.raises(BadRequest, match="called `odd` already"):
                await client.adapters.load("odd", str(adapters["odd"]))
            # The same name, another adapter, while the first one is still being used.
            await client.adapters.unload("sql")
            with pytest.raises(UnknownModel, match="no adapter `sql`"):
                await tokens(client, "sql", "3")
            await client.adapters.load("sql", str(adapters["odd"]))
            in_flight = not long.done() and len(client.adapters.held) == 4
            assert await tokens(client, "sql", "4") == expected["odd"]
            assert (await long)[:24] == expected["sql"]
            while len(client.adapters.held) == 4:  # until the engine has told that it is gone
                await asyncio.sleep(0.01)
            for path, message in ((tmp_path / "none", "is not a directory"), (tmp_path, "has no adapter_config.json")):
                with pytest.raises(BadRequest, match=message):
                    await client.adapters.load("new", str(path))
            assert sorted(client.adapters.names()) == sorted(NAMES)
            return in_flight

    async def main() -> None:
        while not await in_flight_when_unloaded():  # on a busy machine it may have ended before
            pass

    run(main())


def test_a_killed_engine_comes_back_with_its_adapters(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async def main() -> None:
        async with EngineClient(options(tiny_model, enable_lora=True)) as client:
            for name in ("sql", "poems"):
                await client.adapters.load(name, str(adapters[name]))
            under_way = [
                asyncio.create_task(tokens(client, name, f"{name} {n}", max_tokens=200))
                for name in ("sql", "poems", "")
                for n in range(2)
            ]
            await tokens(client, "sql", "first", max_tokens=4)
            await client.adapters.unload("poems")  # its requests are still under way
            os.kill(client.engine_pid, signal.SIGKILL)
            found = await asyncio.gather(*under_way)
            for name, got in zip(("sql", "sql", "poems", "poems", "", ""), found, strict=True):
                assert got[:24] == expected[name] and len(got) == 200
            assert await tokens(client, "sql", "last") == expected["sql"]
            while len(client.adapters.held) > 1:
                await asyncio.sleep(0.01)

    run(main())


def test_an_adapter_that_cannot_be_loaded_ends_the_start(tiny_model: Path, adapters: dict[str, Path]) -> None:
    async def main() -> None:
        for given in (
            {"lora_modules": ("x=/nowhere",)},
            {"lora_modules": (f"x={adapters['odd']}",), "max_lora_rank": 8},
        ):
            client = EngineClient(options(tiny_model, **given))
            with pytest.raises(QuireError, match=r"is not a directory|max_lora_rank, which is 8"):
                await client.start()
            await client.stop()

    run(main())


def test_async_engine_loads_what_it_is_asked_for(
    tiny_model: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async def main() -> None:
        engine = AsyncEngine(str(tiny_model), enable_lora=True, kv_cache_dtype="float32")
        for number in range(2):
            async for output in engine.generate(PROMPT, GREEDY, str(number), lora_request=lora("poems", adapters)):
                last = output
            assert last.outputs[0].token_ids == expected["poems"]
        await engine.shutdown()

    run(main())
