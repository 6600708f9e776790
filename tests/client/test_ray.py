"""Engines on a Ray cluster of two nodes, both on this machine: started, asked, and killed with their node."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.client.engine_group import EngineGroup
from quire.client.generate_request import GenerateRequest
from quire.client.ray_cluster import stage_share
from quire.client.ray_engine import RayEngine
from quire.core.errors import DoesNotFit, QuireError, Unsupported
from quire.engine.options import EngineOptions
from quire.gateway.config import Discovery, WorkerEntry
from quire.gateway.discovery import WorkerDiscovery
from quire.server.ray_registration import RayRegistration
from ranks.processes import wait_until

NUM_STREAMS = 6


def test_each_engine_gets_the_most_cpus_that_all_can_have() -> None:
    assert stage_share([8, 8], 2, None, "CPU") == 8
    assert stage_share([8, 8], 3, None, "CPU") == 4
    assert stage_share([8, 2], 2, None, "CPU") == 4
    assert stage_share([1, 1], 2, 1, "CPU") == 1
    with pytest.raises(
        DoesNotFit, match="data_parallel_size is 3, with 2 CPUs for each engine, and the 2 nodes"
    ) as told:
        stage_share([2, 3], 3, 2, "CPU")
    assert told.value.hint == "use data_parallel_size 2"
    with pytest.raises(DoesNotFit, match="have none"):
        stage_share([], 1, None, "GPU")


def test_stages_of_an_engine_take_as_much_room_as_engines() -> None:
    assert stage_share([8, 8], 1, None, "CPU", num_stages=2) == 8
    assert stage_share([8, 8], 2, None, "CPU", num_stages=2) == 4
    with pytest.raises(DoesNotFit, match="is 2 of 2 stages, with 2 CPUs for each stage, and the 2 nodes") as told:
        stage_share([4, 3], 2, 2, "CPU", num_stages=2)
    assert told.value.hint == "use data_parallel_size 1"
    with pytest.raises(DoesNotFit) as told:
        stage_share([1, 1], 1, 2, "CPU", num_stages=2)
    assert told.value.hint == "add nodes, give fewer threads or fewer stages"


def test_ranks_of_an_engine_have_a_gpu_each() -> None:
    assert stage_share([2, 2], 2, 2, "GPU") == 2
    with pytest.raises(DoesNotFit, match="with 4 GPUs for each engine, and the 2 nodes of the Ray cluster have 2, 2"):
        stage_share([2, 2], 1, 4, "GPU")


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
        with pytest.raises(DoesNotFit, match="with 2 GPUs for each engine, and the 3 nodes of the Ray cluster have 0"):
            await group_of(tiny_model, 1, device="cuda", tensor_parallel_size=2).start()
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
def test_the_stages_of_one_engine_are_on_two_nodes_and_either_may_be_lost(
    cluster: Any, tiny_model: Path, undisturbed: list[list[int]]
) -> None:
    """Each node has one CPU, so that no two stages are on the same."""
    for node in list(cluster.worker_nodes):  # those of other tests
        cluster.remove_node(node, False)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()

    async def main() -> None:
        with pytest.raises(DoesNotFit, match="is 1 of 3 stages, with 1 CPUs for each stage, and the 3 nodes"):
            await group_of(tiny_model, 1, pipeline_parallel_size=3).start()
        async with group_of(tiny_model, 1, pipeline_parallel_size=2) as group:
            turns = count()
            assert await answers(group, next(turns)) == undisturbed
            [stage] = stages_of(tiny_model)
            for node in (None, *nodes):  # None: its process alone
                asking, lost = asyncio.Event(), asyncio.Event()
                streams = asyncio.create_task(ask_until(lost, group, turns, undisturbed, asking))
                await asking.wait()
                if node is None:
                    os.kill(stage, signal.SIGKILL)
                else:
                    await asyncio.to_thread(cluster.remove_node, node, False)
                while group.engine_states == ["ready"]:
                    await asyncio.sleep(0.01)
                lost.set()
                if node is not None:
                    cluster.add_node(num_cpus=1)
                await streams
            assert len(stages_of(tiny_model)) == 1
        wait_until(lambda: not stages_of(tiny_model))

    run(main(), 220)


async def ask_until(
    lost: asyncio.Event, group: EngineGroup, turns: Iterator[int], undisturbed: list[list[int]], asking: asyncio.Event
) -> None:
    """The same requests again and again, so that there are some in flight when the engine is lost, and after that."""
    while True:
        is_last = lost.is_set()
        streams = asyncio.create_task(answers(group, next(turns)))
        while not group.decode[0].scheduler.running and not streams.done():
            await asyncio.sleep(0.002)
        asking.set()
        assert await streams == undisturbed
        if is_last:
            return


async def answers(group: EngineGroup, turn: int) -> list[list[int]]:
    return list(await asyncio.gather(*(read(group, request(i, turn)) for i in range(NUM_STREAMS))))


def stages_of(model: Path) -> list[int]:
    """Processes of stages, which Ray's have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"quire.executors.pipeline.remote_follower" in command and str(model).encode() in command:
                found.append(int(folder.name))
    return found


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
