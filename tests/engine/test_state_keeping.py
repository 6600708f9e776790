"""States on disk and from other engines: an engine that is started again, or gets its prompts, gives the same bits."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.prefill_thread import PrefillThread
from engine.same_bits import PARAMS, PROMPTS, Bits, bits
from engine.test_kv_tiers import always_fetch
from engine.test_state_slots import hybrid, mamba
from engine.test_transfers import connected, consumer, transfers
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.core.block_keys import STATE_MARK
from quire.core.errors import BadRequest

assert always_fetch and hybrid and mamba  # fixtures

LONG = [prompt * 3 for prompt in PROMPTS if len(prompt) > 30]


@pytest.fixture(scope="module", params=["hybrid", "mamba"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def cold(model: Path) -> list[Bits]:
    llm = LLM(model, enable_prefix_caching=False, max_model_len=512)
    return [bits(llm, [prompt])[0] for prompt in LONG]


@contextmanager
def engine(model: Path, folder: Path, **options: object) -> Iterator[LLM]:
    llm = LLM(model, kv_disk_path=str(folder), max_model_len=512, max_num_seqs=4, **options)
    try:
        yield llm
    finally:
        llm.engine.save_blocks()
        llm.engine.stop()


def hits(llm: LLM) -> int:
    return llm.engine.stats().tiers["disk"].hits


def states_in(folder: Path) -> list[Path]:
    return list(folder.rglob(f"*{STATE_MARK.hex()}.kv"))


def test_an_engine_that_is_started_again_finds_states_on_disk(model: Path, cold: list[Bits], tmp_path: Path) -> None:
    with engine(model, tmp_path) as first:
        assert bits(first, LONG) == cold and hits(first) == 0
    with engine(model, tmp_path, kv_cache_memory_bytes=2**20) as second:  # another number of slots
        assert [bits(second, [prompt])[0] for prompt in LONG] == cold
        assert hits(second) > 300
    assert len(states_in(tmp_path)) >= 2 * len(LONG)  # of each prompt, and of its answer


def test_a_conversation_goes_on_after_a_restart_where_it_was(model: Path, tmp_path: Path) -> None:
    ids, params = list(range(40, 90)), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for turn in range(3):
        with engine(model, tmp_path) as llm:
            answer = llm.generate({"prompt_token_ids": ids}, params)[0]
            assert answer.num_cached_tokens == (len(ids) - 21) // 16 * 16 * (turn > 0)
            ids += [*answer.outputs[0].token_ids, *range(100 + turn, 120 + turn)]


def test_damaged_states_are_computed_again(model: Path, cold: list[Bits], tmp_path: Path) -> None:
    with engine(model, tmp_path) as first:
        assert bits(first, LONG) == cold
    for number, file in enumerate(states_in(tmp_path)):
        content = bytearray(file.read_bytes())
        content[-1 - number] ^= 1
        file.write_bytes(content[: len(content) - number % 2])
    with engine(model, tmp_path) as second:
        assert bits(second, LONG) == cold and hits(second) == 0
        assert second.engine.stats().tiers["disk"].errors > 0


def test_the_cache_command_knows_states(hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(hybrid, tmp_path) as llm:
        llm.generate(LONG, PARAMS)
    num_states, num_files = len(states_in(tmp_path)), len(list(tmp_path.rglob("*.kv")))
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    [stored] = json.loads(capsys.readouterr().out)["models"]
    assert (stored["num_states"], stored["num_blocks"]) == (num_states, num_files - num_states)
    file = states_in(tmp_path)[0]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert f"{num_states} states" in capsys.readouterr().out and not file.exists()


def test_a_disk_for_less_than_two_states_is_refused(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="and one state has"):
        LLM(hybrid, kv_disk_path=str(tmp_path), kv_disk_size=1e-5)


@pytest.mark.parametrize("over", ["shared memory", "TCP"])
def test_prompts_of_a_prefill_engine_come_with_their_state(
    model: Path, cold: list[Bits], tmp_path: Path, over: str
) -> None:
    local = f"unix:{tmp_path}/prefill"
    address = local if over == "shared memory" else "127.0.0.1:0"
    with (
        PrefillThread(model, address, max_model_len=512) as prefill,
        consumer(model, local if over == "shared memory" else prefill.address, max_model_len=512) as llm,
    ):
        connected(llm)
        assert bits(llm, LONG) == cold
        assert (transfers(llm).prefills, transfers(llm).failed) == (len(LONG), 0)
        assert transfers(llm).tokens == sum(len(llm.tokenizer.encode(prompt)) - 1 for prompt in LONG)
        assert transfers(llm).received_bytes == prefill.sent_bytes
        assert bits(llm, LONG) == cold
        states = llm.engine._scheduler.states
        assert states is not None and states.host.num_held == 0
