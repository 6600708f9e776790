"""A Ray cluster that engines run on: joined once, and asked for CPUs or GPUs for each of their stages."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.client.ray_actor import EngineActor
from quire.core.errors import DoesNotFit, Unavailable, Unsupported
from quire.core.ray_names import NAMESPACE

if TYPE_CHECKING:
    from quire.engine.options import EngineOptions

log = logging.getLogger("quire.engine")

CONNECT_TIMEOUT = 5.0  # seconds that the head of a cluster has to answer


class RayCluster:
    """The cluster of RAY_ADDRESS, or the one that this machine is a node of."""

    def __init__(self, num_engines: int, options: "EngineOptions") -> None:
        """Each stage of an engine has `options.threads` CPUs (None: as many as all can have), or a GPU for each of its
        ranks."""
        self._num_engines, self._threads = num_engines, options.threads
        self._uses_gpu, self._num_ranks = options.device == "cuda", options.tensor_parallel_size
        self.num_stages = 1 if options.stage_addresses else options.num_stages  # that Ray places
        self._joining: asyncio.Task[None] | None = None
        self._joined = False  # by this object, and not by the program before
        self.address = ""  # of this machine, as the nodes see it
        self.cpus = 0  # of each stage
        self.stages_per_node = 1  # at most

    async def join(self) -> None:
        """The first call joins, the others wait for it. Raises one sentence."""
        if self._joining is None:
            self._joining = asyncio.create_task(self._join())
        await asyncio.shield(self._joining)

    async def _join(self) -> None:
        try:
            nodes = await asyncio.to_thread(self._connect)
        except ImportError:
            raise Unsupported(
                "distributed_executor_backend is ray, and ray is not installed", "pip install 'quire[ray]'"
            ) from None
        resource = "GPU" if self._uses_gpu else "CPU"
        amounts = [int(node["Resources"].get(resource, 0)) for node in nodes]
        wanted = self._num_ranks if self._uses_gpu else self._threads
        each = stage_share(amounts, self._num_engines, wanted, resource, self.num_stages)
        self.cpus = each if not self._uses_gpu else self._threads or 1
        self.stages_per_node = max(amount // each for amount in amounts)

    def _connect(self) -> list[dict[str, Any]]:
        """Join the cluster -> its nodes. This takes a second or two, and runs in a thread."""
        import ray

        address = os.environ.get("RAY_ADDRESS", "auto")
        if not ray.is_initialized():
            try:
                check_reachable(address)
                ray.init(address, namespace=NAMESPACE, logging_level=logging.WARNING, configure_logging=False)
            except OSError:  # ConnectionError is one
                raise Unavailable(
                    f"there is no Ray cluster at {address}", "start one with `ray start --head`, or set RAY_ADDRESS"
                ) from None
            except RuntimeError as error:  # another version of Ray or of Python
                raise Unsupported(
                    f"the Ray cluster cannot be joined: {_first_sentence(error)}",
                    "use the same versions of Ray and Python on all nodes",
                ) from None
            self._joined = True
        self.address = ray.util.get_node_ip_address()
        return [node for node in ray.nodes() if node["Alive"]]

    def place(self) -> "Placement":
        """Ask for an actor for each stage of an engine, on nodes that have room; they come when there are such."""
        return Placement(self.num_stages, self.cpus, self._num_ranks if self._uses_gpu else 0)

    async def leave(self) -> None:
        if self._joined:
            import ray

            self._joined = False
            await asyncio.to_thread(ray.shutdown)


class Placement:
    """The actors of one engine: its stages in order, of which the last is the engine's process."""

    def __init__(self, num_stages: int, cpus: int, gpus: int) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group: Any = None
        strategies: list[Any] = ["SPREAD"]
        if num_stages > 1:  # all or none: two engines that each wait for one more stage would wait for each other
            bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
            self._group = placement_group([bundle] * num_stages, strategy="SPREAD")
            strategies = [PlacementGroupSchedulingStrategy(self._group, number) for number in range(num_stages)]
        self.actors = [
            ray.remote(EngineActor)
            .options(num_cpus=cpus, num_gpus=gpus, max_concurrency=2, scheduling_strategy=strategy)
            .remote()
            for strategy in strategies
        ]

    def end(self) -> None:
        """Kill the actors, and give their places on the nodes back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)


def stage_share(
    amounts: Sequence[int], num_engines: int, wanted: int | None, resource: str, num_stages: int = 1
) -> int:
    """CPUs or GPUs of each stage on nodes that have `amounts`: those wanted, or the most that all can have."""
    sizes = [wanted] if wanted is not None else range(max(amounts, default=0), 0, -1)
    for size in sizes:
        if sum(amount // size for amount in amounts) >= num_engines * num_stages:
            return size
    least = wanted or 1
    fits = sum(amount // least for amount in amounts) // num_stages
    of_stages = f" of {num_stages} stages" if num_stages > 1 else ""
    raise DoesNotFit(
        f"data_parallel_size is {num_engines}{of_stages}, with {least} {resource}s for each "
        f"{'stage' if num_stages > 1 else 'engine'}, and the {len(amounts)} nodes of the Ray cluster have "
        f"{', '.join(map(str, amounts)) or 'none'}",
        f"use data_parallel_size {fits}" if fits else _more_room(resource, num_stages),
    )


def _more_room(resource: str, num_stages: int) -> str:
    ways = ["add nodes", "give fewer threads" if resource == "CPU" else "use a smaller tensor_parallel_size"]
    return ", ".join(ways) + (" or fewer stages" if num_stages > 1 else "")


def result_of(reference: Any) -> "asyncio.Future[Any]":
    """Await what a method of an actor returns, on the event loop."""
    return asyncio.wrap_future(reference.future())


def check_reachable(address: str) -> None:
    """Ray itself takes minutes to give an address up. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split("\n\n")[0].split())[:300]
