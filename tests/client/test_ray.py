"""Engines on a Ray cluster of two nodes, both on this machine: started, asked, and killed with their node."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.client.engine_group import EngineGroup
from quire.client.generate_request import GenerateRequest
from quire.client.ray_cluster import engine_share
from quire.client.ray_engine import RayEngine
from quire.core.errors import DoesNotFit, QuireError, Unsupported
from quire.engine.options import EngineOptions
from quire.gateway.config import Discovery, WorkerEntry
from quire.gateway.discovery import WorkerDiscovery
from quire.server.ray_registration import RayRegistration

NUM_STREAMS = 6


def test_each_engine_gets_the_most_cpus_that_all_can_have() -> None:
    assert engine_share([8, 8], 2, None, "CPU") == 8
    assert engine_share([8, 8], 3, None, "CPU") == 4
    assert engine_share([8, 2], 2, None, "CPU") == 4
    assert engine_share([1, 1], 2, 1, "CPU") == 1
    with pytest.raises(
        DoesNotFit, match="data_parallel_size is 3, with 2 CPUs for each engine, and the 2 nodes"
    ) as told:
        engine_share([2, 3], 3, 2, "CPU")
    assert told.value.hint == "use data_parallel_size 2"
    with pytest.raises(DoesNotFit, match="have none"):
        engine_share([], 1, None, "GPU")


def test_without_ray_one_sentence_says_what_to_install(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    async def main() -> None:
        async with group_of(tiny_model):
            pass

    with pytest.raises(Unsupported, match="ray is not installed"):
        run(main())


def group_of(model: Path, count: int = 2, **options: Any) -> EngineGroup:
    return EngineGroup(
        EngineOptions(
            model=str(model), data_parallel_size=count, distributed_executor_backend="ray", threads=1, **options
        )
    )


def run(main: Coroutine[Any, Any, None], seconds: float = 110) -> None:
    asyncio.run(asyncio.wait_for(main, seconds))


def request(number: int, turn: int = 0) -> GenerateRequest:
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=number, ignore_eos=True)
    return GenerateRequest(id=f"{number}-{turn}", params=params, prompt=f"Chapter {number}. ", timeout=60.0)


async def read(group: EngineGroup, wanted: GenerateRequest) -> list[int]:
    return [token async for event in await group.submit(wanted) for token in event.token_ids]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[list[int]]:
    llm, wanted = LLM(tiny_model, threads=1), [request(number) for number in range(NUM_STREAMS)]
    results = llm.generate([each.prompt or "" for each in wanted], [each.params for each in wanted], use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, so that its loss is no node's; tests add the nodes."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[ray]'")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")
def test_two_nodes_serve_and_one_may_be_lost(
    cluster: Any, tiny_model: Path, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cluster for all of it: starting one takes seconds."""

    async def main() -> None:
        with pytest.raises(DoesNotFit, match="data_parallel_size is 2, with 1 CPUs for each engine"):
            await group_of(tiny_model).start()
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        await with_other_versions(tiny_model, monkeypatch)
        async with group_of(tiny_model) as group:
            assert await asyncio.gather(*(read(group, request(i)) for i in range(NUM_STREAMS))) == undisturbed
            assert len({engine_of(group, number).pid for number in range(2)}) == 2
            await an_engine_is_killed(group, undisturbed)
            await idle_engines_take_no_cpu(group)
            await a_node_leaves(group, nodes, cluster, undisturbed)

    run(main(), 200)


def engine_of(group: EngineGroup, number: int) -> RayEngine:
    engine = group.decode[number]._engine
    assert isinstance(engine, RayEngine)
    return engine


async def with_other_versions(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed, pytest.raises(Unsupported, match=r"Quire 0.* is installed on the Ray node"):
        changed.setattr("quire.client.ray_engine.__version__", "9.9.9")
        await group_of(tiny_model).start()


async def an_engine_is_killed(group: EngineGroup, undisturbed: list[list[int]]) -> None:
    streams = [asyncio.create_task(read(group, request(i, 1))) for i in range(NUM_STREAMS)]
    while not group.decode[0].scheduler.running:
        await asyncio.sleep(0.002)
    os.kill(engine_of(group, 0).pid, signal.SIGKILL)
    assert await asyncio.gather(*streams) == undisturbed
    while group.engine_states != ["ready", "ready"]:
        await asyncio.sleep(0.05)


async def idle_engines_take_no_cpu(group: EngineGroup) -> None:
    """The engine processes; their actors wait in Ray."""
    pids = [engine_of(group, number).pid for number in range(2)]
    shares: list[float] = []
    while len(shares) < 10 and min(shares, default=1.0) >= 0.02:  # until they have nothing more to do
        before, begin = sum(map(cpu_seconds, pids)), time.monotonic()
        await asyncio.sleep(1.0)
        shares.append((sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - begin))
    assert shares[-1] < 0.02, f"{shares[-1]:.1%} of a CPU for two"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def a_node_leaves(group: EngineGroup, nodes: list[Any], cluster: Any, undisturbed: list[list[int]]) -> None:
    streams = [asyncio.create_task(read(group, request(i, 2))) for i in range(NUM_STREAMS)]
    while not all(client.scheduler.running for client in group.decode):
        await asyncio.sleep(0.002)
    await asyncio.to_thread(cluster.remove_node, nodes[0], False)
    assert await asyncio.gather(*streams) == undisturbed
    while group.engine_states.count("ready") != 1:
        await asyncio.sleep(0.05)
    assert await read(group, request(0, 3)) == undisturbed[0]
    cluster.add_node(num_cpus=1)  # it sets signal handlers: not in a thread
    while group.engine_states.count("ready") != 2:
        await asyncio.sleep(0.05)
    assert await asyncio.gather(*(read(group, request(i, 4)) for i in range(NUM_STREAMS))) == undisturbed


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")
def test_gateways_find_servers_that_have_registered(cluster: Any) -> None:
    async def main() -> None:
        cluster.add_node(num_cpus=1)
        url, found = "http://127.0.0.1:8123", list[list[WorkerEntry]]()
        discovery = WorkerDiscovery(Discovery(ray=cluster.address, interval=0.2), found.append)
        registration = RayRegistration(url)
        while not found:
            await asyncio.sleep(0.05)
        assert [[worker.url for worker in workers] for workers in found] == [[url]]
        await registration.close()
        while found[-1]:
            await asyncio.sleep(0.05)
        assert [len(workers) for workers in found] == [1, 0]
        await discovery.close()

    run(main(), 200)


def test_no_cluster_is_told_in_one_sentence(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[ray]'")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    async def main() -> None:
        async with group_of(tiny_model):
            pass

    with pytest.raises(QuireError) as told:
        run(main())
    assert "127.0.0.1:1" in told.value.message
