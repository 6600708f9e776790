"""Sliding-window attention: which blocks of a sequence are no longer read, and how many it holds."""

from collections.abc import Sequence


class SlidingWindow:
    """Every layer sees the last `size` tokens, the newest included; with size 0, all.

    The last full block whose tokens are all known is kept even if no token reads it: it is the position of the sequence
    in the prefix tree. With async scheduling, the `ahead` newest tokens are not known."""

    def __init__(self, size: int, block_size: int, *, max_chunk: int, ahead: int = 0) -> None:
        self.size = size
        self.block_size = block_size
        self._ahead = ahead
        self._reach = max(size - 1, block_size + ahead)  # tokens kept before the next one
        self._span = -(-(self._reach + max_chunk + block_size - 1) // block_size)  # blocks of these and a chunk

    def first_block(self, num_computed: int) -> int:
        """The first block that a sequence needs to continue at position `num_computed`."""
        return max(num_computed - self._reach, 0) // self.block_size if self.size else 0

    def num_needed(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Blocks that so many sequences hold at most, with the tokens of the steps in flight."""
        span = -(-(self._reach + self._ahead + 2 * self.block_size - 1) // self.block_size)  # while it decodes
        return max_num_seqs * span + (1 + self._ahead) * -(-max_num_batched_tokens // self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most while it grows to `num_tokens` in chunks."""
        whole = -(-num_tokens // self.block_size)
        return min(whole, self._span) if self.size else whole

    def num_usable(self, evicted: Sequence[bool], start: int) -> int:
        """The length of the longest part of a path whose last window is not evicted. The path begins at block `start`;
        the blocks before it are held. `evicted`: for each block of the path."""
        longest, last_evicted = 0, -1
        for depth, is_evicted in enumerate(evicted, start + 1):
            if is_evicted:
                last_evicted = depth - 1
            if last_evicted < self.first_block(depth * self.block_size):
                longest = depth - start
        return longest
