"""How engines hand KV blocks to each other: what `kv_transfer_config` says, in vLLM's names."""

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

from quire.core.errors import BadRequest, Unsupported
from quire.core.nearest import nearest

TransferRole = Literal["kv_producer", "kv_consumer"]

NAME = "kv_transfer_config"
ROLES = ("kv_producer", "kv_consumer")
DEFAULT_IP, DEFAULT_PORT = "127.0.0.1", 14579
UNIX = "unix:"  # before the path of a socket on this machine
MAX_PEERS = 64
EXAMPLE = """'{"kv_role": "kv_consumer", "kv_ip": "10.0.0.1", "kv_port": 14579}'"""
_KEYS = ("kv_role", "kv_ip", "kv_port", "kv_peers", "kv_parallel_size")
# vLLM's keys without effect: the values that they may have, and why. None: any
_OTHER_KEYS: dict[str, tuple[tuple[str | None, ...], str] | None] = {
    "kv_connector": None,
    "kv_connector_extra_config": None,
    "kv_buffer_device": None,
    "kv_buffer_size": None,
    "kv_rank": None,
    "engine_id": None,
    "enable_permute_local_kv": None,
    "kv_load_failure_policy": (("recompute",), "blocks that do not arrive are computed: recompute"),
    "kv_connector_module_path": ((None,), "no code is loaded from outside"),
}
_STORES = (  # vLLM's connectors that keep blocks for the same engine
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MooncakeStoreConnector",
    "FlexKVConnectorV1",
    "ExampleConnector",
    "SharedStorageConnector",
)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    role: TransferRole
    addresses: tuple[str, ...]  # HOST:PORT, or unix:PATH. A producer listens on one, a consumer connects to each
    parallel: int = 1  # engines that share the memory of this machine
    without_effect: tuple[str, ...] = ()  # keys of vLLM's that were given

    @property
    def is_producer(self) -> bool:
        return self.role == "kv_producer"


def read_transfer_config(text: str) -> TransferConfig:
    """Raises BadRequest that names the key."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise _wrong("is no JSON object")
    for key, value in given.items():
        _check_key(key, value)
    role = given.get("kv_role")
    if role not in ROLES:
        raise BadRequest(f"{NAME} has the kv_role {role!r}", _instead(given), param=NAME)
    parallel = _number(given, "kv_parallel_size", 1, 1, 1024)
    without_effect = tuple(key for key in given if key in _OTHER_KEYS)
    return TransferConfig(cast(TransferRole, role), _addresses(given, role), parallel, without_effect)


def _addresses(given: dict[str, Any], role: str) -> tuple[str, ...]:
    peers = given.get("kv_peers")
    if peers is None:
        ip = given.get("kv_ip", DEFAULT_IP)
        if not isinstance(ip, str) or not ip:
            raise _wrong(f"has the kv_ip {ip!r}")
        return (f"{ip}:{_number(given, 'kv_port', DEFAULT_PORT, 0, 65535)}",)
    if "kv_ip" in given or "kv_port" in given:
        raise _wrong("has kv_peers, and kv_ip or kv_port too: they mean the same")
    if not isinstance(peers, list) or not 1 <= len(peers) <= (1 if role == "kv_producer" else MAX_PEERS):
        raise _wrong("has kv_peers that are no list of addresses (one for a kv_producer)")
    for peer in peers:
        if not (isinstance(peer, str) and (peer.startswith(UNIX) or peer.rpartition(":")[2].isdecimal())):
            raise _wrong(f"has the peer {peer!r}, and an address is HOST:PORT")
    return tuple(peers)


def _instead(given: dict[str, Any]) -> str:
    """The hint of an error that names a role which Quire does not have."""
    if given.get("kv_connector") in _STORES:
        extra = given.get("kv_connector_extra_config")
        num_bytes = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) else None
        size = f"{num_bytes / 2**30:.4g}" if isinstance(num_bytes, int | float) else "GIB"
        return (
            f"{given['kv_connector']} keeps blocks for this engine: leave {NAME} out, and give kv_disk_path DIR, or "
            f"on a GPU kv_offloading_size {size}, or both"
        )
    if given.get("kv_role") == "kv_both":
        return (
            "one server is the kv_producer, and computes prompts; another is the kv_consumer, and answers: clients "
            "ask that one. Prefixes beyond the KV cache are kept with kv_disk_path and kv_offloading_size"
        )
    return f"choose from {', '.join(ROLES)}"


def _check_key(key: str, value: Any) -> None:
    if key in _KEYS:
        return
    if key not in _OTHER_KEYS:
        near = nearest(key, _KEYS)
        hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(_KEYS)}"
        raise BadRequest(f"{NAME} has `{key}`", hint, param=NAME)
    known = _OTHER_KEYS[key]
    if known is not None and value not in known[0]:
        raise Unsupported(f"{NAME} has {key} {value!r}", known[1])


def _number(given: dict[str, Any], key: str, default: int, least: int, most: int) -> int:
    value = given.get(key, default)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)  # vLLM's own examples write kv_port as text
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(f"has the {key} {value!r}, and it is a number from {least} to {most}")
    return value


def _wrong(what: str) -> BadRequest:
    return BadRequest(f"{NAME} {what}", f"write {EXAMPLE}", param=NAME)
