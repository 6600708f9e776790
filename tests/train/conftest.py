"""A target whose text can be foreseen."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matmuls gain nothing from more, and wait for each other on a busy machine."""
    import torch

    from quire.train.answers import ENGINE

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINE["cpu"], "threads", 1)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def counting_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny Llama with layers that add little, and an LM head that makes it write the token with the next id."""
    import torch
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("counting") / "model"
    shutil.copytree(tiny_model, folder)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
        table = model.model.embed_tokens.weight
        model.lm_head.weight.copy_(torch.roll(table, 1, 0) * 4)
    model.save_pretrained(folder)
    return folder
