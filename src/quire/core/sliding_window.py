"""Attention that looks back a fixed number of tokens: which blocks nobody reads any more, and how many are held."""

from collections.abc import Sequence

from quire.core.prefix_tree import EVICTED, PrefixNode


class SlidingWindow:
    """What every layer sees: the last `size` tokens, the newest included; with size 0, all.

    The last full block whose tokens are all known is kept even if nobody reads it: a sequence stands in the prefix tree
    by it. With plans `ahead`, the newest tokens are not known."""

    def __init__(self, size: int, block_size: int, *, max_chunk: int, ahead: int = 0) -> None:
        self.size = size
        self.block_size = block_size
        self._reach = max(size - 1, block_size + ahead)  # tokens that are kept behind the next one
        self._span = -(-(self._reach + max_chunk + block_size - 1) // block_size)  # blocks, wherever they begin

    def first_block(self, num_computed: int) -> int:
        """The first block that a sequence needs which goes on at position `num_computed`."""
        return max(num_computed - self._reach, 0) // self.block_size if self.size else 0

    def max_blocks(self, num_tokens: int) -> int:
        """What a sequence holds at most while it grows to `num_tokens`, by chunks."""
        whole = -(-num_tokens // self.block_size)
        return min(whole, self._span) if self.size else whole

    def num_usable(self, path: Sequence[PrefixNode], start: int) -> int:
        """How many nodes of a path can be gone on from: those that the next token needs have blocks. The path is one
        of blocks `start` and following; what comes before them is there."""
        best, last_gone = 0, -1
        for depth, node in enumerate(path, start + 1):
            if node.block == EVICTED:
                last_gone = depth - 1
            if last_gone < self.first_block(depth * self.block_size):
                best = depth - start
        return best
