"""The name of a prefix block beyond the pool: a hash of its cache namespace and of all tokens up to its end.

The first bytes stand for the tenant alone, so that what a tenant has stored can be found and forgotten."""

from array import array
from hashlib import blake2b
from pathlib import Path

BlockKey = bytes
TENANT_BYTES = 8
PATH_BYTES = 16
STATE_MARK = b"s"  # behind the key of a block: the state after it
PAGE_MARK = b"w"  # behind the key of a block: its window page
ABOUT_FILE = "model.json"  # in a folder of blocks: what they are of, for people


def tenant_digest(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=TENANT_BYTES).digest()


def root_key(tenant: str, salt: str, adapter: str) -> BlockKey:
    """The key that the first block of a namespace continues. `adapter` stands for what a LoRA adapter computes, and
    not for its name, which another adapter may have after a restart."""
    path = blake2b(digest_size=PATH_BYTES)
    for part in (tenant, salt, adapter):
        encoded = part.encode()
        path.update(len(encoded).to_bytes(8, "little") + encoded)
    return tenant_digest(tenant) + path.digest()


def child_key(parent: BlockKey, tokens: tuple[int, ...]) -> BlockKey:
    """The key of the block with these tokens behind the block `parent`."""
    return parent[:TENANT_BYTES] + blake2b(parent + array("q", tokens).tobytes(), digest_size=PATH_BYTES).digest()


def state_key(block: BlockKey) -> BlockKey:
    """The key of the model's state after a block."""
    return block + STATE_MARK


def is_state(key: BlockKey) -> bool:
    return key[TENANT_BYTES + PATH_BYTES :] == STATE_MARK


def page_key(block: BlockKey) -> BlockKey:
    """The key of the window page of a block."""
    return block + PAGE_MARK


def is_page(key: BlockKey) -> bool:
    return key[TENANT_BYTES + PATH_BYTES :] == PAGE_MARK


def is_state_file(path: Path) -> bool:
    """Whether a file is named by the key of a state."""
    return path.stem[2 * PATH_BYTES :] == STATE_MARK.hex()


def is_page_file(path: Path) -> bool:
    """Whether a file is named by the key of a window page."""
    return path.stem[2 * PATH_BYTES :] == PAGE_MARK.hex()
