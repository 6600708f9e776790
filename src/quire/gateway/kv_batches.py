"""Batches of KV events as engines publish them, Quire's and vLLM's of all versions: events as maps, or as arrays."""

from dataclasses import dataclass
from typing import Any

import msgspec

POOL = (None, "GPU")  # where blocks lie that a request can share at once; other media are tiers below it
BlockName = int | bytes  # as the engine calls a block

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_FIELDS = {
    "BlockStored": (*_STORED, "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}

_decode = msgspec.msgpack.Decoder().decode


class BadKVBatch(Exception):
    """A batch that is not in the format."""


@dataclass(slots=True)
class BlockStored:
    names: list[BlockName]
    parent: BlockName | None
    tokens: list[int]
    block_size: int
    extra_keys: list[list[Any]]  # by block: what tells it apart from one with the same tokens
    tier: str = ""  # "": the pool


@dataclass(slots=True)
class BlocksKept:
    """Blocks that are known by their names are in a tier below the pool, too."""

    names: list[BlockName]
    tier: str


@dataclass(slots=True)
class BlockRemoved:
    names: list[BlockName]
    tier: str = ""


@dataclass(slots=True)
class AllBlocksCleared:
    pass


BlockEvent = BlockStored | BlocksKept | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class KVBatch:
    time: float
    events: list[BlockEvent]


def decode_batch(payload: bytes) -> KVBatch:
    """Raises BadKVBatch."""
    try:
        batch = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadKVBatch(f"it is not msgpack: {error}") from None
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise BadKVBatch("it is no [time, events]")
    if isinstance(batch[0], bool) or not isinstance(batch[0], int | float):
        raise BadKVBatch("its time is no number")
    return KVBatch(float(batch[0]), [event for raw in batch[1] if (event := _event(raw)) is not None])


def _event(raw: object) -> BlockEvent | None:
    """None: it is about blocks that do not count, or of a kind that is not known."""
    if isinstance(raw, dict):
        kind, given = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind, given = (
            raw[0],
            dict(zip(_FIELDS.get(raw[0], ()) if isinstance(raw[0], str) else (), raw[1:], strict=False)),
        )
    else:
        raise BadKVBatch("an event is neither a map nor an array")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind not in ("BlockStored", "BlockRemoved") or given.get("group_idx"):
        return None
    medium = given.get("medium")
    if not isinstance(medium, str | None):
        raise BadKVBatch("medium is no text")
    tier = "" if medium in POOL else medium or ""
    names = given.get("block_hashes")
    if not isinstance(names, list) or not names or not all(isinstance(name, int | bytes) for name in names):
        raise BadKVBatch("block_hashes is no list of hashes")
    if kind == "BlockRemoved":
        return BlockRemoved(names, tier)
    if tier and not given.get("token_ids"):
        return BlocksKept(names, tier)
    return _stored(names, given, tier)


def _stored(names: list[BlockName], given: dict[str, Any], tier: str) -> BlockStored:
    parent, tokens, block_size = (given.get(name) for name in ("parent_block_hash", "token_ids", "block_size"))
    if not isinstance(parent, int | bytes | None):
        raise BadKVBatch("parent_block_hash is no hash")
    if not isinstance(block_size, int) or not isinstance(tokens, list) or len(tokens) != len(names) * block_size:
        raise BadKVBatch(f"{len(names)} blocks have other than block_size tokens each")
    if not all(isinstance(token, int) and -(1 << 31) <= token < 1 << 31 for token in tokens):
        raise BadKVBatch("token_ids has what is no token")
    lora, extra = given.get("lora_name"), given.get("extra_keys")
    keys: list[list[Any]] = [[] for _ in names]
    if isinstance(extra, list) and len(extra) == len(names):
        keys = [[key for key in each or [] if key != lora] if isinstance(each, list) else [] for each in extra]
    if lora is not None and parent is None and names:
        keys[0] = [f"lora:{lora}", *keys[0]]
    return BlockStored(names, parent, tokens, block_size, keys, tier)
