"""Models with recurrent states that ranks compute together: a rank has its heads of every state; the same bits."""

from pathlib import Path

import pytest

from engine.test_kv_tiers import always_fetch
from engine.test_state_slots import PROMPTS, bits, few_blocks_and_drafts_change_nothing, hybrid, mamba
from models import test_mamba
from models.checking import TINY, random_model
from quire import LLM
from quire.ops.ranks.cuts import RankIndex
from ranks.rank_threads import InRanks

assert always_fetch and hybrid and mamba  # fixtures


def test_a_rank_has_its_heads_of_every_state(tmp_path: Path) -> None:
    config, options = test_mamba.CASES["nemotron-h"]
    random_model(config(**{**TINY, **options}), seed=1).save_pretrained(tmp_path)
    specs = [rank.cache.own.spec.states for rank in InRanks("native", tmp_path, 3).ranks]
    assert [states.shape for states in specs] == [(2, 16, 24), (2, 16, 24), (4, 16, 24)]
    assert sum(states.conv_channels for states in specs) == 8 * 24 + 2 * 4 * 16


@pytest.mark.parametrize(
    ("heads", "groups", "size", "expected"),
    [
        (8, 4, 2, [(0, 4, 0, 2), (4, 4, 2, 2)]),
        (8, 1, 2, [(0, 4, 0, 1), (4, 4, 0, 1)]),
        (8, 2, 3, [(0, 2, 0, 1), (2, 2, 0, 1), (4, 4, 1, 1)]),
        (8, 0, 2, [(0, 8, 0, 0), (0, 8, 0, 0)]),  # heads that take key heads in turn
        (2, 2, 3, [(0, 2, 0, 2)] * 3),  # fewer heads than ranks
    ],
)
def test_heads_of_a_recurrence_are_divided_with_the_groups_they_read(
    heads: int, groups: int, size: int, expected: list[tuple[int, ...]]
) -> None:
    ranges = [RankIndex(rank, size).state_heads(heads, groups) for rank in range(size)]
    assert [(one.first, one.count, one.first_kv, one.num_kv) for one in ranges] == expected


@pytest.mark.parametrize("model", ["hybrid", "mamba"])
def test_processes_swap_their_parts_of_a_state_and_roll_drafts_back(model: str, request: pytest.FixtureRequest) -> None:
    few_blocks_and_drafts_change_nothing(request.getfixturevalue(model), tensor_parallel_size=2)


@pytest.mark.usefixtures("always_fetch")
def test_a_restarted_engine_finds_the_states_of_all_ranks(mamba: Path, tmp_path: Path) -> None:
    prompts = [prompt * 3 for prompt in PROMPTS[:3]]
    expected = [bits(LLM(mamba, enable_prefix_caching=False, max_model_len=512), [prompt])[0] for prompt in prompts]
    hits = []
    for _ in range(2):
        llm = LLM(mamba, tensor_parallel_size=2, kv_disk_path=str(tmp_path), max_model_len=512)
        assert bits(llm, prompts) == expected
        llm.engine.save_blocks()
        hits.append(llm.engine.stats().tiers["disk"].hits)
        llm.engine.stop()
    assert hits[0] == 0 < hits[1]
