"""How many blocks fit, and how long a sequence may be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import BadRequest, DoesNotFit, Unsupported
from quire.models.config import ModelConfig
from quire.ops.kv_spec import IndexSpec, KVSpec
from quire.runtime import available_memory as memory
from quire.runtime.kv import KVSize, check_gpu_spec, kv_spec, size_cache

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=100,
    max_position=1000,
    max_length=1000,
    windows=(0,) * 4,
)
SPEC = kv_spec(MODEL, 16, "auto")
BLOCK = 2 * 4 * 2 * 16 * 16 * 2  # keys and values, layers, heads, columns, tokens, bytes


def size(model: ModelConfig = MODEL, **options: Any) -> KVSize:
    defaults: dict[str, Any] = {"max_model_len": None, "max_num_seqs": 8, "cache_bytes": None, "max_bytes": 2**40}
    return size_cache(model, SPEC, **{**defaults, "max_num_batched_tokens": 50, **options})


def test_a_block() -> None:
    assert SPEC.dtype == "float16" and SPEC.block_bytes == BLOCK
    assert kv_spec(MODEL, 16, "float32").block_bytes == 2 * BLOCK
    assert kv_spec(MODEL, 16, "bfloat16").block_bytes == BLOCK
    assert kv_spec(MODEL, 16, "int8").block_bytes == 2 * 4 * 2 * 16 * (16 + 4)  # a unit for each key and value
    for block_size in (12, 2048):
        with pytest.raises(BadRequest, match=f"block_size is {block_size}") as error:
            kv_spec(MODEL, block_size, "int8")
        assert error.value.param == "block_size"
    with pytest.raises(Unsupported, match="2048 columns"):
        kv_spec(replace(MODEL, head_dim=2048), 16, "int8")
    assert kv_spec(MODEL, 16, "fp8").block_bytes == BLOCK // 2
    with pytest.raises(Unsupported, match="`fp4`"):
        kv_spec(MODEL, 16, "fp4")


def test_by_default_all_sequences_fit_at_full_length() -> None:
    assert size().num_blocks == 8 * 63
    assert size().max_model_len == 1000
    assert size(max_model_len=100).num_blocks == 8 * 7


def test_no_more_than_is_there() -> None:
    assert size(max_bytes=100 * BLOCK).num_blocks == 100
    with pytest.raises(DoesNotFit, match="hold 0"):
        size(max_bytes=0)


def test_the_length_shrinks_to_what_fits_unless_it_was_asked_for() -> None:
    assert size(cache_bytes=10 * BLOCK).max_model_len == 160
    assert size(cache_bytes=10 * BLOCK, max_model_len=160).max_model_len == 160
    with pytest.raises(DoesNotFit, match=r"161 tokens .* hold 160"):
        size(cache_bytes=10 * BLOCK, max_model_len=161)
    with pytest.raises(DoesNotFit):
        size(cache_bytes=BLOCK - 1)


def test_a_window_makes_room_for_longer_sequences() -> None:
    windowed = replace(MODEL, windows=(100, 80, 100, 100))
    blocks = 11  # 99 + 50 tokens begin anywhere in a block
    assert (size(windowed).num_blocks, size(windowed).max_model_len) == (8 * blocks, 1000)
    assert size(windowed, cache_bytes=blocks * BLOCK).max_model_len == 1000
    assert size(windowed, cache_bytes=(blocks - 1) * BLOCK).max_model_len == 160
    one_sees_all = replace(MODEL, windows=(100, 0, 100, 100))
    assert size(one_sees_all, cache_bytes=blocks * BLOCK).max_model_len == 176


def test_layers_with_a_window_have_pages_where_that_makes_room_for_longer_sequences() -> None:
    mixed, decoding, chunk = replace(MODEL, windows=(100, 0, 100, 80)), 9, 4  # blocks of a sequence, and of a step
    windows = size(mixed, window_pages=True).spec.windows
    assert windows is not None and (windows.layers, windows.size) == ((0, 2, 3), 100)
    assert windows.num_pages == 2 * 8 * decoding + chunk
    divided = size(mixed, cache_bytes=200 * BLOCK, window_pages=True)
    assert divided.num_pages == 100 and divided.num_blocks == 200 * 4 - 100 * 3
    assert (
        divided.cache_bytes == 200 * BLOCK
        and divided.spec.place(1) == (False, 0)
        and divided.spec.place(3) == (True, 2)
    )
    least = 8 * decoding + chunk
    assert size(mixed, cache_bytes=(least * 4 + 2) // 3 * BLOCK, window_pages=True).num_pages == least
    assert size(mixed, cache_bytes=(least * 4 - 2) // 3 * BLOCK, window_pages=True).num_pages == 0  # too little is left
    assert size(mixed, max_model_len=100, window_pages=True).num_pages == 0  # no window ends
    for alike in (MODEL, replace(MODEL, windows=(100,) * 4)):
        assert size(alike, window_pages=True).num_pages == 0


def test_memory_is_divided_with_the_blocks_of_what_drafts() -> None:
    half = size(cache_bytes=200 * BLOCK, draft_block_bytes=BLOCK)
    assert half.num_blocks == 100 and half.cache_bytes == 100 * BLOCK
    mixed = replace(MODEL, windows=(100, 0, 100, 80))
    divided = size(mixed, cache_bytes=400 * BLOCK, draft_block_bytes=BLOCK, window_pages=True)
    assert divided.num_pages == 100
    left = 400 * BLOCK - 100 * divided.spec.page_bytes
    assert divided.num_blocks == left // (divided.spec.block_bytes + BLOCK) == 260


def test_the_model_limits_the_length() -> None:
    with pytest.raises(BadRequest, match="1001, and the model was made for 1000") as error:
        size(max_model_len=1001)
    assert error.value.param == "max_model_len"
    assert size(replace(MODEL, max_length=4000), max_model_len=4000).max_model_len == 4000
    with pytest.raises(BadRequest):
        size(max_model_len=0)


def test_swap_space_is_counted_in_whole_blocks() -> None:
    assert size(swap_bytes=5 * BLOCK + 1).num_host_blocks == 5


def test_what_a_gpu_takes() -> None:
    check_gpu_spec(KVSpec(1, 1, 80, 32, "fp8"))
    with pytest.raises(BadRequest, match="block_size is 24") as error:
        check_gpu_spec(KVSpec(1, 1, 64, 24, "bfloat16"))
    assert error.value.param == "block_size"
    with pytest.raises(Unsupported, match="heads have 576 columns, and a GPU takes 512"):
        check_gpu_spec(KVSpec(1, 1, 576, 16, "bfloat16"))
    check_gpu_spec(KVSpec(1, 1, 576, 16, "bfloat16", 512, index=IndexSpec(128, 2048)))
    with pytest.raises(Unsupported, match="heads have 65 columns, and a GPU keeps an even number"):
        check_gpu_spec(KVSpec(1, 1, 65, 16, "int8"))


def test_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, limit, usage = tmp_path / "meminfo", tmp_path / "max", tmp_path / "current"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP_V2", (limit, usage))
    monkeypatch.setattr(memory, "CGROUP_V1", (tmp_path / "none", tmp_path / "none"))
    assert memory.available_memory() == 8000 * 1024
    usage.write_text("1000\n")
    limit.write_text("max\n")
    assert memory.available_memory() == 8000 * 1024
    limit.write_text("5000\n")
    assert memory.available_memory() == 4000
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    limit.unlink()
    assert memory.available_memory() > 0
