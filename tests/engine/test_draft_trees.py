"""Trees of drafts change nothing: the engine without drafts is the oracle, to the last bit of every logprob."""

from pathlib import Path
from typing import Any

import pytest

from engine.test_speculation import KINDS, KV_BLOCK, bits, speculating
from quire import LLM
from quire.api.outputs import RequestOutput
from runtime.oracle import tree_oracle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(default_model: Path) -> list[RequestOutput]:
    llm = LLM(default_model, max_model_len=512)
    return llm.generate([prompt for prompt, _ in KINDS.values()], [params for _, params in KINDS.values()])


ENGINES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 64},
    "swapped, in chunks": {
        "kv_cache_memory_bytes": 40 * KV_BLOCK,
        "swap_space": 0.1,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 64,
    },
}


@pytest.mark.parametrize("name", ENGINES)
def test_all_requests_together(default_model: Path, plain: list[RequestOutput], name: str) -> None:
    llm = speculating(default_model, **ENGINES[name])
    texts = [[*output.prompt_token_ids, *one.token_ids] for output in plain for one in output.outputs]
    llm.engine.executor.runner.proposer = tree_oracle(texts, 49152)
    found = llm.generate([prompt for prompt, _ in KINDS.values()], [params for _, params in KINDS.values()])
    for kind, ours, theirs in zip(KINDS, found, plain, strict=True):
        assert bits(ours) == bits(theirs), kind
    stats = llm.engine.stats()
    assert 50 < stats.accepted_tokens < stats.draft_tokens
    assert (stats.preemptions > 0) == ("kv_cache_memory_bytes" in ENGINES[name])
