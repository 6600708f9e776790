"""Prefixes on disk of a model that several ranks compute: a restarted engine finds them, and gives the same bits."""

from pathlib import Path

import pytest

from engine.test_kv_tiers import PROMPTS, Engine, always_fetch

assert always_fetch  # a fixture


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> list[list[tuple[int, float]]]:
    with Engine(tiny_model, enable_prefix_caching=False) as engine:
        return [engine.bits([prompt])[0] for prompt in PROMPTS]


def test_a_restarted_engine_finds_the_blocks_of_all_ranks(tiny_model: Path, tmp_path: Path, cold: list) -> None:
    options = {"kv_disk_path": str(tmp_path), "tensor_parallel_size": 2}
    with Engine(tiny_model, **options) as first:
        assert first.bits(PROMPTS) == cold and first.hits == 0
    with Engine(tiny_model, **options) as second:
        assert [second.bits([prompt])[0] for prompt in PROMPTS] == cold
        assert second.hits > 300
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as alone:  # its blocks have another layout
        assert alone.bits(PROMPTS) == cold and alone.hits == 0
