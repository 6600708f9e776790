"""A model that sleeps gives its memory back, and answers the same when it is awake again."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from engine.tiny_encoders import save_encoder
from models.lora_files import adapter
from quire import LLM, AsyncEngine, LoRARequest, SamplingParams
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, Unavailable

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["A quire is", "Paper was"]


def resident_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def tokens(llm: LLM, lora: LoRARequest | None = None) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora_request=lora)]


def test_an_llm_asleep_has_no_weights_in_memory(tiny_model: Path, tmp_path: Path) -> None:
    wide = shutil.copytree(tiny_model, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    (wide / "config.json").write_text(json.dumps(config))
    llm = LLM(
        wide,
        load_format="dummy",
        enable_sleep_mode=True,
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 20,
    )
    first, weights, awake = tokens(llm), llm.engine.capacity.weight_bytes, resident_bytes()
    assert weights > 32 << 20
    llm.sleep()
    assert awake - resident_bytes() > 0.6 * weights  # other tests have left their own in this process
    llm.sleep(level=2)
    for use in (lambda: tokens(llm), llm.reset_prefix_cache, lambda: llm.load_adapter("a", "b")):
        with pytest.raises(Unavailable, match="asleep"):
            use()
    llm.wake_up(tags=["weights", "kv_cache"])
    llm.wake_up()
    assert tokens(llm) == first


def test_a_woken_llm_has_its_adapters(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "sql"
    adapter(AutoModelForCausalLM.from_pretrained(tiny_model), path, 0, r=8, target_modules=["q_proj", "up_proj"])
    llm, lora = LLM(tiny_model, enable_lora=True), LoRARequest("sql", 1, str(path))
    expected = tokens(llm, lora)
    assert expected != tokens(llm)
    llm.sleep()
    llm.wake_up()
    assert llm.engine.adapters == {"sql"} and tokens(llm, lora) == expected


def test_an_llm_that_embeds_sleeps_too(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    llm = LLM(tmp_path)
    [expected] = llm.embed("paper")
    llm.sleep()
    with pytest.raises(Unavailable, match="asleep"):
        llm.embed("paper")
    llm.wake_up()
    [vector] = llm.embed("paper")
    assert vector.outputs == expected.outputs


def test_what_cannot_be_asked_is_named(tiny_model: Path) -> None:
    llm = LLM(tiny_model)
    with pytest.raises(BadRequest, match="level is 0"):
        llm.sleep(level=0)
    with pytest.raises(BadRequest, match="tags are weights"):
        llm.wake_up(tags=["weights"])
    stream = llm.stream(GenerateRequest(id="s", params=GREEDY, prompt="A quire is"))
    next(stream)
    with pytest.raises(BadRequest, match="a stream is in flight"):
        llm.sleep()
    assert list(stream)
    llm.sleep()


def test_an_async_engine_sleeps_when_its_requests_have_ended(tiny_model: Path) -> None:
    async def main() -> None:
        engine = AsyncEngine(str(tiny_model))
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

        async def answer() -> list[int]:
            return [output.outputs[0].token_ids async for output in engine.generate("A quire is", long)][-1]

        expected = await answer()
        under_way = asyncio.create_task(answer())
        while not engine.client.busy:
            await asyncio.sleep(0.001)
        await engine.sleep()
        assert await under_way == expected and await engine.is_sleeping()
        assert not Path(f"/proc/{engine.client.engine_pid}").exists()
        with pytest.raises(Unavailable, match="asleep"):
            await answer()
        await engine.wake_up()
        assert await answer() == expected and not await engine.is_sleeping()
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 90))
