"""How a family is checked: tiny random checkpoints made by transformers, and what transformers makes of them.

A test file lists its cases and takes both from here:

    CASES: Cases = {"mha": (LlamaConfig, {"num_key_value_heads": 4}), ...}      # on top of TINY
    checkpoints = checkpoints_of(CASES)                                          # a fixture

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_...(checkpoints, backend, name):
        check_against_transformers(backend, checkpoints(name))
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)

from quire.models.registry import family
from quire.ops.opset import OpSet, ProgramSpec, StepBatch
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

DEVICE = os.environ.get("QUIRE_TEST_DEVICE")  # of the GPU's op set, instead of the others: tests/models/conftest.py
DIVIDED = ("ranks", "stages")  # instead of a device: by two of them, tests/ranks/divided.py
BACKENDS = ["torch", "native"] if DEVICE is None else [DEVICE] if DEVICE in DIVIDED else ["gpu"]
BLOCK_SIZE = 4
MAX_LEN = 64
NUM_GREEDY = int(os.environ.get("QUIRE_TEST_GREEDY", "16"))  # over four blocks, and twice over every window
PROMPT = [3, 17, 17, 80, 5, 41, 9, 22, 64, 1, 33, 90, 2, 2, 50, 71, 6, 8, 95, 13]
TINY = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,  # wide enough that every part of the model moves the logits
}

Cases = Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]]  # name -> config class, and what differs from TINY
Logits = Callable[[list[int], int], np.ndarray]  # (ids, start) -> [len(ids) - start, vocab]


@dataclass
class Theirs:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    prefill: np.ndarray  # [len(PROMPT), vocab]
    generated: list[int]  # PROMPT and NUM_GREEDY tokens


def checkpoints_of(cases: Cases, tiny: Mapping[str, Any] = TINY) -> Any:
    """A fixture: case name -> Theirs, each made once."""

    @pytest.fixture(scope="module")
    def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
        @cache
        def make(name: str) -> Theirs:
            config, options = cases[name]
            model = random_model(config(**{**tiny, **options}), seed=sum(map(ord, name)))
            return ask_transformers(model, tmp_path_factory.mktemp(name))

        return make

    return checkpoints


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    makers: tuple[Any, ...] = (
        AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
    )  # fmt: skip
    return randomized(next(m for m in makers if type(config) in m._model_mapping).from_config(config).eval())


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """With other values for what starts as zeros or ones."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith(
            "bias"
        ):  # norms start as ones and biases as zeros: a test of them needs other values
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):  # zeros at first
            torch.nn.init.normal_(buffer, std=0.5)
        if name.endswith("tid2eid"):  # zeros, too: the experts of every token
            buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).argsort(dim=1)[:, : buffer.shape[1]])
    return model


@torch.inference_mode()
def ask_transformers(model: PreTrainedModel, path: Path) -> Theirs:
    model.save_pretrained(path)
    prompt = torch.tensor([PROMPT])
    ids = model.generate(prompt, max_new_tokens=NUM_GREEDY, do_sample=False, pad_token_id=0)
    logits = model(ids, use_cache=False).logits[0].numpy()
    generated = ids[0].tolist()
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == generated[len(PROMPT) :], "their cache is wrong"
    return Theirs(path, logits[: len(PROMPT)], generated)


def make_ops(backend: str, threads: int | None = None) -> OpSet:
    if backend in DIVIDED:
        from ranks.divided import Divided

        return Divided(backend)  # type: ignore[return-value]
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps(threads)
    if backend == "gpu":
        from quire.ops.gpu.opset import GpuOps

        assert DEVICE is not None
        return GpuOps(DEVICE, dtype="float32")
    from quire.ops.reference import TorchOps

    return TorchOps(threads=1)  # more are slower on tiny matrices


def on_host(rows: Any) -> np.ndarray:
    return rows.float().cpu().numpy().copy() if isinstance(rows, torch.Tensor) else np.array(rows)


def compute(ops: OpSet, path: Path) -> Logits:
    """-> a function of (ids, start): the logits of all ids from `start` on, those before being in the cache."""
    if DEVICE in DIVIDED:
        return ops.compute(path)  # type: ignore[attr-defined, no-any-return]
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config.architecture)
    config = module.config(checkpoint.config).at_length(MAX_LEN)
    model = module.load(ops, checkpoint, config, MAX_LEN)
    spec = kv_spec(config, BLOCK_SIZE, "float32")
    if spec.states:
        spec = replace(spec, states=replace(spec.states, num_slots=3))
    cache = ops.new_cache(spec, 20)
    program = ops.compile(model.forward, cache, ProgramSpec(MAX_LEN, 1, MAX_LEN))
    table = np.random.default_rng(0).permutation(20).astype(np.int32)[: MAX_LEN // BLOCK_SIZE]

    def run(ids: list[int], start: int) -> np.ndarray:
        positions = np.arange(start, len(ids), dtype=np.int32)
        batch = StepBatch(
            ids=np.array(ids[start:], np.int32),
            positions=positions,
            slots=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            seq_starts=np.array([0, len(positions)], np.int32),
            context_lens=np.array([len(ids)], np.int32),
            block_tables=table[None],
            logit_rows=np.arange(len(positions), dtype=np.int32),
            states=in_two_segments(start, len(ids)) if spec.states else None,
        )
        return on_host(program.run(batch))

    return run


def in_two_segments(start: int, end: int) -> np.ndarray:
    """The state is in slot 1 before and after the tokens, and in slot 2 on the way."""
    source, half, count = 1 if start else -1, (end - start + 1) // 2, end - start
    return np.array([(half, source, 2), (count, 2, 1)] if half < count else [(count, source, 1)], np.int32)


def check_against_transformers(backend: str, theirs: Theirs) -> None:
    """The logits of a prefill at once and in chunks, then greedy tokens."""
    ours = compute(make_ops(backend), theirs.path)
    chunks = [ours(PROMPT[:end], start) for start, end in ((0, 7), (7, 8), (8, len(PROMPT)))]
    assert_close(np.concatenate(chunks), theirs.prefill)
    logits = ours(PROMPT, 0)
    assert_close(logits, theirs.prefill)

    ids = list(PROMPT)
    for _ in range(NUM_GREEDY):
        ids.append(int(logits[-1].argmax()))
        logits = ours(ids, len(ids) - 1)
    assert ids == theirs.generated


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    """Closer than GELU is to its approximation."""
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())


def rewritten(
    theirs: Theirs, folder: Path, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray], without: tuple[str, ...]
) -> Theirs:
    """The checkpoint in `folder`, with other tensors, and values of its configuration added or left out."""
    config = json.loads((theirs.path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    save_file({name: np.ascontiguousarray(data) for name, data in tensors.items()}, folder / "model.safetensors")
    return replace(theirs, path=folder)
