"""Fixtures shared by all tests."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels run on the CPU
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported: its threads spin while they wait

worker = os.environ.get("PYTEST_XDIST_WORKER")
if worker and hasattr(os, "sched_setaffinity"):  # a core for each: idle threads of a pool spin
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

gc.disable()  # until all modules are imported: their objects live as long as the process

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests start first, so that no worker is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def triton_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        import triton_interpreter

        triton_interpreter.prepare()


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


# Reasoning is open behind the prompt, or closed where it is turned off.
THINKS = (
    "{% if tools %}{{ tools | length }}{% endif %}"  # its tokens are bytes
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_thinker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the tokens of two bytes renamed to markers of reasoning."""
    from tiny_markers import with_markers

    folder = tmp_path_factory.mktemp("tiny-thinker") / "model"
    return with_markers(tiny_model, folder, THINKS, {"<think>": True, "</think>": True})
