"""Hybrids of random weights as GGUF files: every family is read and computed, and its checkpoints are compared."""

from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.checkpoint_error import measure
from benchmarks.hybrid_files import HYBRIDS, VOCAB, write_hybrid

from quire import LLM, SamplingParams

SMALL = {"layers": 4, "hidden": 128}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_of_random_weights_answers(name: str, tmp_path: Path) -> None:
    llm = LLM(write_hybrid(tmp_path, name, **SMALL), max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [answer] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
    assert len(answer.outputs[0].token_ids) == 4 and llm.tokenizer.vocab_size == VOCAB


def test_smaller_checkpoints_cost_accuracy_and_save_bytes(tmp_path: Path) -> None:
    path = write_hybrid(tmp_path, "mamba2", **SMALL)
    found = measure(path, Namespace(prefix=48, suffix=8, prompts=1, threads=1))
    assert found["float32"]["kl_max"] == found["float32"]["logit_error"] == 0 and found["float32"]["same"] == 1
    assert 0 < found["bfloat16"]["kl_mean"] < 0.01 > found["int8"]["kl_mean"] > 0
    assert found["float32"]["bytes"] > 1.9 * found["bfloat16"]["bytes"] > 3 * found["int8"]["bytes"]
