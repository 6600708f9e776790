"""A request that has ended is freed at once: what is left to the garbage collector holds other requests up."""

import asyncio
import gc
import signal

import httpx
import pytest
import uvloop

from gateway.gateways import SECONDS, answers, streams, upstreams
from quire.gateway.config_file import parse_config
from quire.gateway.exchange import Exchange
from quire.gateway.serve import serve_gateway


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_exchanges_are_freed_without_the_garbage_collector(stream: bool) -> None:
    with upstreams(streams("a", "b") if stream else answers()) as [worker]:
        assert uvloop.run(_num_left(worker.url, {"model": "m", "messages": [], "stream": stream})) == 0


async def _num_left(worker: str, body: dict[str, object]) -> int:
    """Exchanges that are still there after some requests."""
    ready = asyncio.get_running_loop().create_future()
    config = parse_config(f'port = 0\nadmin_port = 0\n[[workers]]\nurl = "{worker}"'.encode(), "gateway.toml")
    serving = asyncio.create_task(serve_gateway(config, on_ready=lambda url, _: ready.set_result(url)))
    try:
        await asyncio.wait([ready, serving], timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        url = f"{ready.result()}/v1/chat/completions"
        gc.collect()
        gc.disable()
        async with httpx.AsyncClient(timeout=SECONDS) as http:
            for _ in range(5):
                assert (await http.post(url, json=body)).status_code == 200
        return sum(isinstance(each, Exchange) for each in gc.get_objects())
    finally:
        gc.enable()
        gc.unfreeze()
        if ready.done():
            signal.raise_signal(signal.SIGTERM)  # the gateway's handler drains it
        await asyncio.wait_for(serving, SECONDS)
