"""The invariants of the scheduler's memory, each with a sentence."""

from collections import Counter
from collections.abc import Sequence as Many

from quire.core.kv_blocks import KVBlocks
from quire.core.plan import StepPlan
from quire.core.sequence import Sequence


def check_memory(kv: KVBlocks, sequences: Many[Sequence], plans: Many[StepPlan]) -> None:
    """Assert every invariant of memory, given all live sequences and all plans in flight."""
    kv.tree.check()
    kv.pool.check()
    kv.host.check()
    refs: Counter[int] = Counter()
    host_refs, slot_refs = Counter[int](), Counter[int]()
    for part in (kv.tiers, kv.remote, kv.sends):
        if part is not None:
            _count_host(kv, part.check(), host_refs, slot_refs)
    if kv.sends:
        refs.update(kv.sends.held_blocks())
    if kv.states:
        kv.states.check(sequences, plans, slot_refs)
    if kv.pages:
        kv.pages.check(sequences)
    for plan in plans:
        host_refs.update(plan.swapped_host_blocks)
    for seq in sequences:
        refs.update(seq.held_blocks)
        host_refs.update(seq.host_blocks.values())
        if seq.copy_from is not None:
            refs[seq.copy_from] += 1
        _check_table(kv, seq)
    for block, count in enumerate(kv.pool.refs):
        assert count == refs[block], f"block {block} has {count} references and is in {refs[block]} block tables"
    for block, count in enumerate(kv.host.refs):
        assert count == host_refs[block], f"host block {block} has {count} references, and {host_refs[block]} are known"


def _count_host(kv: KVBlocks, ids: Counter[int], host_refs: Counter[int], slot_refs: Counter[int]) -> None:
    """Divide references to the host between blocks and slots."""
    for host, count in ids.items():
        is_slot = host >= kv.host.num_blocks
        (slot_refs if is_slot else host_refs)[host - kv.host.num_blocks if is_slot else host] += count


def _check_table(kv: KVBlocks, seq: Sequence) -> None:
    name = f"sample {seq.sample} of {seq.group.id}"
    if seq.host_blocks:
        assert not seq.block_table, f"{name} is swapped out and holds blocks"
        return
    covered = len(seq.block_table) + (seq.copy_from is not None)
    filled = -(-seq.num_computed // kv.block_size)
    assert covered == (max(filled, seq.num_indexed) if kv.computes_again else filled), (
        f"{name} has {seq.num_computed} tokens computed and {covered} blocks"
    )
    assert seq.num_freed <= kv.window.first_block(seq.num_computed), f"{name} has freed blocks that it will read"
    node, i = seq.node, seq.num_indexed
    while i > seq.num_freed:
        i -= 1
        assert node is not None and node.block == seq.block_table[i], f"{name} does not hold the chain of its node"
        node = node.parent
    full = max(seq.num_computed // kv.block_size, seq.num_indexed)
    for block in seq.block_table[full:]:
        assert kv.pool.refs[block] == 1 + _copied(seq), f"{name} writes into block {block}, which is shared"


def _copied(seq: Sequence) -> int:
    """How many sequences of its group have yet to copy the block that `seq` writes into."""
    return sum(other.copy_from == seq.block_table[-1] for other in seq.group.live)
