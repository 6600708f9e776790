"""A head that was trained for the default model: it drafts well, and changes nothing.

`tests/data/eagle3-smollm2` is what `quire train-head` made of the model's own answers, in 4 bits (docs/train-head.md).
"""

from pathlib import Path

import pytest

from fakes import make_drafts_free
from quire import LLM, SamplingParams

pytestmark = pytest.mark.slow

HEAD = Path(__file__).parents[1] / "data" / "eagle3-smollm2"
QUESTIONS = ["What is photosynthesis?", "How do I make pancakes?", "List three uses of iron."]
MIN_LENGTH = 1.9  # tokens of a step at three drafts


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [list(output.outputs[0].token_ids) for output in llm.chat(conversations, params)]


def test_a_trained_head_drafts_what_the_model_says(default_model: Path) -> None:
    config = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 3}
    llm = LLM(default_model, speculative_config=config, max_model_len=512, max_num_seqs=4)
    make_drafts_free(llm.engine._scheduler.speculation)
    assert answers(llm) == answers(LLM(default_model, max_model_len=512, max_num_seqs=4))
    stats = llm.engine.stats()
    length = 1 + stats.accepted_tokens / stats.drafts
    assert length >= MIN_LENGTH, f"{length:.2f} tokens a step, of {stats.drafts} drafts"
