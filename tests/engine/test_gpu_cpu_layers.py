"""The first layers of a model on the CPU, the others on the GPU: the tokens that transformers finds.

python -m pytest tests/engine/test_gpu_cpu_layers.py"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.gpu_serving import NUM_NEW, VOCAB, check_tokens, engine, in_halves, run, save_llama
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.executors.cpu_layers import CpuLayersExecutor
from quire.executors.local import LocalExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), 64)


def requests(params: SamplingParams = GREEDY) -> list[Request]:
    make = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (length,), generator=make).tolist() for length in (7, 130, 33, 1)]
    return [Request(id=f"r{number}", prompt_ids=prompt, params=params) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_transformers(path: Path, dtype: str) -> None:
    wanted = requests()
    with engine(path, dtype=dtype, cpu_layers=1) as served:
        assert isinstance(served.executor, CpuLayersExecutor)
        tokens = run(served, wanted)
    exact = LlamaForCausalLM.from_pretrained(path).to("cuda")
    check_tokens(tokens, wanted, exact, in_halves(LlamaForCausalLM.from_pretrained(path), dtype))


def test_sampled_tokens_do_not_depend_on_who_else_is_there(path: Path) -> None:
    """With blocks for two sequences: the others wait, are preempted and swapped on both devices."""
    wanted = requests(replace(GREEDY, temperature=0.9, seed=4))
    tokens = []
    for options in ({}, {"kv_cache_memory_bytes": 26 * 2 * 2 * 2 * 16 * 64 * 4, "swap_space": 0.01}):
        with engine(path, dtype="float32", cpu_layers=1, batch_invariant=True, **options) as served:
            tokens.append(run(served, wanted))
    assert tokens[0] == tokens[1]


def test_room_is_measured_on_both_devices(path: Path) -> None:
    with engine(path, gpu_layers=1, kv_cache_memory_bytes=None) as served:
        assert isinstance(served.executor, CpuLayersExecutor) and served.capacity.num_blocks > 100
        run(served, requests())


def test_all_layers_on_one_side_need_one_device(path: Path) -> None:
    for layers, backend in ((0, "native"), (99, "cuda")):
        with engine(path, gpu_layers=layers) as served:
            assert type(served.executor) is LocalExecutor and served.executor.options.backend == backend
