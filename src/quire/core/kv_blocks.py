"""A sequence's tokens in blocks: found again in the prefix tree, forked from a sibling, swapped out and in, given back.

Whoever runs decides nothing here; the scheduler asks only for what it knows there is room for."""

from collections import Counter
from collections.abc import Iterable

from quire.core.block_pool import BlockPool
from quire.core.plan import StepPlan
from quire.core.prefix_tree import PrefixNode, PrefixTree
from quire.core.sequence import NEVER, NULL_BLOCK, Sequence
from quire.core.sliding_window import SlidingWindow


class KVBlocks:
    """The blocks of the device and of the host, and the prefixes in them.

    A block that is written has one reference: a fork shares full blocks and copies the one it would write into."""

    def __init__(self, num_blocks: int, num_host_blocks: int, window: SlidingWindow, prefix_caching: bool) -> None:
        self.block_size = window.block_size
        self.window = window
        self.tree = PrefixTree(self.block_size, has_gaps=window.size > 0)
        self.pool = BlockPool(num_blocks, self.tree)
        self.prefix_caching = prefix_caching
        self.num_host_blocks = num_host_blocks
        self._free_host = list(range(num_host_blocks - 1, -1, -1))

    def num_new_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """New blocks it takes until the table covers `num_tokens`."""
        return -(-num_tokens // self.block_size) - len(seq.block_table)

    def num_reserved_blocks(self, seq: Sequence) -> int:
        """New blocks it takes at most until all that is known is computed, those given back on the way counted off."""
        num_held = len(seq.block_table) - seq.num_freed
        return min(self.num_new_blocks(seq, seq.num_known), self.window.max_blocks(seq.num_known) - num_held)

    def free_behind_window(self, seq: Sequence) -> None:
        """Give back what is behind the window of the next token. Plans under way may still read it: whoever gets these
        blocks writes into them later."""
        first = self.window.first_block(seq.num_computed)
        if first <= seq.num_freed:
            return
        self.pool.release(seq.block_table[seq.num_freed : first])
        seq.block_table[seq.num_freed : first] = [NULL_BLOCK] * (first - seq.num_freed)
        seq.num_freed = first
        if seq.num_indexed <= first:  # it left the tree before; the way to where it stood may vanish
            seq.node, seq.num_indexed, seq.index_at = None, 0, NEVER

    def try_admit(self, seq: Sequence, num_promised: int) -> bool:
        """Give a waiting sequence what already exists of it, if there is room for the rest of what is known of it
        beside `num_promised` blocks; else change nothing and return False."""
        host, num_computed = seq.host_blocks, seq.num_computed
        self.attach_prefix(seq)
        if self.num_reserved_blocks(seq) + num_promised <= self.pool.num_available:
            return True
        seq.host_blocks = {}
        self.release(seq)
        seq.host_blocks, seq.num_computed = host, num_computed
        return False

    def attach_prefix(self, seq: Sequence) -> None:
        """Give a sequence without blocks what already exists of it; takes nothing that is not shared."""
        source = seq.group.prompt_owner
        seq.index_at = self.block_size if self.prefix_caching else NEVER
        if source is not None and self._can_fork(seq, source) and not self._prefers_tree(seq):
            self.fork(seq, source, seq.group.num_prompt - 1)
        else:
            self.extend_prefix_hit(seq)
        self.free_behind_window(seq)  # one that was swapped out has no blocks behind its window

    def extend_prefix_hit(self, seq: Sequence) -> None:
        """Extend a table that ends with a full block by the blocks that follow in the tree.

        At least the last known token is left to compute, since its logits are wanted. When only that one would be left
        in a full block, the hit is one block shorter: the block is shared, so it may not be written, and it cannot be
        copied either, since a sequence of this very step may be the one that fills it and copies come first."""
        group = seq.group
        if seq.index_at == NEVER or group.computes_prompt_logprobs(seq):
            return
        last = (len(seq.tokens) - 1) // self.block_size
        start = seq.num_indexed
        path = self._match(seq, seq.node, start, last)
        if path:
            seq.node = path[-1]
            seq.num_indexed += len(path)
            seq.index_at += len(path) * self.block_size
            seq.num_computed = max(seq.num_computed, seq.num_indexed * self.block_size)
            self.free_behind_window(seq)
        for node in path[len(seq.block_table) - start :]:
            self.pool.hold(node.block)
            seq.block_table.append(node.block)

    def _match(self, seq: Sequence, node: PrefixNode | None, start: int, stop: int) -> list[PrefixNode]:
        """The blocks that follow `node` along the tokens of `seq`, as far as one can go on from them."""
        path = self.tree.match(seq.group.namespace, node, seq.tokens, start, stop)
        if (start + len(path)) * self.block_size < seq.group.num_encoder_slots:
            return []  # what is missing of a source cannot be computed alone
        return path[: self.window.num_usable(path, start)] if self.tree.has_gaps else path

    def _can_fork(self, seq: Sequence, source: Sequence) -> bool:
        """Whether `source` still has what follows the prompt's window; one on the host goes on from there."""
        return not seq.host_blocks and source.num_freed <= self.window.first_block(seq.group.num_prompt - 1)

    def _prefers_tree(self, seq: Sequence) -> bool:
        """Whether the tree has at least as much of `seq` as its prompt."""
        num_full = (seq.group.num_prompt - 1) // self.block_size + 1
        last = (len(seq.tokens) - 1) // self.block_size
        return last >= num_full and len(self._match(seq, None, 0, num_full)) == num_full

    def fork(self, seq: Sequence, source: Sequence, num_tokens: int) -> None:
        """Begin with the first `num_tokens` of `source`: full blocks are shared, the next one is copied later."""
        full = num_tokens // self.block_size
        seq.num_freed = self.window.first_block(num_tokens)
        seq.block_table = [NULL_BLOCK] * seq.num_freed + source.block_table[seq.num_freed : full]
        for block in seq.held_blocks:
            self.pool.hold(block)
        if num_tokens % self.block_size:
            seq.copy_from = source.block_table[full]
            self.pool.hold(seq.copy_from)
        seq.num_computed = num_tokens
        self._copy_tree_position(seq, source, full)

    def move_blocks(self, seq: Sequence, source: Sequence) -> None:
        """Continue in the very blocks of `source`, which ends."""
        seq.block_table, source.block_table = source.block_table, []
        seq.num_freed, source.num_freed = source.num_freed, 0
        seq.num_computed = source.num_computed
        self._copy_tree_position(seq, source, len(seq.block_table))

    def _copy_tree_position(self, seq: Sequence, source: Sequence, num_blocks: int) -> None:
        """The same place in the tree; a source that has left it within these blocks leads out of the tree."""
        seq.node, seq.num_indexed = source.node, source.num_indexed
        while seq.num_indexed > num_blocks:
            assert seq.node is not None
            seq.node, seq.num_indexed = seq.node.parent, seq.num_indexed - 1
        if seq.num_indexed == 0:
            seq.node = None  # not a root: those come and go
        left = source.index_at == NEVER and seq.num_indexed < num_blocks
        if seq.num_indexed <= seq.num_freed:
            seq.node, seq.num_indexed = None, 0  # behind the window: see slide
        seq.index_at = NEVER if left or not self.prefix_caching else (seq.num_indexed + 1) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Let the table cover `num_tokens`; what a new block must begin with is copied or swapped in by the plan."""
        first = len(seq.block_table)
        grown = self.pool.grow(seq.block_table, -(-num_tokens // self.block_size))
        assert grown, "the scheduler promised more blocks than there are"
        if seq.copy_from is not None:
            plan.copies.append((seq.copy_from, seq.block_table[first]))
            self.pool.release([seq.copy_from])
            seq.copy_from = None
        if seq.host_blocks:
            plan.swap_in.extend((host, seq.block_table[i]) for i, host in seq.host_blocks.items() if i >= first)
            self._free_host.extend(seq.host_blocks.values())
            seq.host_blocks = {}

    def index_full_blocks(self, seq: Sequence) -> None:
        """Enter the blocks that the planned step fills, if all of their tokens are known: it writes them in every layer
        before any is read there, so the next sequence of the same plan may already share them."""
        size, num_ready = self.block_size, min(seq.num_computed, seq.num_known)
        while seq.index_at <= num_ready:
            i = seq.num_indexed
            tokens = tuple(seq.tokens[i * size : (i + 1) * size])
            node = self.tree.insert(seq.group.namespace, seq.node, tokens, seq.block_table[i])
            if node is None:  # computed twice: going on below the other's block would need that one held as well
                seq.index_at = NEVER
                return
            seq.node = node
            seq.num_indexed += 1
            seq.index_at += size

    def roll_back(self, seq: Sequence, num_tokens: int) -> None:
        """No more than `num_tokens` of it count as computed: those behind were drafts, and wrong."""
        if seq.num_computed <= num_tokens:
            return
        seq.num_computed = num_tokens
        num_blocks = -(-num_tokens // self.block_size)
        self.pool.release(seq.block_table[num_blocks:])
        del seq.block_table[num_blocks:]
        seq.num_blocks_sent = min(seq.num_blocks_sent, num_blocks)
        for place in [place for place in seq.host_blocks if place >= num_blocks]:
            self._free_host.append(seq.host_blocks.pop(place))

    def can_swap_out(self, seq: Sequence) -> bool:
        return 0 < len(seq.held_blocks) <= len(self._free_host)

    def swap_out(self, seq: Sequence, plan: StepPlan) -> None:
        """Keep what is computed on the host, and give the blocks back."""
        num_computed = seq.num_computed
        host = {i: self._free_host.pop() for i in range(seq.num_freed, len(seq.block_table))}
        plan.swap_out.extend(zip(seq.held_blocks, host.values(), strict=True))
        self.release(seq)
        seq.host_blocks, seq.num_computed = host, num_computed

    def release(self, seq: Sequence) -> None:
        """Give everything back; nothing of the sequence is computed any more."""
        if seq.copy_from is not None:
            self.pool.release([seq.copy_from])
            seq.copy_from = None
        self.pool.release(seq.held_blocks)
        self._free_host.extend(seq.host_blocks.values())
        seq.block_table, seq.num_freed, seq.host_blocks = [], 0, {}
        seq.node, seq.num_indexed, seq.index_at = None, 0, NEVER
        seq.num_computed = seq.num_blocks_sent = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Every invariant of memory, given all sequences that are alive."""
        self.tree.check()
        self.pool.check()
        refs: Counter[int] = Counter()
        host = list(self._free_host)
        for seq in sequences:
            refs.update(seq.held_blocks)
            host.extend(seq.host_blocks.values())
            if seq.copy_from is not None:
                refs[seq.copy_from] += 1
            self._check_table(seq)
        for block, count in enumerate(self.pool.refs):
            assert count == refs[block], f"block {block} has {count} references and stands in {refs[block]} tables"
        assert sorted(host) == list(range(self.num_host_blocks)), "a host block is lost, or given out twice"

    def _check_table(self, seq: Sequence) -> None:
        name = f"sample {seq.sample} of {seq.group.id}"
        if seq.host_blocks:
            assert not seq.block_table, f"{name} is swapped out and holds blocks"
            return
        covered = len(seq.block_table) + (seq.copy_from is not None)
        assert covered == -(-seq.num_computed // self.block_size), (
            f"{name} has {seq.num_computed} tokens computed and {covered} blocks"
        )
        assert seq.num_freed <= self.window.first_block(seq.num_computed), f"{name} has freed what it will read"
        node, i = seq.node, seq.num_indexed
        while i > seq.num_freed:
            i -= 1
            assert node is not None and node.block == seq.block_table[i], f"{name} does not hold the chain of its node"
            node = node.parent
        full = seq.num_computed // self.block_size
        for block in seq.block_table[full:]:
            assert self.pool.refs[block] == 1 + self._copied(seq), f"{name} writes into block {block}, which is shared"

    @staticmethod
    def _copied(seq: Sequence) -> int:
        """How many siblings still wait to copy the block that `seq` writes into."""
        return sum(other.copy_from == seq.block_table[-1] for other in seq.group.live)
