"""Ranks as processes: the tokens of one process, and nothing left behind, however one of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, EngineFailed, Unsupported
from quire.engine.options import EngineOptions
from quire.executors.ranks.leader import RanksExecutor
from quire.executors.ranks.messages import RunStep, decode_to_rank, encode
from ranks.rank_threads import batch_of

PROMPTS = ["A quire is", "Chapter 1. " * 9, "x"]
MIXED = [
    SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True, n=2),
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=2),
    SamplingParams(max_tokens=24, temperature=1.3, seed=3, ignore_eos=True, top_p=0.9, frequency_penalty=0.5),
]


def texts(llm: LLM, **options: Any) -> list[Any]:
    results = llm.generate(PROMPTS, MIXED, **options)
    return [(one.token_ids, one.logprobs, result.prompt_logprobs) for result in results for one in result.outputs]


def followers(parent: int, module: bytes = b"quire.executors.ranks.follower") -> list[int]:
    """The processes of ranks that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "stat").read_text() if entry.name.isdigit() else ""
            command = (entry / "cmdline").read_bytes() if status else b""
        except OSError:
            continue
        if module in command and int(status.rpartition(")")[2].split()[1]) == parent:
            found.append(int(entry.name))
    return sorted(found)


def exists(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Any, seconds: float = 5.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it never happened"
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
def two(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(tiny_model, tensor_parallel_size=2)
    yield llm
    llm.engine.stop()


def test_tokens_and_logprobs_are_those_of_one_process(tiny_model: Path, two: LLM) -> None:
    expected = texts(LLM(tiny_model))
    assert texts(two) == expected
    three = LLM(
        tiny_model, tensor_parallel_size=3, kv_cache_memory_bytes=200_000, swap_space=0.01
    )  # they are preempted
    assert texts(three) == expected
    three.engine.stop()
    assert len(followers(os.getpid())) == 1, "those of `two`"


def test_quantized_weights_of_a_real_model_are_divided(default_model: Path) -> None:
    """9 heads with 3 KV heads, in a GGUF file."""
    found = []
    for size in (1, 2):
        llm = LLM(default_model, max_model_len=256, tensor_parallel_size=size, spec_method="ngram")
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0, logprobs=1))
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
        llm.engine.stop()
    assert found[0] == found[1]


def test_a_killed_rank_ends_the_step_with_a_reason(two: LLM) -> None:
    [rank] = followers(os.getpid())
    texts(two)
    os.kill(rank, signal.SIGKILL)
    assert isinstance(two.engine.executor, RanksExecutor)
    ranks = two.engine.executor.ranks
    assert wait_until(lambda: ranks.lost) < 1.0
    with pytest.raises(EngineFailed, match=rf"rank 1 of 2 \(process {rank}\) was killed by signal 9"):
        texts(two)
    assert not exists(rank)


def test_a_rank_that_hangs_is_found_by_its_heartbeat_in_the_middle_of_a_step(two: LLM) -> None:
    [rank] = followers(os.getpid())
    texts(two)
    os.kill(rank, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineFailed, match=rf"rank 1 of 2 \(process {rank}\) hangs"):
        texts(two)
    assert time.monotonic() - start < 2.0 and not exists(rank)


def test_ranks_end_when_the_process_that_started_them_is_killed(tiny_model: Path) -> None:
    program = "import sys; from quire import LLM; llm = LLM(sys.argv[1], tensor_parallel_size=3); print('ready', "
    program += "flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == b"ready\n"
        ranks = followers(starter.pid)
        assert len(ranks) == 2
        starter.kill()
    wait_until(lambda: not any(exists(rank) for rank in ranks))


def test_streams_go_on_when_a_rank_is_killed(tiny_model: Path) -> None:
    requests = [
        GenerateRequest(
            id=f"r{number}",
            params=SamplingParams(max_tokens=100, temperature=0.8, seed=number, ignore_eos=True),
            prompt=f"Chapter {number}. ",
        )
        for number in range(8)
    ]
    llm = LLM(tiny_model)
    undisturbed = [llm.generate(one.prompt or "", one.params)[0].outputs[0].token_ids for one in requests]

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model), tensor_parallel_size=2)) as client:
            seen: list[list[int]] = [[] for _ in requests]

            async def read(index: int) -> None:
                async for event in await client.submit(requests[index]):
                    seen[index] += event.token_ids

            streams = [asyncio.create_task(read(index)) for index in range(len(requests))]
            while not all(len(tokens) > 20 for tokens in seen):
                await asyncio.sleep(0.002)
            engine = client.engine_pid
            [rank] = followers(engine)
            os.kill(rank, signal.SIGKILL)
            await asyncio.gather(*streams)
            assert client.engine_pid != engine and not exists(engine) and seen == undisturbed
            rank, engine = followers(client.engine_pid)[0], client.engine_pid
            os.kill(rank, signal.SIGKILL)  # nothing is computed
            while client.engine_pid == engine or client.state != "ready":
                await asyncio.sleep(0.01)
        assert not exists(client.engine_pid)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_what_ranks_cannot_do_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"tensor_parallel_size is 7, and the model has 6 attention heads.*\n.*1 to 6"):
        LLM(tiny_model, tensor_parallel_size=7)
    transfer = '{"kv_role": "kv_consumer", "kv_ip": "127.0.0.1", "kv_port": 9}'
    with pytest.raises(Unsupported, match=r"not sent to other engines.*\n.*tensor_parallel_size"):
        LLM(tiny_model, tensor_parallel_size=2, kv_transfer_config=transfer)
    with pytest.raises(BadRequest, match="tensor_parallel_size is 0"):
        LLM(tiny_model, tensor_parallel_size=0)
    assert not followers(os.getpid())


def test_a_step_crosses_to_other_ranks_as_it_is() -> None:
    batch = batch_of([5, 6, 7], 1, adapter=2)
    message = decode_to_rank(encode(RunStep.of(3, batch)))
    assert isinstance(message, RunStep) and message.program == 3
    there = message.batch()
    for name in ("ids", "positions", "slots", "seq_starts", "context_lens", "block_tables", "logit_rows", "adapters"):
        assert getattr(there, name).tolist() == getattr(batch, name).tolist(), name
    assert there.source_tables is None and there.block_tables.shape == batch.block_tables.shape
