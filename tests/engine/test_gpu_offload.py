"""An engine whose weights do not all stay on the GPU: the same tokens, with CUDA graphs, from host memory and disk.

python -m pytest tests/engine/test_gpu_offload.py"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.gpu_serving import NUM_NEW, Tokens, engine, run
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.executors import offload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB, LAYERS = 1000, 8
GIB = 2**30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 100 MB: a copy takes longer than a kernel."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**sizes, **heads, initializer_range=0.05)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def requests() -> list[Request]:
    make = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (length,), generator=make).tolist() for length in (7, 130, 33, 1)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
    return [Request(id=f"r{number}", prompt_ids=prompt, params=params) for number, prompt in enumerate(prompts)]


def answers(path: Path, **options: Any) -> tuple[Tokens, int]:
    """Tokens, and bytes that the GPU has allocated."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with engine(path, batch_invariant=True, **options) as served:
        return run(served, requests()), torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_tokens_are_those_of_weights_that_stay(path: Path, quantization: str | None, eager: bool) -> None:
    """Half of what all layers but two take is offloaded, then all of it."""
    options = {"quantization": quantization, "enforce_eager": eager}
    expected, whole = answers(path, **options)
    layer_bytes = 2 * (2048 * (2048 + 2 * 512 + 2048) + 3 * 2048 * 5632) * (4.25 / 16 if quantization else 1)
    for count in (3, LAYERS - 2):
        gib = 0.98 * count * layer_bytes / GIB
        tokens, held = answers(path, offload_weights=gib, **options)
        assert tokens == expected
        assert whole - held > 0.9 * gib * GIB, f"{(whole - held) / GIB:.3f} GiB less, {gib:.3f} were asked for"


def test_what_host_memory_has_no_room_for_is_on_disk(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(path)
    monkeypatch.setattr(offload, "available_memory", lambda: 200 << 20)  # 80 % of it may be taken
    tokens, _ = answers(path, offload_weights=0.4, offload_folder=str(tmp_path))
    assert tokens == expected
