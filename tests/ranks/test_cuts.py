"""What each rank has: all columns together, as even as they can be, and heads whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import BadRequest
from quire.ops.ranks.cuts import RankIndex, check_size


@given(st.integers(1, 3000), st.integers(1, 16))
def test_columns_are_divided_among_ranks_or_not_at_all(total: int, size: int) -> None:
    cuts = [RankIndex(rank, size).even(total) for rank in range(size)]
    if total < size:
        assert all(cut.is_whole for cut in cuts)
        return
    assert [cut.first for cut in cuts] == [0, *(cut.first + cut.count for cut in cuts)][:-1]
    assert cuts[-1].first + cuts[-1].count == total and min(cut.count for cut in cuts) > 0
    assert max(cut.count for cut in cuts) - min(cut.count for cut in cuts) <= 31  # a tile, and a last one not full


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_every_head_is_with_its_kv_head_in_one_rank(kv_heads: int, group: int, data: st.DataObject) -> None:
    heads = kv_heads * group
    size, whole_groups = data.draw(st.integers(1, heads)), data.draw(st.booleans())
    owners: list[int] = []
    for rank in range(size):
        index = RankIndex(rank, size, whole_groups)
        own, kv = index.heads(heads, heads, kv_heads), index.kv_heads(kv_heads, heads, kv_heads)
        assert own.count >= 1 and kv.count >= 1
        sharing = index.sharing(heads, kv_heads)
        assert not (whole_groups and sharing)
        assert sharing or own.count % kv.count == 0, "KV heads are shared by as many query heads each"
        share, skipped = sharing.get("group", own.count // kv.count), sharing.get("skipped", 0)
        for head in range(own.first, own.first + own.count):
            assert head // group == kv.first + (head - own.first + skipped) // share
        owners += range(own.first, own.first + own.count)
    assert owners == list(range(heads))


def test_nine_heads_on_two_ranks_are_five_and_four() -> None:
    parts = [(RankIndex(rank, 2).heads(9, 9, 3), RankIndex(rank, 2).kv_heads(3, 9, 3)) for rank in range(2)]
    assert [(q.first, q.count, kv.first, kv.count) for q, kv in parts] == [(0, 4, 0, 2), (4, 5, 1, 2)]
    assert RankIndex(1, 2).sharing(9, 3) == {"group": 3, "skipped": 1}
    whole = [RankIndex(rank, 2, whole_groups=True).heads(9, 9, 3).count for rank in range(2)]
    assert whole == [3, 6]
    aligned = [RankIndex(rank, 3).heads(32, 32, 8).count for rank in range(3)]  # even ones would be 11, with 4 KV heads
    assert aligned == [8, 12, 12]


def test_more_ranks_than_heads_are_refused() -> None:
    check_size(9, heads=9)
    with pytest.raises(BadRequest, match=r"is 10, and the model has 9 attention heads.*\n.*1 to 9"):
        check_size(10, heads=9)
    with pytest.raises(BadRequest, match=r"is 65, and there are 64 ranks at most.*\n.*1 to 64"):
        check_size(65, heads=128)
