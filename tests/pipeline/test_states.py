"""Models with recurrent states that stages compute one after the other, against one process: the same bits."""

from pathlib import Path

import numpy as np
import pytest

from engine.same_bits import PROMPTS, bits
from engine.test_state_slots import few_blocks_and_drafts_change_nothing, hybrid, mamba
from models import test_delta_nets, test_mamba
from models.checking import PROMPT, TINY, random_model
from pipeline.stages_here import InStages
from quire import LLM
from ranks.rank_threads import OneProcess, steps
from trials import LENGTH

assert hybrid and mamba  # fixtures

CASES = test_mamba.CASES | test_delta_nets.CASES
NAMES = list(CASES) if LENGTH > 1 else ["bamba", "mamba", "qwen3-next", "minimax", "kimi-linear"]


@pytest.mark.parametrize("name", NAMES)
def test_stages_give_the_bits_of_one_process(tmp_path: Path, name: str) -> None:
    config, options = CASES[name]
    random_model(config(**{**TINY, **options}), seed=len(name)).save_pretrained(tmp_path)
    whole = OneProcess("native", tmp_path)
    alone = steps(whole.logits, PROMPT)
    for size in sorted({2, whole.model.config.layers}):
        stages = InStages(tmp_path, size)
        for ours, theirs in zip(steps(stages.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_stage_has_the_states_of_its_layers(tmp_path: Path) -> None:
    config, options = CASES["bamba"]
    random_model(config(**{**TINY, **options, "num_hidden_layers": 4}), seed=1).save_pretrained(tmp_path)
    stages = InStages(tmp_path, 4).stages
    own = [stage.cache.own.spec.states for stage in stages]
    assert [0 if states is None else states.num_layers for states in own] == [1, 0, 1, 1]


def test_processes_swap_states_and_roll_drafts_back(hybrid: Path) -> None:
    few_blocks_and_drafts_change_nothing(hybrid, pipeline_parallel_size=2)


def test_processes_of_a_model_without_attention(mamba: Path) -> None:
    few_blocks_and_drafts_change_nothing(mamba, pipeline_parallel_size=2)


def test_stages_of_ranks_have_their_heads_of_every_state(hybrid: Path) -> None:
    expected = bits(LLM(hybrid, max_model_len=160), PROMPTS[:2])
    llm = LLM(hybrid, max_model_len=160, tensor_parallel_size=2, pipeline_parallel_size=2)
    try:
        assert bits(llm, PROMPTS[:2]) == expected
    finally:
        llm.engine.stop()
