"""Models of which some layers have a sliding window, with prefixes on disk: pages are kept where prompts start from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_kv_tiers import Engine, always_fetch
from engine.test_window_pages import BLOCK, LAYER_BYTES, PARAMS, SHARED, bits, models, pages_of, whole
from quire import LLM
from quire.cli.main import main
from quire.core.block_keys import is_page_file
from quire.core.transfer_config import TransferConfig
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.runtime.kv_files import HEADER_BYTES

assert models and whole and always_fetch  # fixtures

PROMPTS = [SHARED * 4, SHARED * 4 + "Then the binder sews them.", "In the beginning was the word. " * 6]


def served(model: Path, tmp_path: Path, **options: Any) -> Engine:
    given = {"max_model_len": 512, "max_num_batched_tokens": 64} | options
    return Engine(model, kv_disk_path=str(tmp_path), **given)


@pytest.mark.parametrize(("name", "dtype"), [("gemma-3", "auto"), ("gemma-3", "int8"), ("llama-4", "auto")])
def test_a_restarted_engine_starts_behind_the_last_window(
    models: dict[str, Path], whole: Callable[[str], LLM], tmp_path: Path, name: str, dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with served(models[name], tmp_path, kv_cache_dtype=dtype) as first:
        assert pages_of(first.llm)
        cold = bits(first.llm, PROMPTS)
        if dtype == "auto":
            assert cold == bits(whole(name), PROMPTS)
        assert first.hits == 0
    files = list(tmp_path.rglob("*.kv"))
    pages = [file for file in files if is_page_file(file)]
    assert 0 < len(pages) < len(files) / 2
    if dtype == "auto":
        assert {file.stat().st_size - HEADER_BYTES for file in pages} == {2 * LAYER_BYTES}
        assert {file.stat().st_size - HEADER_BYTES for file in {*files} - {*pages}} == {LAYER_BYTES}
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert f"{len(files) - len(pages)} blocks and {len(pages)} window pages" in capsys.readouterr().out
    with served(models[name], tmp_path, kv_cache_dtype=dtype) as second:
        for prompt, expected in zip(PROMPTS, cold, strict=True):
            assert bits(second.llm, [prompt]) == [expected]
        ids = [result.prompt_token_ids for result in second.llm.generate(PROMPTS, PARAMS)]
        assert second.hits >= sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in (ids[0], ids[2]))


def test_what_the_pool_evicts_comes_back(models: dict[str, Path], whole: Callable[[str], LLM], tmp_path: Path) -> None:
    """Prompts that a pool of two of them cannot keep, asked for twice, while sequences are preempted."""
    prompts = [f"{number}: {SHARED * 2}" for number in range(6)]
    expected = bits(whole("gemma-3"), prompts)
    options = {"kv_cache_memory_bytes": 24 * 3 * LAYER_BYTES, "max_model_len": 256, "max_num_batched_tokens": 32}
    with served(models["gemma-3"], tmp_path, swap_space=1 / 1024, **options) as engine:
        assert bits(engine.llm, prompts) == expected and bits(engine.llm, prompts) == expected
        assert engine.hits > 300 and pages_of(engine.llm)


def test_pages_of_another_number_and_with_drafts_find_the_same_files(
    models: dict[str, Path], whole: Callable[[str], LLM], tmp_path: Path
) -> None:
    with served(models["gemma-3"], tmp_path) as first:
        expected = bits(first.llm, PROMPTS)
    draft = {"model": str(models["gemma-3"]), "num_speculative_tokens": 3}
    memory = {"kv_cache_memory_bytes": 4 * 200 * 3 * LAYER_BYTES}
    with served(models["gemma-3"], tmp_path, speculative_config=draft, **memory) as second:
        assert bits(second.llm, PROMPTS) == expected and second.hits > 200


@pytest.mark.trial
def test_ranks_read_and_write_their_pages(models: dict[str, Path], whole: Callable[[str], LLM], tmp_path: Path) -> None:
    expected = bits(whole("gemma-3"), PROMPTS)
    for hits in (0, 200):
        with served(models["gemma-3"], tmp_path, tensor_parallel_size=2) as engine:
            assert pages_of(engine.llm) and bits(engine.llm, PROMPTS) == expected
            assert engine.hits >= hits


def test_a_damaged_page_is_computed_again(models: dict[str, Path], tmp_path: Path) -> None:
    with served(models["gemma-3"], tmp_path) as first:
        expected = bits(first.llm, PROMPTS)
    for file in tmp_path.rglob("*.kv"):
        if is_page_file(file):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    with served(models["gemma-3"], tmp_path) as second:
        assert bits(second.llm, PROMPTS) == expected and second.hits == 0
    with served(models["gemma-3"], tmp_path) as third:
        assert bits(third.llm, PROMPTS) == expected and third.hits > 200


def test_other_engines_are_sent_whole_blocks(models: dict[str, Path]) -> None:
    transfer = TransferConfig("kv_producer", ("127.0.0.1:1",))
    for given, in_pages in ((None, True), (transfer, False)):
        assert LocalExecutor(models["gemma-3"], ExecutorOptions(kv_transfer=given))._has_window_pages == in_pages
