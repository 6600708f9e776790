"""Requests whose tokens and logprobs are compared bit for bit, and random models to send them to."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.ops.kv_spec import ConvSpec

SHARED = "A quire is four sheets of paper or parchment folded to form eight leaves. "
PROMPTS = [SHARED, SHARED + "Then the binder sews them.", SHARED + "It is read.", "x", "In the beginning was the word"]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, logprobs=1, ignore_eos=True)

Bits = list[list[tuple[int, float]]]


def bits(llm: LLM, prompts: list[str], params: SamplingParams = PARAMS) -> list[Bits]:
    """Tokens and logprobs of each completion of each prompt."""
    return [
        [[(t, row[t].logprob) for t, row in zip(o.token_ids, o.logprobs or [], strict=True)] for o in result.outputs]
        for result in llm.generate(prompts, params)
    ]


def cold_bits(model: Path) -> list[Bits]:
    """Of each prompt alone, nothing cached."""
    llm = LLM(model, enable_prefix_caching=False)
    return [bits(llm, [prompt])[0] for prompt in PROMPTS]


def save_random(tiny_model: Path, folder: Path, new_model: Callable[[], Any]) -> Path:
    """A model of transformers, always with the same random weights, and the tokenizer of the tiny model."""
    import torch

    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    torch.manual_seed(3)
    new_model().save_pretrained(folder)
    return folder


LFM2_CONV = ConvSpec(num_layers=2, channels=48, taps=4)


def save_lfm2(tiny_model: Path, folder: Path) -> Path:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=259,
        hidden_size=LFM2_CONV.channels,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=LFM2_CONV.taps,
        block_multiple_of=16,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return save_random(tiny_model, folder, lambda: Lfm2ForCausalLM(config))
