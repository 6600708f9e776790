"""Window pages beyond the pool, beside the blocks they belong to: on disk.

A block is saved without its window page. The pages that prompts are likely to start from are saved by themselves: those
of the window before the end of a prompt, before a place where prompts branch, and before the end of an answer; written
through, all of them. A waiting sequence gets the deepest window that there is, and the blocks up to it."""

from collections import Counter
from collections.abc import Sequence as Many
from math import ceil

from quire.core.block_keys import BlockKey, page_key
from quire.core.block_pool import BlockPool
from quire.core.host_index import HostIndex
from quire.core.kv_tiers import MAX_FETCHES, MAX_IDLE_SAVES, MAX_SAVES, BlockStore, FetchInFlight, KVTiers, TierOptions
from quire.core.plan import StepPlan
from quire.core.prefix_tree import EVICTED, PrefixNode, PrefixTree
from quire.core.sequence import Sequence
from quire.core.window_pages import WindowPages


class PageTiers(KVTiers):
    """`KVTiers` of a model with window pages. The store knows the page of a host block by a number of its own, behind
    those of all host blocks."""

    def __init__(
        self,
        pages: WindowPages,
        page_bytes: int,
        tree: PrefixTree,
        host: BlockPool,
        index: HostIndex,
        store: BlockStore | None,
        options: TierOptions,
    ) -> None:
        assert not options.keep, "host blocks keep whole blocks"
        super().__init__(tree, host, index, store, options)
        self._pages, self._blocks_a_page = (
            pages,
            page_bytes / max(options.block_bytes, 1),
        )  # host blocks that have the bytes of a page
        self._unsaved_pages: dict[PrefixNode, None] = {}
        self._saving_pages: set[int] = set()  # host blocks whose page the store writes
        pages.window_kept = self._note_page

    # ---- pool to disk

    def note_full(self, block: int, node: PrefixNode) -> None:
        super().note_full(block, node)
        if self._write_through:
            self._note_page(node)  # the sequence may go on at another engine from here

    def _note_page(self, node: PrefixNode) -> None:
        if node.key:
            self._unsaved_pages[node] = None

    @property
    def has_unsaved(self) -> bool:
        return super().has_unsaved or (bool(self._unsaved_pages) and self._can_save)

    @property
    def waits_to_save(self) -> bool:
        return super().waits_to_save or (bool(self._unsaved_pages) and bool(self._saving or self._saving_pages))

    def save(self, plan: StepPlan, is_idle: bool) -> None:
        super().save(plan, is_idle)
        cost = self._save_seconds(is_idle) * self._blocks_a_page
        most = MAX_IDLE_SAVES if is_idle else MAX_SAVES
        while self._unsaved_pages and self._can_save and len(plan.page_swap_out) < most:
            if cost and self._saving_seconds <= 0:
                return
            self._save_next(plan, cost)

    def _save_next(self, plan: StepPlan, cost: float) -> None:
        """Swap out the page that waits longest, if it is still there and not on disk yet."""
        assert self._store is not None
        node = next(iter(self._unsaved_pages))
        del self._unsaved_pages[node]
        key = page_key(node.key)
        if node.block == EVICTED or not self._pages.is_computed(node.block) or self._store.find([key]):
            return
        self._saving_seconds -= cost
        host = self._host.take()
        plan.page_swap_out.append((self._pages.index.page_of[node.block], host))
        self._host.hold(host)
        self._saving_pages.add(host)
        plan.saves.append((self._host.num_blocks + host, key))

    def saved(self, host: int) -> None:
        if host < self._host.num_blocks:
            super().saved(host)
            return
        self._saving_pages.remove(host - self._host.num_blocks)
        self._release_host([host])

    # ---- disk to host

    def _plan_fetch(
        self, seq: Sequence, path: Many[PrefixNode], held: list[int], stored: list[BlockKey], plan: StepPlan
    ) -> bool:
        """All from the first block without a page in the deepest window on, or behind the pool; or nothing."""
        assert self._store is not None and not held
        if len(stored) > self._host.num_available and self._fetched_keys:
            return True  # other fetches will end and give host blocks back
        del stored[self._host.num_available :]
        keys, have = [*(node.key for node in path), *stored], self._pages.num_usable(path, 0)
        depth, first = self._find_window(path, keys, have)
        wanted = keys[first:depth]
        windowed = [page_key(key) for key in keys[max(first, self._first_of_window(depth)) : depth]]
        seconds, size = self._seconds_to_compute(depth - have), self._tree.block_size
        num_read = len(wanted) + ceil(len(windowed) * self._blocks_a_page)
        pays = depth > have and (not seconds or self._store.read_seconds(num_read) <= seconds)
        is_fetched = any(key in self._fetched_keys for key in (*wanted, *windowed))
        if not pays or is_fetched or len(wanted) > self._host.num_available:
            waits = pays and bool(self._fetched_keys)  # for another sequence that fetches it, or gives host blocks back
            seq.num_fetches = seq.num_fetches if waits else MAX_FETCHES
            return waits
        blocks = [(key, self._host.take()) for key in wanted]
        pages = [(key, host) for key, (_, host) in zip(reversed(windowed), reversed(blocks), strict=False)]
        for _, host in pages:
            self._host.hold(host)
        numbered = [(key, self._host.num_blocks + host) for key, host in pages]
        self._fetch(seq, [*blocks, *numbered], plan, depth * size, (depth - have) * size, seconds)
        return True

    def _first_of_window(self, depth: int) -> int:
        """The first block that a sequence reads that starts behind `depth` blocks."""
        return self._pages.window.first_block(depth * self._tree.block_size)

    def _find_window(self, path: Many[PrefixNode], keys: Many[BlockKey], have: int) -> tuple[int, int]:
        """-> the deepest place whose window is there, in the pool or on disk, and the first block to read for it. What
        is behind `have` blocks can be started from without reading."""
        depth = len(keys)
        while depth > have:
            first = missing = min(depth, len(path))
            for i in range(depth - 1, self._first_of_window(depth) - 1, -1):
                if i < len(path) and self._pages.is_computed(path[i].block):
                    continue
                missing = i
                if not self._are_stored([page_key(keys[i])]):
                    break
                first = min(first, i)
            else:
                in_pool = keys[first : min(depth, len(path))]  # read with their pages, which their blocks lack
                if self._are_stored([*in_pool, *map(page_key, in_pool)]):
                    return depth, first
            depth = missing  # every window that ends behind that block needs its page
        return have, have

    def _are_stored(self, keys: Many[BlockKey]) -> bool:
        assert self._store is not None
        return len(self._store.find(keys)) == len(keys)

    def _is_continued(self, seq: Sequence, path: Many[PrefixNode]) -> bool:
        """Whether the pool also has the pages that precede them in the window."""
        if not super()._is_continued(seq, path):
            return False
        size = self._tree.block_size
        in_pool = range(self._first_of_window(seq.num_arrived // size), seq.first_arrived(size))
        return all(self._pages.is_computed(path[i].block) for i in in_pool)

    def _take_arrived(self, ended: FetchInFlight, blocks: list[int], missing: int) -> None:
        if missing:  # pages come last: without them nothing can be started from
            self._release_host(blocks)
            self.drop_arrived(ended.seq)
            return
        num_blocks = len(self._blocks_of(ended.fetch))
        self._release_host(blocks[num_blocks:])
        super()._take_arrived(ended, blocks[:num_blocks], 0)
        ended.seq.num_gained = ended.num_gained

    def _release_host(self, ids: list[int]) -> None:
        self._host.release([self._host_block(host) for host in ids])

    def _host_block(self, number: int) -> int:
        """The host block of a number, which may be that of the block's window page."""
        return number - self._host.num_blocks if number >= self._host.num_blocks else number

    # ---- seen from outside

    def _num_hits(self, seq: Sequence) -> int:
        """Also tokens of blocks in the pool whose pages were gone."""
        return seq.num_gained if seq.num_arrived else 0

    def check(self) -> Counter[int]:
        refs = Counter[int](self._saving_pages)
        for number, count in super().check().items():
            refs[self._host_block(number)] += count
        return refs
