"""The GPU's op set beside the plain one, with several adapters in a step."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig

from models.checking import PROMPT, TINY, assert_close, make_ops, random_model
from models.lora_steps import NONE, Together
from quire.ops.torch.gpu import GpuOps
from quire.ops.torch.gpu_program import Inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
RANKS = {"all": dict.fromkeys(LAYERS, 8), "odd": {"self_attn.k_proj": 5, "mlp.down_proj": 2, "mlp.gate_proj": 3}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """-> the model, and the adapters: as PEFT saves them, which is not asked here."""
    folder = tmp_path_factory.mktemp("llama")
    model = random_model(LlamaConfig(**TINY), seed=3)
    model.save_pretrained(folder)
    random = np.random.default_rng(5)
    for name, ranks in RANKS.items():
        tensors = {}
        for layer, rank in ((f"model.layers.{n}.{layer}", rank) for n in range(2) for layer, rank in ranks.items()):
            outputs, inputs = model.get_submodule(layer).weight.shape
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = random.normal(0, 0.15, shape).astype(np.float32)
                tensors[f"base_model.model.{layer}.lora_{side}.weight"] = matrix
        pattern = {layer.rpartition(".")[2]: rank for layer, rank in ranks.items()}
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": pattern}
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "adapter_model.safetensors")
    return folder, {name: folder / name for name in RANKS}


def test_the_kernels_agree_with_plain_torch(llama):
    ids = {"odd": PROMPT[:2], NONE: PROMPT[:1], "all": PROMPT[:1]}
    ours, plain = (Together(ops, *llama, max_rank=8) for ops in (GpuOps(DEVICE, "float32"), make_ops("torch")))
    found, expected = (each.run(ids, 0) for each in (ours, plain))
    for name in ids:
        assert_close(found[name], expected[name])
    assert np.abs(expected["all"] - expected[NONE]).max() > 0.1

    # What a CUDA graph captures, and what it is sent: a step that only decodes, padded to four sequences.
    step = ours.batch(dict.fromkeys(ids, PROMPT[:1]), 0)
    inputs = Inputs(4, 4, ours.blocks, torch.device(DEVICE), decodes=True)
    inputs.send(step)
    batch = ours.program._read_from(inputs, adapted=True)
    with torch.inference_mode():
        padded = ours.program._forward(batch)[:3]
    assert batch.adapts and batch.adapters.tolist() == [*step.adapters, -1]
    assert_close(padded.cpu().numpy(), np.concatenate([*plain.run(dict.fromkeys(ids, PROMPT[:1]), 0).values()]))

    # And one with a prompt, padded in tokens and in sequences.
    step = ours.batch(ids, 0)
    inputs = Inputs(7, 5, ours.blocks, torch.device(DEVICE), decodes=False)
    inputs.send(step)
    with torch.inference_mode():
        padded = ours.program._forward(ours.program._read_from(inputs, adapted=True))[: len(step.logit_rows)]
    assert_close(padded.cpu().numpy(), np.concatenate([*expected.values()]))
