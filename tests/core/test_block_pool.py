"""Blocks and the prefixes in them."""

import pytest

from quire.core.block_pool import BlockPool
from quire.core.prefix_tree import PrefixTree

HERE = ("", "")


def make(num_blocks: int) -> tuple[BlockPool, PrefixTree]:
    tree = PrefixTree(2)
    return BlockPool(num_blocks, tree), tree


def enter(tree: PrefixTree, table: list[int], tokens: list[int]) -> None:
    node = None
    for i, block in enumerate(table):
        node = tree.insert(HERE, node, tuple(tokens[2 * i : 2 * i + 2]), block)
        assert node is not None


def test_a_table_grows_whole_or_not_at_all() -> None:
    pool, _ = make(4)
    table: list[int] = []
    assert pool.grow(table, 3) and len(table) == 3
    assert not pool.grow(table, 5) and len(table) == 3 and pool.num_available == 1
    pool.release(table)
    pool.check()
    assert pool.num_available == 4


def test_a_block_is_free_when_the_last_holder_lets_go() -> None:
    pool, _ = make(2)
    block = pool.take()
    pool.hold(block)
    pool.release([block])
    assert pool.num_available == 1
    pool.release([block])
    assert pool.num_available == 2
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_blocks_without_a_prefix_are_taken_first_then_suffixes_of_the_oldest() -> None:
    pool, tree = make(5)
    old, new = [pool.take(), pool.take()], [pool.take(), pool.take()]
    enter(tree, old, [1, 2, 3, 4])
    enter(tree, new, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    pool.check()
    assert [pool.take() for _ in range(5)] == [4, old[1], old[0], new[1], new[0]]
    tree.check()
    assert len(tree) == 0


def test_a_hit_makes_a_prefix_young_again() -> None:
    pool, tree = make(2)
    first, second = pool.take(), pool.take()
    enter(tree, [first], [1, 2])
    enter(tree, [second], [3, 4])
    pool.release([first])
    pool.release([second])
    (node,) = tree.match(HERE, None, [1, 2, 9], 0, 1)
    pool.hold(node.block)
    pool.release([node.block])
    assert pool.take() == second


def test_the_tree_keeps_the_first_of_equal_blocks_and_tells_namespaces_apart() -> None:
    tree = PrefixTree(2)
    assert tree.insert(HERE, None, (1, 2), 0) is not None
    assert tree.insert(HERE, None, (1, 2), 1) is None
    assert tree.insert(("other", ""), None, (1, 2), 1) is not None
    assert [node.block for node in tree.match(HERE, None, [1, 2, 3, 4], 0, 2)] == [0]
    assert [node.block for node in tree.match(("other", ""), None, [1, 2], 0, 1)] == [1]
    assert tree.match(("", "salt"), None, [1, 2], 0, 1) == []
    tree.remove(1)
    tree.check()


def test_a_block_with_followers_cannot_be_evicted() -> None:
    tree = PrefixTree(2)
    enter(tree, [0, 1], [1, 2, 3, 4])
    with pytest.raises(AssertionError, match="before the blocks that follow it"):
        tree.remove(0)


def test_prefixes_of_one_tenant_are_forgotten_and_held_ones_stay() -> None:
    pool, tree = make(6)
    node = None
    tables: list[list[int]] = [[], [], []]
    for table, tenant in zip(tables, ("a", "b", "a"), strict=True):
        assert pool.grow(table, 2)
        node = None
        for block in table:
            node = tree.insert((tenant, "", ""), node, (block, block), block)
    pool.release(tables[0])
    pool.release(tables[1])  # the third is still held
    pool.drop_cached("a")
    pool.check()
    tree.check()
    assert pool.num_cached == 2 and pool.num_available == 4, "the other tenant's prefix is still there"
    assert tree.holds("a"), "a running sequence has it"
    pool.release(tables[2])
    pool.drop_cached("a")
    assert not tree.holds("a") and tree.holds("b") and len(tree) == 2
