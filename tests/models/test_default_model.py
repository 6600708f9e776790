"""The model that is served by default, quantized as it is, against transformers on the same weights in fp32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run, StepPlan
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.models import llama
from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint

# "<|im_start|>user\nWhat is a quire of paper?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 253, 613, 609, 282, 1941, 47, 2, 198, 1, 520, 9531, 198]
NUM_TOKENS = 12
# The native kernels round activations to 8 bits in groups of 32; that moves a logprob of so small a model by about 0.1.
NATIVE = pytest.param("native", 0.3)


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> LlamaForCausalLM:
    checkpoint = open_checkpoint(default_model)
    config = llama.config(checkpoint.config)
    hf = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(hf)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    state = {name: torch.tensor(dequantize(tensor)).reshape(tensor.shape) for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(hf)  # its buffer is in no checkpoint
    return model.eval()


@pytest.mark.parametrize(("backend", "tolerance"), [("torch", 1e-3), NATIVE])
def test_logprobs_and_greedy_tokens(
    default_model: Path, theirs: LlamaForCausalLM, backend: str, tolerance: float
) -> None:
    options = ExecutorOptions(backend=backend, max_model_len=64, max_num_seqs=1, kv_cache_dtype="float32")
    executor = LocalExecutor(default_model, options)
    executor.allocate(executor.load())
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0, logprobs=0)
    admission = Admission(0, params, 0, PROMPT, len(PROMPT), [0, 1, 2, 3], [])
    executor.submit(StepPlan(1, [Run(0, 0, len(PROMPT))], admitted=[admission]))
    drawn = executor.collect().sampled[0]
    assert drawn.prompt_logprobs is not None
    ids, logprobs = [*PROMPT, *drawn.tokens], [line[0].logprob for line in drawn.prompt_logprobs]
    while len(ids) < len(PROMPT) + NUM_TOKENS:
        executor.submit(StepPlan(len(ids), [Run(0, len(ids) - 1, 1)]))
        ids += executor.collect().sampled[0].tokens

    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    scored = expected[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(logprobs, scored, atol=tolerance)
    continuation = expected[len(PROMPT) - 1 : -1]
    missed = continuation.max(-1) - continuation[np.arange(NUM_TOKENS), ids[len(PROMPT) :]]
    assert missed.max() <= tolerance, "a drawn token is not the most likely one"
