"""How encoder-decoders are checked: as checking.py does it, with a source that is read before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from quire.models.registry import family
from quire.ops.opset import OpSet, ProgramSpec, StepBatch
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

from .checking import BLOCK_SIZE, NUM_GREEDY, PROMPT, assert_close, make_ops, on_host

MAX_LEN = 64  # of a source, and of an answer
SOURCE = PROMPT
START = 3
ANSWER = [START, 17, 4, 4, 80, 1, 33, 90, 12, 50, 71]  # what logits are compared of

Cases = Mapping[str, tuple[type[PreTrainedModel], dict[str, Any]]]


@dataclass
class Theirs:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    model: PreTrainedModel
    encoded: np.ndarray  # [len(SOURCE), hidden]
    logits: np.ndarray  # [len(ANSWER), vocab]
    generated: list[int]  # START and NUM_GREEDY tokens


def checkpoints_of(cases: Cases, tiny: Mapping[str, Any]) -> Any:
    """A fixture: case name -> Theirs, each made once."""

    @pytest.fixture(scope="module")
    def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
        @cache
        def make(name: str) -> Theirs:
            kind, options = cases[name]
            model = random_model(kind, {**tiny, **options}, seed=sum(map(ord, name)))
            return ask_transformers(model, tmp_path_factory.mktemp(name))

        return make

    return checkpoints


def random_model(kind: type[PreTrainedModel], options: dict[str, Any], seed: int) -> Any:
    """Wide enough numbers that every part moves the logits. T5's head is a matrix of its own where `own_head` is among
    the options, as T5 1.1 and FLAN have it: their configurations do not say."""
    torch.manual_seed(seed)
    numbers = {key: value for key, value in options.items() if key != "own_head"}
    model = kind(kind.config_class(**numbers)).eval()
    if "own_head" in options:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if "embed_positions" in name and not tensor.requires_grad:
            continue  # waves
        if tensor.dim() == 1 or name == "final_logits_bias":
            torch.nn.init.normal_(tensor, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        elif tensor.is_floating_point():
            unscaled = name.endswith("Attention.q.weight")  # T5's scores are not divided by anything
            torch.nn.init.normal_(tensor, std=0.25 * model.config.d_kv**-0.5 if unscaled else 0.25)
    return model


@torch.inference_mode()
def ask_transformers(model: Any, path: Path) -> Theirs:
    model.save_pretrained(path)
    source, answer = torch.tensor([SOURCE]), torch.tensor([ANSWER])
    encoded = model.get_encoder()(source).last_hidden_state[0].numpy()
    logits = model(input_ids=source, decoder_input_ids=answer, use_cache=False).logits[0].numpy()
    generated = model.generate(source, max_new_tokens=NUM_GREEDY, do_sample=False)[0].tolist()
    return Theirs(path, model, encoded, logits, generated)


class Ours:
    def __init__(self, ops: OpSet, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        module = family(checkpoint.config.architecture)
        config = module.config(checkpoint.config)
        model = module.load(ops, checkpoint, config, 2 * MAX_LEN)
        assert model.encode is not None
        num_blocks = 2 * MAX_LEN // BLOCK_SIZE + 4
        cache = ops.new_cache(kv_spec(config, BLOCK_SIZE, "float32"), num_blocks)
        self._encoder = ops.compile(model.encode, cache, ProgramSpec(MAX_LEN, 1, MAX_LEN, sources=True))
        self._decoder = ops.compile(model.forward, cache, ProgramSpec(MAX_LEN, 1, MAX_LEN, sources=True))
        blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self._source_table, self._table = blocks[: MAX_LEN // BLOCK_SIZE], blocks[MAX_LEN // BLOCK_SIZE :]
        self._num_source = 0

    def read(self, source: list[int]) -> np.ndarray:
        """The encoder's output; what answers need of it is in the pages."""
        self._num_source = len(source)
        return on_host(self._encoder.run(self._batch(source, 0, self._source_table)))

    def write(self, ids: list[int], start: int) -> np.ndarray:
        """The logits of all ids from `start` on, those before being in the cache."""
        batch = self._batch(ids, start, self._table)
        batch.source_lens, batch.source_tables = np.array([self._num_source], np.int32), self._source_table[None]
        return on_host(self._decoder.run(batch))

    def _batch(self, ids: list[int], start: int, table: np.ndarray) -> StepBatch:
        positions = np.arange(start, len(ids), dtype=np.int32)
        return StepBatch(
            ids=np.array(ids[start:], np.int32),
            positions=positions,
            slots=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            seq_starts=np.array([0, len(positions)], np.int32),
            context_lens=np.array([len(ids)], np.int32),
            block_tables=table[None],
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )


def check_against_transformers(backend: str, theirs: Theirs) -> None:
    """What the encoder makes of a source; the logits of an answer at once and in chunks; then greedy tokens."""
    ours = Ours(make_ops(backend), theirs.path)
    assert_close(ours.read(SOURCE), theirs.encoded)
    chunks = [ours.write(ANSWER[:end], start) for start, end in ((0, 5), (5, 6), (6, len(ANSWER)))]
    assert_close(np.concatenate(chunks), theirs.logits)
    assert_close(ours.write(ANSWER, 0), theirs.logits)

    ids = [START]
    for _ in range(NUM_GREEDY):
        ids.append(int(ours.write(ids, len(ids) - 1)[-1].argmax()))
    assert ids == theirs.generated
