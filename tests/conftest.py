"""Fixtures shared by all tests."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels run on the CPU

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(
    os, "sched_setaffinity"
):  # each has a core of its own: teams of threads wait by turning
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def interpreted_loops() -> None:
    """Triton 3.6 makes a loop's bounds of arrays of one number, which numpy refuses since 2.4."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"):
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched on first use."""
    from quire.hub import resolve_model

    return resolve_model("smollm2").path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte-level tokenizer, as transformers saves it: loads in milliseconds."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*specials, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[1], eos_token=specials[2])
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=72,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
