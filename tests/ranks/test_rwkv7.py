"""RWKV 7 by several ranks, and by several stages: the bits of one process."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.test_state_slots import PROMPTS, bits
from models.checking import PROMPT
from models.test_rwkv7 import CASES, RANKS, TINY, random_tensors
from pipeline.stages_here import InStages
from quire import LLM
from ranks.rank_threads import InRanks, OneProcess, steps


def save(folder: Path, **values: object) -> Path:
    config = {**TINY, **RANKS, **values}
    save_file(random_tensors(config, seed=3), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["rwkv7", "rwkv7-odd"])
def test_ranks_give_the_bits_of_one_process(tmp_path: Path, name: str, size: int) -> None:
    path = save(tmp_path, **CASES[name])
    alone = steps(OneProcess("native", path).logits, PROMPT)
    ranks = InRanks("native", path, size)
    for ours, theirs in zip(steps(ranks.logits, PROMPT), alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    shapes = [rank.cache.own.spec.states.shape for rank in ranks.ranks]
    heads = OneProcess("native", path).cache.spec.states.shape[0]
    assert sum(shape[0] for shape in shapes) == heads
    assert (
        sum(rank.cache.own.spec.states.conv_channels for rank in ranks.ranks) == 7 * ranks.ranks[0].model.config.hidden
    )


@pytest.fixture(scope="module")
def rwkv(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RWKV 7 with the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny-rwkv7")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    return save(folder, vocab_size=259, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)


def test_processes_answer_as_one_does(rwkv: Path) -> None:
    options = {"max_model_len": 256, "max_num_seqs": 4}
    alone, ranks = LLM(rwkv, **options), LLM(rwkv, **options, tensor_parallel_size=2)
    try:
        expected = bits(alone, PROMPTS[:3])
        assert bits(ranks, PROMPTS[:3]) == bits(ranks, PROMPTS[:3]) == expected
    finally:
        ranks.engine.stop()


def test_stages_get_the_values_of_the_first_layer(tmp_path: Path) -> None:
    path = save(tmp_path)
    alone = steps(OneProcess("native", path).logits, PROMPT)
    stages = InStages(path, 2)
    assert len(stages.stages[0].part.handed_on) == 2
    for ours, theirs in zip(steps(stages.logits, PROMPT), alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
