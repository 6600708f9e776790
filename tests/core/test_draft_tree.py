"""Trees of draft tokens: what is kept of them, and what is accepted."""

import pytest

from quire.core.draft_tree import (
    ROOT,
    DraftTree,
    accepted_path,
    ancestor_words,
    compared_levels,
    depths,
    path_to,
    without_chain,
)

#        root -> 5 -> 7 -> 9        node: 0  1  2     tokens by node: 5 6 7 8 9 7
#             -> 6 -> 8 | 7                1 -> 3 | 5
TREE = DraftTree([5, 6, 7, 8, 9, 7], [ROOT, ROOT, 0, 1, 2, 1])


def test_nodes_know_their_depth_and_their_ancestors() -> None:
    assert depths(TREE.parents) == [1, 1, 2, 2, 3, 2]
    assert [path_to(TREE.parents, node) for node in (0, 4, 5)] == [[0], [0, 2, 4], [1, 5]]
    words = ancestor_words(TREE.parents)
    assert [f"{word:b}" for word in words] == ["1", "11", "101", "1011", "10101", "101011", "1000101"]
    assert words[1:] == [1 | sum(2 << n for n in path_to(TREE.parents, node)) for node in range(6)]


def test_tokens_are_followed_from_child_to_child() -> None:
    def accepted(*tokens: int) -> list[int]:
        return accepted_path(TREE.tokens, TREE.parents, tokens)

    assert accepted(5, 7, 9, 1) == [0, 2, 4]
    assert accepted(6, 7, 9) == [1, 5]  # 9 follows the other 7
    assert accepted(7, 5) == accepted() == []
    assert accepted_path([5, 6], [], [5, 6, 7]) == [0, 1] and accepted_path([5, 6], [], [6]) == []
    assert accepted_path([], [], [3]) == []


def test_sampled_tokens_tell_of_every_node_that_could_follow() -> None:
    def compared(*tokens: int) -> list[tuple[list[int], int | None]]:
        return list(compared_levels(TREE.tokens, TREE.parents, tokens))

    assert compared(6, 7, 1) == [([0, 1], 1), ([3, 5], 5)]  # nothing was proposed behind
    assert compared(6, 1, 9) == [([0, 1], 1), ([3, 5], None)]
    assert compared(1) == [([0, 1], None)] and compared() == []
    assert list(compared_levels([1, 2], [], [1, 2, 3])) == [([0], 0), ([1], 1)]


def test_parts_of_a_tree_are_trees() -> None:
    assert TREE.keep([1, 3, 5]) == DraftTree([6, 8, 7], [ROOT, 0, 0])
    assert TREE.keep([0, 2, 4]) == DraftTree([5, 7, 9]) == TREE.first_branch()
    assert DraftTree([4, 3]).keep([0]) == DraftTree([4]) and DraftTree([4, 3]).first_branch() == DraftTree([4, 3])
    assert DraftTree([]).first_branch() == TREE.keep([]) == DraftTree([])
    sure = DraftTree(TREE.tokens, TREE.parents, [0.6, 0.3, 0.5, 0.4, 0.2, 0.1])
    assert sure.keep([1, 5]) == DraftTree([6, 7], [], [0.3, 0.1])
    for count in range(7):
        sure.keep(range(count)).check()
    assert without_chain([ROOT, 0, 1]) == without_chain([]) == [] and without_chain([ROOT, ROOT]) == [ROOT, ROOT]


@pytest.mark.parametrize("parents", [[ROOT], [ROOT, 1], [0, 0], [ROOT, -2]])
def test_what_is_no_tree_is_noticed(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        DraftTree([1, 2], parents, [0.5, 0.5]).check()
    with pytest.raises(AssertionError, match="2 nodes and 0 confidences"):
        DraftTree([1, 2], [ROOT, ROOT]).check()
