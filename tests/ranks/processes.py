"""What tests of models in several processes share: their tokens, their processes, and one that is killed."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine_kills import kill, kill_in_the_middle
from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.engine.options import EngineOptions
from quire.server.observe.metrics import ModelMetrics

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


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it never happened"
        time.sleep(0.01)


def check_that_streams_go_on(
    model: Path,
    victim: Callable[[int], int],
    max_tokens: int = 100,
    also_idle: bool = False,
    alone: Mapping[str, Any] = MappingProxyType({}),
    timeout: float = 120.0,
    **options: Any,
) -> None:
    """`victim`: of an engine's process, the process that is killed: while it computes, and perhaps also when it has
    nothing to do. `alone`: options of the process that it is compared with."""
    requests = [
        GenerateRequest(
            id=f"r{number}",
            params=SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=number, ignore_eos=True),
            prompt=f"Chapter {number}. ",
        )
        for number in range(8)
    ]
    llm = LLM(model, **alone)
    outputs = llm.generate([one.prompt or "" for one in requests], [one.params for one in requests])
    undisturbed = [output.outputs[0].token_ids for output in outputs]

    async def read(client: EngineClient, index: int, begun: set[int]) -> list[int]:
        seen: list[int] = []
        async for event in await client.submit(requests[index]):
            seen += event.token_ids
            if len(seen) > 20:
                begun.add(index)
        return seen

    async def main() -> None:
        metrics, engines = ModelMetrics(), list[int]()

        def killed(engine: int) -> int:
            engines.append(engine)
            return victim(engine)

        async with EngineClient(EngineOptions(model=str(model), **options), metrics) as client:
            await kill_in_the_middle(client, metrics, read, undisturbed, len(requests), killed)
            if also_idle:
                await kill(client, killed)
            wait_until(lambda: not any(map(exists, engines)))
            left = [client.engine_pid, victim(client.engine_pid)]
        wait_until(lambda: not any(map(exists, left)))

    asyncio.run(asyncio.wait_for(main(), timeout))
