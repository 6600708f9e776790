"""The KV cache in main memory. native/src/ops.h (Pages) describes the layout of a block."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import DoesNotFit, Unsupported
from quire.ops.opset import KV_DTYPES, KVSpec

Bytes = NDArray[np.uint8]

PAGES_SLACK = 64  # bytes that the kernels may read past the last block


class NativeCache:
    """`num_blocks` blocks, and `num_host_blocks` to swap out to. Blocks that were never written take no memory."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> None:
        if spec.dtype not in KV_DTYPES:
            raise Unsupported(f"a KV cache of {spec.dtype}", f"the CPU supports {', '.join(KV_DTYPES)}")
        self.spec = spec
        self.num_blocks = num_blocks
        self.pages = _allocate(num_blocks * spec.block_bytes + PAGES_SLACK)
        self._blocks = self.pages[: num_blocks * spec.block_bytes].reshape(num_blocks, spec.block_bytes)
        self._host = _allocate(num_host_blocks * spec.block_bytes).reshape(num_host_blocks, spec.block_bytes)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy(self._blocks, self._blocks, pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy(self._blocks, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy(self._host, self._blocks, pairs)

    def swapped(self) -> Callable[[], None]:
        return lambda: None  # a swap is done when it returns

    def move_host(self, memory: Bytes) -> None:
        """Keep host blocks in this memory from now on. None may be in use."""
        self._host = memory.reshape(self._host.shape)

    def host_buffers(self, host_block: int) -> list[Bytes]:
        return [self._host[host_block]]


def _allocate(nbytes: int) -> Bytes:
    try:
        return np.empty(nbytes, dtype=np.uint8)
    except MemoryError as error:
        raise DoesNotFit(f"the KV cache needs {nbytes / 2**30:.1f} GiB of address space", "use fewer blocks") from error


def _copy(source: Bytes, target: Bytes, pairs: Sequence[tuple[int, int]]) -> None:
    for src, dst in pairs:
        if not (0 <= src < len(source) and 0 <= dst < len(target)):
            raise ValueError(f"copy of block {src} of {len(source)} to block {dst} of {len(target)}")
        target[dst] = source[src]
