"""Window pages of a model that several ranks or stages compute: each has the pages of its heads, or of its layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.test_window_pages import BLOCK, LAYER_BYTES, PARAMS, PROMPTS, SHARED, bits, models, pages_of, whole
from quire import LLM
from quire.executors.ranks.messages import RankLoaded
from quire.executors.ranks.sizes import counts, smallest
from quire.ops.kv_spec import KVSpec, WindowSpec
from quire.ops.stages.parts import StagePart
from quire.runtime.kv import KVSize
from trials import LENGTH

assert models and whole  # fixtures

SPEC = KVSpec(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="float16")
WINDOWED = replace(SPEC, windows=WindowSpec((0, 1, 3), 20, 30))


# Two of three stages have layers with a window alone, the last has none.
PARALLEL = [
    pytest.param({"tensor_parallel_size": 2}, 24, 90, id="ranks"),
    pytest.param({"pipeline_parallel_size": 3}, 30, 150, id="stages"),
    pytest.param(
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        30,
        150,
        id="both",
        marks=[pytest.mark.trial, pytest.mark.skipif(LENGTH == 1, reason="as either of them")],
    ),
]


@pytest.mark.parametrize(("parallel", "num_whole", "num_tokens"), PARALLEL)
def test_ranks_and_stages_give_the_bits_of_one_process(
    models: dict[str, Path], whole: Callable[[str], LLM], parallel: dict[str, Any], num_whole: int,
    num_tokens: int,
) -> None:  # fmt: skip
    long, distinct = replace(PARAMS, max_tokens=num_tokens), [end + SHARED for end in "abcd"]
    alone, undisturbed = bits(whole("gemma-3"), PROMPTS), bits(whole("gemma-3"), distinct, long)
    llm = LLM(
        models["gemma-3"], max_model_len=288, max_num_seqs=4, max_num_batched_tokens=32, swap_space=1 / 1024,
        kv_cache_memory_bytes=num_whole * 3 * LAYER_BYTES, **parallel,
    )  # fmt: skip
    try:
        assert pages_of(llm).pool.num_blocks < num_whole
        assert bits(llm, PROMPTS) == alone
        again = llm.generate(PROMPTS[2:3], PARAMS)[0]
        assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // BLOCK * BLOCK
        assert bits(llm, distinct, long) == undisturbed
        assert llm.engine.stats().preemptions > 0
    finally:
        llm.engine.stop()


def test_all_have_as_many_pages_or_none() -> None:
    sizes = [KVSize(replace(WINDOWED, windows=WindowSpec((0, 1, 3), 20, pages)), 100, 0, 512) for pages in (30, 26)]
    loaded = RankLoaded(*counts(sizes[1]), weight_bytes=0)
    assert smallest([sizes[0], loaded]) == sizes[1]
    whole = KVSize(SPEC, 40, 0, 480)
    for first, second in ((sizes[0], whole), (whole, sizes[0])):
        assert smallest([first, RankLoaded(*counts(second), weight_bytes=0)]) == whole


def test_a_stage_has_pages_of_its_own_layers() -> None:
    def own(*kv_layers: int) -> KVSpec:
        return StagePart(0, 1, 4, frozenset(), kv_layers, ()).own_spec(WINDOWED)

    assert own(0, 1).windows == WindowSpec((0, 1), 20, 30) and own(0, 1).block_bytes == 0
    assert own(2).windows is None and own(2).block_bytes == SPEC.layer_bytes
    assert own(2, 3).windows == WindowSpec((1,), 20, 30) and own(2, 3).block_layers == 1
