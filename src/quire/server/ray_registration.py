"""Tells the gateways of a Ray cluster that this server is there.

What they see is the name of an actor. A process of its own holds it: a process that is connected to Ray ends when the
cluster does, and a server goes on."""

import asyncio
import logging
import os
import sys

from quire.core.ray_names import NAMESPACE, WORKER

log = logging.getLogger("quire.server")

RETRY_SECONDS = 5.0


class RayRegistration:
    """Holds while it is open, however often the cluster comes and goes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "quire.server.ray_registration", self._url),
                stdin=asyncio.subprocess.PIPE,  # it ends when this process does
                stdout=2,
                start_new_session=True,
            )
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            log.warning("the Ray cluster does not know this server (status %d): it is told again", status)
            await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class RegisteredServer:
    """An actor of which the name is all that matters."""


def main(url: str) -> int:
    """Until stdin is closed."""
    import ray

    ray.init(os.environ.get("RAY_ADDRESS", "auto"), namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    host = ray.util.get_node_ip_address()
    reached = url.replace("//0.0.0.0:", f"//{host}:").replace("//[::]:", f"//{host}:")
    server = ray.remote(RegisteredServer).options(name=f"{WORKER}{reached}", num_cpus=0, get_if_exists=False).remote()
    sys.stdin.read()
    ray.kill(server)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
