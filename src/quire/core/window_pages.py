"""Window pages: the keys and values of layers with a sliding window, in models whose other layers see everything.

A block has its part of the other layers for as long as a sequence or the prefix tree has the block. Its part of the
layers with a window is in a page, which goes back to a pool of its own when the window has passed."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many

from quire.core.block_pool import BlockPool
from quire.core.plan import StepPlan
from quire.core.prefix_tree import PrefixNode, PrefixTree
from quire.core.sequence import Sequence
from quire.core.sliding_window import SlidingWindow

NO_PAGE = -1


class PageIndex:
    """Which block a page belongs to: a `BlockIndex`. A page without a sequence is kept if its block is in the tree and
    all of its tokens are computed."""

    has_gaps = True

    def __init__(self, num_pages: int, num_blocks: int, tree: PrefixTree) -> None:
        self._tree = tree
        self.page_of = [NO_PAGE] * num_blocks
        self.block_of = [-1] * num_pages
        self.partial: set[int] = set()  # pages with tokens that are not computed

    def __contains__(self, page: int) -> bool:
        return page not in self.partial and self.block_of[page] in self._tree

    def attach(self, block: int, page: int) -> None:
        self.page_of[block], self.block_of[page] = page, block
        self.partial.add(page)

    def remove(self, page: int) -> None:
        if (block := self.block_of[page]) >= 0:
            self.page_of[block] = NO_PAGE
        self.block_of[page] = -1
        self.partial.discard(page)

    def belongs_to(self, page: int, tenant: str) -> bool:
        return self._tree.belongs_to(self.block_of[page], tenant)

    def walk(self) -> Iterator[PrefixNode]:
        return iter(())


class WindowPages:
    """Pages 0 .. num_pages, counted by reference.

    A sequence holds the pages of the blocks that its next token or the step in flight reads or writes,
    `Sequence.pages`. There are enough for `max_num_seqs` sequences and the tokens of a step, so that none ever waits
    for a page. What is left keeps windows of prefixes: where a prompt ends, where prompts branch, then others."""

    def __init__(
        self, num_pages: int, num_blocks: int, tree: PrefixTree, window: SlidingWindow, num_needed: int
    ) -> None:
        """`num_needed`: pages that running sequences hold at most."""
        assert num_pages >= num_needed, f"{num_pages} window pages, and running sequences need {num_needed}"
        self.window = window
        self.index = PageIndex(num_pages, num_blocks, tree)
        self.pool = BlockPool(num_pages, self.index)
        self._size = window.block_size
        self._grown: list[Sequence] = []  # sequences whose last run was a chunk
        self._copied: list[int] = []  # pages that the plan in the making copies, or that was made last
        self.window_kept: Callable[[PrefixNode], None] | None = None  # set where pages go beyond the pool
        self._tree = tree
        tree.removed = self._forget

    def begin_plan(self) -> None:
        """Give back what chunks have passed, and pages that were copied."""
        for seq in self._grown:
            if seq.num_indexed >= self._prompt_end(seq):
                self._note_window(seq, self._prompt_end(seq))
            self.free_behind(seq)
        self._release(self._copied)
        self._grown, self._copied = [], []

    # ---- prefix hits and forks

    def num_usable(self, path: Many[PrefixNode], start: int) -> int:
        """How many blocks of `path`, which begins at block `start`, a sequence can start behind: the last window before
        is there. It has the pages of the blocks before `start`."""
        return self.window.num_usable([not self.is_computed(node.block) for node in path], start)

    def is_computed(self, block: int) -> bool:
        """Whether a block has a page with all of its tokens."""
        page = self.index.page_of[block]
        return page != NO_PAGE and page not in self.index.partial

    def hold_window(self, seq: Sequence) -> None:
        """Hold what a sequence that shares blocks reads next. What is missing is swapped in."""
        for i in range(self.window.first_block(seq.num_computed), seq.num_computed // self._size):
            if i not in seq.pages and i < len(seq.block_table) and self.is_computed(seq.block_table[i]):
                self._hold(seq, i)

    def can_fork(self, owner: Sequence, num_tokens: int) -> bool:
        """Whether `owner` still holds the window before a position."""
        return all(i in owner.pages for i in self._read_at(num_tokens))

    def fork(self, seq: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Share the window before a position; the page of a partial block is copied with the block."""
        for i in self._read_at(num_tokens):
            self.pool.hold(parent.pages[i])
            seq.pages[i] = parent.pages[i]

    def _read_at(self, num_tokens: int) -> range:
        """The blocks with the window before the token at this position."""
        return range(self.window.first_block(num_tokens), -(-num_tokens // self._size))

    def _hold(self, seq: Sequence, i: int) -> None:
        page = self.index.page_of[seq.block_table[i]]
        self.pool.hold(page)
        seq.pages[i] = page

    # ---- plan

    def copy(self, seq: Sequence, i: int, plan: StepPlan) -> None:
        """Copy the page of a partial block that `seq` shares into one for its own block `i`."""
        source = seq.pages.pop(i)
        self._copied.append(source)
        self._attach(seq, i, plan)
        plan.page_copies.append((source, seq.pages[i]))

    def wants(self, seq: Sequence, i: int) -> bool:
        """Whether a swapped-out sequence needs the page of its block `i` from the host."""
        return i >= self.window.first_block(seq.num_computed) and i not in seq.pages

    def cover(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Let the blocks with the window of the next token, and with those up to `num_tokens`, have pages."""
        first, last = self.window.first_block(seq.num_computed), -(-num_tokens // self._size)
        for i in range(first, last):
            if i not in seq.pages:
                assert i * self._size >= seq.num_computed, f"block {i} has computed tokens, and no page with them"
                self.page_for(seq, i, plan)
        for i in range(first, num_tokens // self._size):
            self.index.partial.discard(seq.pages[i])
        if num_tokens - seq.num_computed > 1:
            self._grown.append(seq)

    def page_for(self, seq: Sequence, i: int, plan: StepPlan) -> int:
        """Hold the page of block `i`: its own, which may be partial, or a new one."""
        if self.index.page_of[seq.block_table[i]] == NO_PAGE:
            self._attach(seq, i, plan)
        else:
            self._hold(seq, i)
        return seq.pages[i]

    def _attach(self, seq: Sequence, i: int, plan: StepPlan) -> None:
        page, block = self.pool.take(), seq.block_table[i]
        self.index.attach(block, page)
        seq.pages[i] = page
        plan.pages.append((block, page))

    # ---- give back

    def free_behind(self, seq: Sequence) -> None:
        """Release the pages behind the window of the next token. Plans in flight may still read them: the next owner
        writes into them in a later plan."""
        first = self.window.first_block(min(seq.num_computed, seq.num_known))  # drafts in flight may be rejected
        for i in [i for i in seq.pages if i < first]:
            page = seq.pages.pop(i)
            self._release([page])
            if self._is_kept(seq, i):
                self._note_kept(seq.block_table[i])
            else:
                self.pool.evict_first(page)

    def _is_kept(self, seq: Sequence, i: int) -> bool:
        """Whether a block is in a window that other prompts are likely to start from."""
        ends = self._prompt_end(seq), seq.branch // self._size
        return any(self.window.first_block(end * self._size) <= i < end for end in ends)

    def _prompt_end(self, seq: Sequence) -> int:
        """The blocks that the same prompt can start behind."""
        return (seq.group.num_prompt - 1) // self._size

    def drop_behind(self, seq: Sequence, num_blocks: int) -> None:
        """Release the pages of all but the first `num_blocks` blocks."""
        self._release([seq.pages.pop(i) for i in [i for i in seq.pages if i >= num_blocks]])

    def release(self, seq: Sequence) -> None:
        self._note_window(seq, seq.num_indexed)  # what comes next of a conversation starts there
        self.drop_behind(seq, 0)
        seq.branch = 0

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.pool.release([page])
            if not self.pool.refs[page] and page not in self.index:
                self.index.remove(page)

    def _note_window(self, seq: Sequence, num_blocks: int) -> None:
        """Note the window of a token behind the first `num_blocks`, which are in the tree, if `seq` still has them."""
        if self.window_kept is not None:
            for block in seq.block_table[self.window.first_block(num_blocks * self._size) : num_blocks]:
                self._note_kept(block)

    def _note_kept(self, block: int) -> None:
        if self.window_kept is not None and self.is_computed(block) and (node := self._tree.find(block)):
            self.window_kept(node)

    def _forget(self, node: PrefixNode) -> None:
        """A block leaves the tree: its page is free."""
        if (page := self.index.page_of[node.block]) != NO_PAGE:
            self.pool.forget(page)
            self.index.remove(page)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant, given all live sequences."""
        self.pool.check()
        refs: Counter[int] = Counter(self._copied)
        for seq in sequences:
            name = f"sample {seq.sample} of {seq.group.id}"
            refs.update(seq.pages.values())
            if seq.host_blocks:
                continue
            for i in self._read_at(seq.num_computed):
                assert i in seq.pages, f"{name} reads block {i} in its window, and holds no page of it"
            for i, page in seq.pages.items():
                if i < len(seq.block_table):
                    assert self.index.page_of[seq.block_table[i]] == page, f"{name} holds a page of another block"
        for page, count in enumerate(self.pool.refs):
            assert count == refs[page], f"window page {page} has {count} references, and {refs[page]} are known"
        for page, block in enumerate(self.index.block_of):
            assert block < 0 or self.index.page_of[block] == page, f"page {page} and block {block} disagree"
            assert block >= 0 or page not in self.pool.cached, f"page {page} is cached and belongs to no block"
