"""`kv_events_config`: where an engine publishes what its prefix cache gains and loses. Keys and defaults are vLLM's."""

import json
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from quire.core.errors import BadRequest, Unsupported
from quire.core.nearest import nearest

OPTION = "kv_events_config"
EXAMPLE = 'write {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
_LOCAL = ("127.", "localhost", "[::1]", "lo:")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # batches that wait for a slow listener; more are lost to it, until it asks for them again
    max_queue_size: int = 100_000  # batches that wait to be published
    topic: str = ""

    @property
    def binds(self) -> bool:
        """Whether the endpoint is listened on. As in vLLM, a wildcard is listened on and any other host is connected
        to; so is this machine listened on."""
        scheme, _, host = self.endpoint.partition("://")
        return scheme in ("ipc", "inproc") or "*" in host or "::" in host or host.startswith(_LOCAL)


def read_kv_events_config(text: str | None) -> KVEventsConfig | None:
    """None: no events are published."""
    given = _read(text)
    known = {spec.name: spec for spec in fields(KVEventsConfig)}
    for name, value in given.items():
        if name not in known:
            near = nearest(name, list(known))
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            raise BadRequest(f"{OPTION} has `{name}`", hint, param=OPTION)
        if problem := _problem(name, value):
            raise BadRequest(f"{OPTION}.{name} is {json.dumps(value)}", problem, param=OPTION)
    config = KVEventsConfig(**given)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if find_spec("zmq") is None:
        raise Unsupported("KV events need pyzmq", "pip install 'quire[events]'")
    return config


def _read(text: str | None) -> dict[str, Any]:
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{OPTION} is not JSON: {error}", EXAMPLE, param=OPTION) from None
    if not isinstance(given, dict):
        raise BadRequest(f"{OPTION} is no JSON object", EXAMPLE, param=OPTION)
    return given


def _problem(name: str, value: object) -> str:
    match name:
        case "enable_kv_cache_events":
            return "" if isinstance(value, bool) else "give true or false"
        case "publisher":
            return "" if value in ("zmq", "null") else "choose from zmq, null"
        case "topic":
            return "" if isinstance(value, str) else "give a text"
        case "endpoint" | "replay_endpoint":
            good = isinstance(value, str) and value.startswith(("tcp://", "ipc://", "inproc://"))
            return (
                "" if good or (value is None and name == "replay_endpoint") else "write tcp://HOST:PORT or ipc://PATH"
            )
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return "" if good else "give a number, at least 1"
