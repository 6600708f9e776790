"""Ranks as processes: the tokens of one process, and nothing left behind, however one of them ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import BadRequest, EngineFailed, Unsupported
from quire.executors.ranks.leader import RanksExecutor
from quire.executors.ranks.messages import RunStep, decode_to_rank, encode
from ranks.processes import PROMPTS, check_that_streams_go_on, exists, followers, texts, wait_until
from ranks.rank_threads import batch_of


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
    wait_until(lambda: ranks.lost)
    with pytest.raises(EngineFailed, match=rf"rank 1 of 2 \(process {rank}\) was killed by signal 9"):
        texts(two)
    wait_until(lambda: not exists(rank))


def test_a_rank_that_hangs_is_found_by_its_heartbeat_in_the_middle_of_a_step(two: LLM) -> None:
    [rank] = followers(os.getpid())
    texts(two)
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=rf"rank 1 of 2 \(process {rank}\) hangs"):
        texts(two)
    wait_until(lambda: not exists(rank))


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
    check_that_streams_go_on(tiny_model, lambda engine: followers(engine)[0], also_idle=True, tensor_parallel_size=2)


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
