"""A Ray cluster that engines run on: joined once, and asked for CPUs or GPUs for each of them."""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from quire.client.ray_actor import EngineActor
from quire.core.errors import DoesNotFit, Unavailable, Unsupported
from quire.core.ray_names import NAMESPACE

log = logging.getLogger("quire.engine")

CONNECT_TIMEOUT = 5.0  # seconds that the head of a cluster has to answer


class RayCluster:
    """The cluster of RAY_ADDRESS, or the one that this machine is a node of."""

    def __init__(self, num_engines: int, threads: int | None, uses_gpu: bool) -> None:
        """`threads`: CPUs of each engine; None: as many as all can have. `uses_gpu`: each has a GPU."""
        self._num_engines, self._threads, self._uses_gpu = num_engines, threads, uses_gpu
        self._joining: asyncio.Task[None] | None = None
        self._joined = False  # by this object, and not by the program before
        self.address = ""  # of this machine, as the nodes see it
        self.cpus = 0  # of each engine
        self.engines_per_node = 1  # at most

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
        each = engine_share(amounts, self._num_engines, 1 if self._uses_gpu else self._threads, resource)
        self.cpus = each if not self._uses_gpu else self._threads or 1
        self.engines_per_node = max(amount // each for amount in amounts)

    def _connect(self) -> list[dict[str, Any]]:
        """In a thread: it takes a second or two. -> the nodes"""
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

    def new_actor(self) -> Any:
        """Ask for an actor on a node that has room; it comes when there is one."""
        import ray

        return (
            ray.remote(EngineActor)
            .options(
                num_cpus=self.cpus,
                num_gpus=1 if self._uses_gpu else 0,
                max_concurrency=2,
                scheduling_strategy="SPREAD",
            )
            .remote()
        )

    def kill(self, actor: Any) -> None:
        import ray

        ray.kill(actor)

    async def leave(self) -> None:
        if self._joined:
            import ray

            self._joined = False
            await asyncio.to_thread(ray.shutdown)


def engine_share(amounts: Sequence[int], num_engines: int, wanted: int | None, resource: str) -> int:
    """CPUs or GPUs of each engine on nodes that have `amounts`: those wanted, or the most that all can have."""
    sizes = [wanted] if wanted is not None else range(max(amounts, default=0), 0, -1)
    for size in sizes:
        if sum(amount // size for amount in amounts) >= num_engines:
            return size
    least = wanted or 1
    fits = sum(amount // least for amount in amounts)
    raise DoesNotFit(
        f"data_parallel_size is {num_engines}, with {least} {resource}s for each engine, and the {len(amounts)} nodes "
        f"of the Ray cluster have {', '.join(map(str, amounts)) or 'none'}",
        f"use data_parallel_size {fits}" if fits else "add nodes, or give fewer threads",
    )


def result_of(reference: Any) -> "asyncio.Future[Any]":
    """What a method of an actor returns, on the event loop."""
    return asyncio.wrap_future(reference.future())


def check_reachable(address: str) -> None:
    """Ray itself takes minutes to give an address up. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split("\n\n")[0].split())[:300]
