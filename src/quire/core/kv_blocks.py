"""The KV blocks of sequences: prefix hits, forks, allocation, swap out and in, release.

Nothing here decides who runs. The scheduler asks only for blocks that it knows are free."""

from quire.core.block_pool import BlockPool
from quire.core.checkpoint_slots import CheckpointSlots
from quire.core.host_index import HostIndex
from quire.core.kv_sends import BlockSender, KVSends
from quire.core.kv_tiers import BlockStore, KVTiers, TierOptions
from quire.core.page_tiers import PageTiers
from quire.core.plan import StepPlan
from quire.core.prefix_tree import EVICTED, NO_STATE, PrefixNode, PrefixTree
from quire.core.remote_prefills import PrefillEngines, RemotePrefills
from quire.core.sequence import NEVER, NULL_BLOCK, Sequence
from quire.core.sliding_window import SlidingWindow
from quire.core.state_slots import StateSlots, swapped_states
from quire.core.state_tiers import StateTiers
from quire.core.window_pages import NO_PAGE, WindowPages


class KVBlocks:
    """The blocks of the device and of the host, and the prefixes they hold.

    A block that is written has one reference: a fork shares full blocks and copies the one it writes into. A plan has a
    reference to each host block that it swaps to or from, until its output comes."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        window: SlidingWindow,
        prefix_caching: bool,
        store: BlockStore | None = None,
        offload: bool = False,
        block_bytes: int = 0,
        prefill_engines: PrefillEngines | None = None,
        block_sender: BlockSender | None = None,
        has_states: bool = False,
        num_slots: int = 0,
        max_num_seqs: int = 0,
        num_host_slots: int = 0,
        host_slot_bytes: int = 0,
        num_checkpoint_slots: int = 0,
        small_host_slots: bool = False,
        num_pages: int = 0,
        page_window: SlidingWindow | None = None,
        max_num_batched_tokens: int = 0,
        page_bytes: int = 0,
        write_through: bool = False,
    ) -> None:
        self.block_size = window.block_size
        self._has_states = has_states
        self.window = window
        self.tree = PrefixTree(self.block_size, has_gaps=window.size > 0)
        self.pool = BlockPool(num_blocks, self.tree)
        self.prefix_caching = prefix_caching
        self.states: StateSlots | None = None
        if num_slots:
            slots = num_slots, max_num_seqs, self.tree, num_host_slots, num_host_blocks
            self.states = (
                CheckpointSlots(*slots, num_checkpoint_slots, small_host_slots)
                if num_checkpoint_slots
                else StateSlots(*slots)
            )
        self.pages: WindowPages | None = None
        if page_window is not None:
            assert not (num_slots or has_states or window.size or offload or prefill_engines or block_sender)
            num_needed = page_window.num_needed(max_num_seqs, max_num_batched_tokens)
            self.pages = WindowPages(num_pages, num_blocks, self.tree, page_window, num_needed)
        self.computes_again = bool(self.states or self.pages)  # tokens of shared blocks, for states or pages
        index = HostIndex()
        self.host = BlockPool(num_host_blocks, index)
        has_tiers = prefix_caching and not self.tree.has_gaps and (store is not None or offload)
        self.tiers: KVTiers | None = None
        if has_tiers:
            given = self.tree, self.host, index, store
            options = TierOptions(keep=offload, block_bytes=block_bytes, write_through=write_through)
            if self.states:
                self.tiers = StateTiers(self.states, host_slot_bytes, *given, options)
            elif self.pages:
                self.tiers = PageTiers(self.pages, page_bytes, *given, options)
            else:
                self.tiers = KVTiers(*given, options)
        self.remote: RemotePrefills | None = None
        if prefill_engines is not None:
            pools = self.pool, self.host, self.states
            self.remote = RemotePrefills(self.tree, *pools, prefill_engines, prefix_caching)
        self.sends: KVSends | None = None
        if block_sender:
            self.sends = KVSends(self.pool, self.host, self.states, self.block_size, block_sender)

    def num_new_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """New blocks that `seq` needs until its block table covers `num_tokens`."""
        return -(-num_tokens // self.block_size) - len(seq.block_table)

    def num_reserved_blocks(self, seq: Sequence) -> int:
        """New blocks that `seq` needs until all its known tokens are computed, less those that its window frees."""
        num_held = len(seq.block_table) - seq.num_freed
        return min(self.num_new_blocks(seq, seq.num_known), self.window.max_blocks(seq.num_known) - num_held)

    def free_behind_window(self, seq: Sequence) -> None:
        """Release the blocks behind the window of the next token. Plans in flight may still read them: the next owner
        writes into them in a later plan."""
        if self.pages:
            self.pages.free_behind(seq)
        first = self.window.first_block(seq.num_computed)
        if first <= seq.num_freed:
            return
        self.pool.release(seq.block_table[seq.num_freed : first])
        seq.block_table[seq.num_freed : first] = [NULL_BLOCK] * (first - seq.num_freed)
        seq.num_freed = first
        if seq.num_indexed <= first:  # the sequence left the tree earlier: its node may be removed now
            seq.node, seq.num_indexed, seq.index_at = None, 0, NEVER

    def try_admit(self, seq: Sequence, num_reserved: int) -> bool:
        """Attach the computed prefix of a waiting sequence if its other known tokens fit beside `num_reserved` blocks;
        else change nothing and return False."""
        before = seq.host_blocks, seq.num_computed, seq.num_arrived, seq.num_fetched, seq.num_remote
        host_state = seq.host_state
        self.attach_prefix(seq)
        if self.num_reserved_blocks(seq) + num_reserved <= self.pool.num_available:
            return True
        if host_state >= 0:
            seq.host_state = NO_STATE  # it keeps it
        if before[0]:
            seq.host_blocks = {}  # it keeps them
        self.release(seq)
        seq.host_state = host_state
        seq.host_blocks, seq.num_computed, seq.num_arrived, seq.num_fetched, seq.num_remote = before
        return False

    def attach_prefix(self, seq: Sequence) -> None:
        """Give a sequence without blocks what is already computed of it: a fork of its group's prompt, or a prefix hit.
        All of these blocks are shared. What follows on the host is swapped in when blocks are allocated for it."""
        owner = seq.group.prompt_owner
        seq.index_at = self.block_size if self.prefix_caching else NEVER
        if self.states:
            seq.num_computed = max(seq.num_computed, seq.num_arrived)
            self.extend_prefix_hit(seq)
            if self.tiers:
                self.tiers.hold_host_hits(seq, len(seq.block_table))
        elif owner is not None and self._can_fork(seq, owner) and not self._prefers_tree(seq):
            self.fork(seq, owner, seq.group.num_prompt - 1)
        else:
            if self.pages:
                seq.num_computed = max(seq.num_computed, seq.num_arrived)
            self.extend_prefix_hit(seq)
            if self.tiers:
                self.tiers.hold_host_hits(seq, len(seq.block_table))
            seq.num_computed = max(seq.num_computed, seq.num_arrived)
        self.free_behind_window(seq)  # a sequence that was swapped out has no blocks behind its window

    def extend_prefix_hit(self, seq: Sequence) -> None:
        """Extend a block table that ends with a full block by the blocks that follow in the tree.

        The last known token is always computed, since its logits are needed. If it is the last token of a full block,
        the hit is one block shorter. A shared block may not be written. It cannot be copied either: a sequence of this
        step may be the one that fills it, and the copies of a step come first."""
        group = seq.group
        if seq.index_at == NEVER or group.computes_prompt_logprobs(seq):
            return
        last = (len(seq.tokens) - 1) // self.block_size
        start = seq.num_indexed
        if self.computes_again and len(seq.block_table) > start:
            return  # the sequence has blocks of its own that wait for a token to be known
        path = self._match(seq, seq.node, start, last)
        if path:
            seq.node = path[-1]
            seq.num_indexed += len(path)
            seq.index_at += len(path) * self.block_size
            if not self.computes_again:
                seq.num_computed = max(seq.num_computed, seq.num_indexed * self.block_size)
            self.free_behind_window(seq)
            if self.tiers:
                self.tiers.touch(path)
        for node in path[len(seq.block_table) - start :]:
            self.pool.hold(node.block)
            seq.block_table.append(node.block)
        if self.states:
            self._find_checkpoint(seq, self.states)
        if self.pages:
            self._find_window(seq, self.pages)

    def _find_window(self, seq: Sequence, pages: WindowPages) -> None:
        """Continue behind the last window that is there among the blocks of `seq` that are in the tree. It holds the
        blocks behind that, too, and computes their tokens again for the layers with a window."""
        start = seq.num_computed // self.block_size
        if seq.num_indexed > start:
            seq.branch = seq.num_indexed * self.block_size
        path: list[PrefixNode] = []
        node = seq.node
        for _ in range(seq.num_indexed - start):
            assert node is not None
            path.append(node)
            node = node.parent
        if count := pages.num_usable(path[::-1], start):
            seq.num_computed = (start + count) * self.block_size
        pages.hold_window(seq)

    def _find_checkpoint(self, seq: Sequence, states: StateSlots) -> None:
        """Continue from the last checkpoint among the blocks of `seq` that are in the tree. It holds the blocks behind
        that, too, and computes their tokens again for the states: keys and values come out as they are."""
        seq.branch = seq.num_indexed * self.block_size
        node, num_tokens = seq.node, seq.branch
        while num_tokens > seq.num_computed:
            assert node is not None
            if node.state != NO_STATE:
                states.start_from(seq, node)
                seq.num_computed = num_tokens
                return
            node, num_tokens = node.parent, num_tokens - self.block_size

    def _match(self, seq: Sequence, node: PrefixNode | None, start: int, stop: int) -> list[PrefixNode]:
        """The nodes below `node` along blocks start .. stop of `seq`, up to the last from which it can continue."""
        path = self.tree.match(seq.group.namespace, node, seq.tokens, start, stop)
        if (start + len(path)) * self.block_size < seq.group.num_encoder_slots:
            return []  # the input of an encoder is computed whole, or not at all
        if not self.tree.has_gaps:
            return path
        return path[: self.window.num_usable([node.block == EVICTED for node in path], start)]

    def _can_fork(self, seq: Sequence, owner: Sequence) -> bool:
        """Whether `owner` still holds the window before the prompt's end. A swapped-out `seq` is swapped in instead."""
        point = self._fork_point(seq.group.num_prompt - 1)
        if self.pages and not self.pages.can_fork(owner, point):
            return False
        return not seq.host_blocks and owner.num_freed <= self.window.first_block(point)

    def _fork_point(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` of a sequence another can start from. The state in a partial block is that
        after its owner's last token: with states, only full blocks are shared."""
        return num_tokens // self.block_size * self.block_size if self._has_states else num_tokens

    def _prefers_tree(self, seq: Sequence) -> bool:
        """Whether a prefix hit covers at least the prompt of `seq`."""
        num_full = (seq.group.num_prompt - 1) // self.block_size + 1
        last = (len(seq.tokens) - 1) // self.block_size
        if last < num_full:
            return False
        path = self._match(seq, None, 0, num_full)
        return (self.pages.num_usable(path, 0) if self.pages else len(path)) == num_full

    def fork(self, seq: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Start from the first `num_tokens` of `parent`: full blocks are shared, a partial one is copied on write, or
        computed again where it holds a state, which `parent` may have changed by then."""
        num_tokens = num_tokens if self.states else self._fork_point(num_tokens)
        full = num_tokens // self.block_size
        seq.num_freed = self.window.first_block(num_tokens)
        seq.block_table = [NULL_BLOCK] * seq.num_freed + parent.block_table[seq.num_freed : full]
        for block in seq.held_blocks:
            self.pool.hold(block)
        if num_tokens % self.block_size:
            seq.copy_from = parent.block_table[full]
            self.pool.hold(seq.copy_from)
        seq.num_computed = num_tokens
        if self.pages:
            self.pages.fork(seq, parent, num_tokens)
        if self.states:
            self.states.fork(seq, parent)
        self._copy_tree_position(seq, parent, full)

    def move_blocks(self, seq: Sequence, parent: Sequence) -> None:
        """Continue in the blocks of `parent`, which ends."""
        seq.block_table, parent.block_table = parent.block_table, []
        seq.num_freed, parent.num_freed = parent.num_freed, 0
        seq.pages, parent.pages = parent.pages, {}
        seq.num_computed = parent.num_computed
        if self.states:
            self.states.move(seq, parent)
        self._copy_tree_position(seq, parent, len(seq.block_table))

    def _copy_tree_position(self, seq: Sequence, parent: Sequence, num_blocks: int) -> None:
        """Start at the node of `parent` that covers `num_blocks`; outside of the tree if `parent` left it before."""
        seq.node, seq.num_indexed = parent.node, parent.num_indexed
        while seq.num_indexed > num_blocks:
            assert seq.node is not None
            seq.node, seq.num_indexed = seq.node.parent, seq.num_indexed - 1
        if seq.num_indexed == 0:
            seq.node = None  # not the root: roots come and go
        left = parent.index_at == NEVER and seq.num_indexed < num_blocks
        if seq.num_indexed <= seq.num_freed:
            seq.node, seq.num_indexed = None, 0  # behind the window, as in `free_behind_window`
        seq.index_at = NEVER if left or not self.prefix_caching else (seq.num_indexed + 1) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Let the block table cover `num_tokens`. The plan copies or swaps in what a new block starts with."""
        first = len(seq.block_table)
        grown = self.pool.grow(seq.block_table, -(-num_tokens // self.block_size))
        assert grown, "the scheduler allocates more blocks than are free"
        if seq.copy_from is not None:
            plan.copies.append((seq.copy_from, seq.block_table[first]))
            self.pool.release([seq.copy_from])
            seq.copy_from = None
            if self.pages:
                self.pages.copy(seq, first, plan)
        if seq.host_blocks:
            self._swap_in(seq, first, plan)
        if self.pages:
            self.pages.cover(seq, num_tokens, plan)
        if self.states and seq.host_state >= 0:
            self._swap_state_in(seq, self.states, plan)

    def _swap_in(self, seq: Sequence, first: int, plan: StepPlan) -> None:
        """Swap in the blocks from `first` on, which are whole on the host, and window pages. The blocks before are
        shared; their pages may be gone."""
        hosts, seq.host_blocks = seq.host_blocks, {}
        for i, host in hosts.items():
            if self.pages and self.pages.wants(seq, i):
                self.host.hold(host)
                plan.page_swap_in.append((host, self.pages.page_for(seq, i, plan)))
            if i >= first:
                plan.swap_in.append((host, seq.block_table[i]))
            else:
                self.host.release([host])

    def _swap_state_in(self, seq: Sequence, states: StateSlots, plan: StepPlan) -> None:
        """Unless the tree has a later checkpoint by now. What came from beyond the slots is one, too."""
        if states.can_continue(seq):
            states.drop_host_state(seq)
            return
        states.swap_in(seq, plan)
        if seq.num_arrived:
            self.index_full_blocks(seq)
            states.attach_arrived(seq)

    def index_full_blocks(self, seq: Sequence) -> None:
        """Insert the blocks that the planned step fills into the tree, if all their tokens are known.

        A step writes the keys and values of a layer before it reads any there: a sequence that is planned later in the
        same step may already share these blocks."""
        size, num_ready = self.block_size, min(seq.num_computed, seq.num_known)
        namespace, tokens, block_table, insert = seq.group.namespace, seq.tokens, seq.block_table, self.tree.insert
        while seq.index_at <= num_ready:
            i = seq.num_indexed
            node = insert(namespace, seq.node, tuple(tokens[i * size : (i + 1) * size]), block_table[i])
            if node is None:  # another block has these tokens, and `seq` does not hold it: it leaves the tree
                seq.index_at = NEVER
                break
            if self.tiers and seq.index_at > seq.num_arrived:
                self.tiers.note_full(node.block, node)
            if self.pages:
                self.pages.index.partial.discard(seq.pages.get(i, NO_PAGE))
            seq.node = node
            seq.num_indexed = i + 1
            seq.index_at += size
        if self.states and seq.checkpoints:
            self.states.attach(seq)

    def roll_back(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` computed tokens: the drafts behind them were rejected."""
        if self.states and seq.draft_states:
            self.states.settle_drafts(seq, num_tokens)
        if seq.num_computed <= num_tokens:
            return
        seq.num_computed = num_tokens
        num_blocks = -(-num_tokens // self.block_size)
        if self.pages:
            self.pages.drop_behind(seq, num_blocks)
        self.pool.release(seq.block_table[num_blocks:])
        del seq.block_table[num_blocks:]
        seq.num_blocks_sent = min(seq.num_blocks_sent, num_blocks)
        for index in [index for index in seq.host_blocks if index >= num_blocks]:
            self.host.release([seq.host_blocks.pop(index)])

    def can_swap_out(self, seq: Sequence) -> bool:
        if self.states and not self.states.can_swap_out(seq):
            return False
        return 0 < len(self._computed_blocks(seq)) <= self.host.num_available

    def _computed_blocks(self, seq: Sequence) -> list[int]:
        """The blocks that it reads. With states, it may share more than it has computed."""
        return seq.block_table[seq.num_freed : -(-seq.num_computed // self.block_size)]

    def swap_out(self, seq: Sequence, plan: StepPlan) -> None:
        """Move the computed blocks to the host, and release them on the device."""
        num_computed = seq.num_computed
        blocks = self._computed_blocks(seq)
        host = {i: self.host.take() for i, _ in enumerate(blocks, seq.num_freed)}
        for block, host_block in zip(blocks, host.values(), strict=True):
            self.host.hold(host_block)
            plan.swap_out.append((block, host_block))
        for i in seq.pages.keys() & host.keys():
            self.host.hold(host[i])
            plan.page_swap_out.append((seq.pages[i], host[i]))
        host_state = self.states.swap_out(seq, plan) if self.states else NO_STATE
        self.release(seq)
        seq.host_blocks, seq.host_state, seq.num_computed = host, host_state, num_computed

    def release(self, seq: Sequence) -> None:
        """Release all blocks of a sequence, on the device and on the host; none of its tokens is computed any more."""
        if seq.copy_from is not None:
            self.pool.release([seq.copy_from])
            seq.copy_from = None
        if self.states:
            self.states.release(seq)
        if self.pages:
            self.pages.release(seq)
        self.pool.release(seq.held_blocks)
        self.host.release(list(seq.host_blocks.values()))
        if seq.fetch is not None and self.tiers:
            self.tiers.forget_fetch(seq)
        if seq.prefill is not None and self.remote:
            self.remote.forget(seq)
        seq.block_table, seq.num_freed, seq.host_blocks = [], 0, {}
        seq.node, seq.num_indexed, seq.index_at = None, 0, NEVER
        seq.num_computed = seq.num_blocks_sent = seq.num_arrived = seq.num_fetched = seq.num_remote = 0

    def release_swapped(self, plan: StepPlan) -> None:
        """The output of a plan has come: its swaps are done."""
        self.host.release(plan.swapped_host_blocks)
        if self.states:
            self.states.host.release(swapped_states(plan))
