"""The GPU's op set beside the plain one, with several adapters in a step."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from models.checking import PROMPT, TINY, assert_close, make_ops, random_model
from models.lora_steps import NONE, Together
from models.plain_adapters import write_adapter
from quire.ops.gpu.graph_inputs import GraphInputs
from quire.ops.gpu.opset import GpuOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {"all": dict.fromkeys(LAYERS, 8), "odd": {"k_proj": 5, "down_proj": 2, "gate_proj": 3}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """-> the model, and the adapters: as PEFT saves them, which is not asked here."""
    folder = tmp_path_factory.mktemp("llama")
    model = random_model(LlamaConfig(**TINY), seed=3)
    model.save_pretrained(folder)
    return folder, {
        name: write_adapter(model, folder / name, ranks, seed) for seed, (name, ranks) in enumerate(RANKS.items())
    }


def test_the_kernels_agree_with_plain_torch(llama):
    ids = {"odd": PROMPT[:2], NONE: PROMPT[:1], "all": PROMPT[:1]}
    ours, plain = (Together(ops, *llama, max_rank=8) for ops in (GpuOps(DEVICE, "float32"), make_ops("torch")))
    found, expected = (each.run(ids, 0) for each in (ours, plain))
    for name in ids:
        assert_close(found[name], expected[name])
    assert np.abs(expected["all"] - expected[NONE]).max() > 0.1

    # What a CUDA graph captures, and what it is sent: a step that only decodes, padded to four sequences.
    step = ours.batch(dict.fromkeys(ids, PROMPT[:1]), 0)
    inputs = GraphInputs(4, 4, ours.blocks, torch.device(DEVICE), decodes=True)
    inputs.send(step)
    batch = ours.program._batch_from(inputs, with_adapters=True)
    with torch.inference_mode():
        padded = ours.program._forward(batch)[:3]
    assert batch.adapts and batch.adapters.tolist() == [*step.adapters, -1]
    assert_close(padded.cpu().numpy(), np.concatenate([*plain.run(dict.fromkeys(ids, PROMPT[:1]), 0).values()]))

    # And one with a prompt, padded in tokens and in sequences.
    step = ours.batch(ids, 0)
    inputs = GraphInputs(7, 5, ours.blocks, torch.device(DEVICE), decodes=False)
    inputs.send(step)
    with torch.inference_mode():
        padded = ours.program._forward(ours.program._batch_from(inputs, with_adapters=True))[: len(step.logit_rows)]
    assert_close(padded.cpu().numpy(), np.concatenate([*expected.values()]))
