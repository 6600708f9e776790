"""A model that sleeps gives its memory back, and answers the same when it is awake again."""

import asyncio
import json
import shutil
import subprocess
import sys
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
MEASURE = """
import re, sys
from pathlib import Path
from quire import LLM, SamplingParams

def resident_bytes():
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

sizes = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20}
llm = LLM(sys.argv[1], load_format="dummy", enable_sleep_mode=True, **sizes)
llm.generate(["A quire is"], SamplingParams(max_tokens=4), use_tqdm=False)
weights, awake = llm.engine.capacity.weight_bytes, resident_bytes()
llm.sleep()
print(weights, awake, resident_bytes())
"""


def tokens(llm: LLM, lora: LoRARequest | None = None) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora_request=lora)]


def test_an_llm_asleep_has_no_weights_in_memory(tiny_model: Path, tmp_path: Path) -> None:
    """In a process of its own: what one with other tests in it gives back depends on them."""
    wide = shutil.copytree(tiny_model, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    (wide / "config.json").write_text(json.dumps(config))
    measured = subprocess.run([sys.executable, "-c", MEASURE, wide], capture_output=True, text=True, check=True)
    weights, awake, asleep = map(int, measured.stdout.split())
    assert weights > 32 << 20
    assert awake - asleep > 0.9 * weights


def test_an_llm_asleep_answers_when_it_is_awake(tiny_model: Path) -> None:
    llm = LLM(tiny_model, enable_sleep_mode=True, max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=1 << 20)
    first = tokens(llm)
    llm.sleep()
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
