"""What tests of models in several processes share: their tokens, their processes, and one that is killed."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.engine.options import EngineOptions

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


def check_that_streams_go_on(
    model: Path, victim: Callable[[int], int], max_tokens: int = 300, also_idle: bool = False, **options: Any
) -> None:
    """`victim`: of an engine's process, the process that is killed: while it computes, and perhaps also when it has
    nothing to do."""
    requests = [
        GenerateRequest(
            id=f"r{number}",
            params=SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=number, ignore_eos=True),
            prompt=f"Chapter {number}. ",
        )
        for number in range(8)
    ]
    llm = LLM(model)
    outputs = llm.generate([one.prompt or "" for one in requests], [one.params for one in requests])
    undisturbed = [output.outputs[0].token_ids for output in outputs]

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(model), **options)) as client:
            seen: list[list[int]] = [[] for _ in requests]

            async def read(index: int) -> None:
                async for event in await client.submit(requests[index]):
                    seen[index] += event.token_ids

            streams = [asyncio.create_task(read(index)) for index in range(len(requests))]
            while not all(len(tokens) > 20 for tokens in seen):
                await asyncio.sleep(0.002)
            engine = client.engine_pid
            os.kill(victim(engine), signal.SIGKILL)
            await asyncio.gather(*streams)
            assert client.engine_pid != engine and not exists(engine) and seen == undisturbed
            if also_idle:
                engine = client.engine_pid
                os.kill(victim(engine), signal.SIGKILL)
                while client.engine_pid == engine or client.state != "ready":
                    await asyncio.sleep(0.01)
            left = victim(client.engine_pid)
        assert not exists(client.engine_pid)
        wait_until(lambda: not exists(left))

    asyncio.run(asyncio.wait_for(main(), 120))
