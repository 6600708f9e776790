"""Published weights beside transformers: the same ids, perplexity and greedy text. Run where the files are given:

    QUIRE_TEST_MODELS=FOLDER python -m pytest tests/models/test_real_weights.py

FOLDER has the files that docs/models.md names. transformers reads GGUF itself, with accelerate, and computes in fp32:
of these three minutes on two cores most are its own."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams

FOLDER = os.environ.get("QUIRE_TEST_MODELS", "")
FILES = {  # what 8-bit activations may cost, in perplexity; and how many greedy tokens are surely the same
    "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf": (0.01, 16),
    "gemma-3-270m.Q4_K_M.gguf": (0.01, 16),
}
TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
NUM_TOKENS = 256
PROMPT = "The pages of a book are gathered into quires, and"
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="needs QUIRE_TEST_MODELS, a folder with published weights"),
    pytest.mark.timeout(900),  # transformers takes minutes to make a tokenizer of Gemma's pieces
]


@pytest.fixture(scope="module", params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    if not (Path(FOLDER) / request.param).exists():
        pytest.skip(f"{FOLDER} has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER, gguf_file=name)


@pytest.fixture(scope="module")
def ours(name: str) -> LLM:
    return LLM(Path(FOLDER) / name, device="cpu", max_model_len=512)


def test_ids_are_theirs(theirs: tuple[Any, Any], ours: LLM) -> None:
    """Without a first <bos>, which theirs leaves out of some files."""
    expected = theirs[1](TEXT, add_special_tokens=False).input_ids
    assert ours.get_tokenizer().encode(TEXT, add_special_tokens=False) == expected


def test_perplexity_is_theirs(name: str, theirs: tuple[Any, Any], ours: LLM) -> None:
    ids = ours.get_tokenizer().encode(TEXT)[:NUM_TOKENS]
    with torch.inference_mode():
        scores = theirs[0](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = -scores.gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = ours.generate({"prompt_token_ids": ids}, params)
    assert output.prompt_logprobs is not None
    found = [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if entry]
    assert len(found) == NUM_TOKENS - 1
    print(f"{name}: perplexity {np.exp(-np.mean(found)):.3f}, transformers {np.exp(expected):.3f}")
    assert -np.mean(found) == pytest.approx(expected, abs=np.log1p(FILES[name][0]))


def test_greedy_text_begins_like_theirs(name: str, theirs: tuple[Any, Any], ours: LLM) -> None:
    model, _ = theirs
    ids = ours.get_tokenizer().encode(PROMPT)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, repetition_penalty=1.0)
    (output,) = ours.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=32))
    found = output.outputs[0].token_ids
    pairs = zip(found, expected[0, len(ids) :].tolist(), strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(found))
    print(f"{name}: {same} of 32 greedy tokens are the same")
    assert same >= FILES[name][1]
