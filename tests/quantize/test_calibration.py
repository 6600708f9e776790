"""The forward pass that calibrates, what it sums, and what that gains."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quantize.plain_models import FAMILIES, RECURRENT, UNEVEN, VOCAB, write_plain
from quire.quantize.calibration import collect_importance, default_text, sequences
from quire.quantize.command import CalibrationOptions, cut_to, quantize
from quire.quantize.device import CPU
from quire.quantize.eager_model import EagerModel
from quire.quantize.eager_ops import EagerLogits, StoredWeights
from quire.quantize.gguf_plan import gguf_tensors
from quire.quantize.gptq import GPTQOptions
from quire.quantize.imatrix import read_imatrix, write_imatrix
from quire.quantize.plan import Importance, QuantizeOptions
from quire.quantize.quality import compare, last_states
from quire.quantize.run import QuantizeRun, write
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.delegating_checkpoint import DelegatingCheckpoint

RNG = np.random.default_rng(3)
IDS = [RNG.integers(3, VOCAB - 5, length).tolist() for length in (140, 25)]  # the first is two blocks of queries


@pytest.mark.parametrize("name", [*FAMILIES, *RECURRENT, *UNEVEN])
def test_the_forward_pass_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_plain(tmp_path, name)
    logits = last_states(open_checkpoint(tmp_path), IDS)
    assert isinstance(logits, EagerLogits)
    ours = logits.rows(0, sum(map(len, IDS)))
    with torch.no_grad():
        theirs = np.concatenate([model(torch.tensor([ids])).logits[0].numpy() for ids in IDS])
    assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


def test_sums_are_those_of_the_inputs_of_each_layer(plain_llama: Path) -> None:
    checkpoint = open_checkpoint(plain_llama)
    importance = collect_importance(checkpoint, IDS, "ids", CPU(), lambda *_: None)
    seen: dict[str, np.ndarray] = {}

    class Inputs(StoredWeights):
        def observe(self, parts, x, source=None, stream=None):  # type: ignore[no-untyped-def]
            seen.update({part.name: x for part in parts})

    EagerModel(checkpoint, 140, Inputs())(IDS)
    assert importance.sums.keys() == seen.keys()
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.allclose(importance.of(name), (seen[name] ** 2).mean(0), rtol=1e-4)
    assert importance.counts[name] == 165


def test_an_imatrix_is_written_as_llama_cpp_does_and_read_back(plain_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(plain_llama)
    importance = collect_importance(checkpoint, IDS, "ids.txt", CPU(), lambda *_: None)
    tensors = gguf_tensors(checkpoint)
    path = tmp_path / "imatrix.gguf"
    assert write_imatrix(path, importance, tensors, 2, 40) == 15
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["ids.txt"]
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    assert stored["blk.0.attn_q.weight.in_sum2"].shape == (1, 256)
    assert stored["blk.0.attn_q.weight.counts"].item() == 165
    again = read_imatrix(path, tensors)
    for name, vector in again.sums.items():
        assert np.array_equal(vector, importance.sums[name])
    run = QuantizeRun(plain_llama, tmp_path / "out.gguf", QuantizeOptions("Q4_K_S"))
    options = CalibrationOptions(imatrix=path, measured_tokens=0)
    outcome = quantize(run, options, None, GPTQOptions(), lambda *_: None)
    assert gguf.GGUFReader(tmp_path / "out.gguf").fields["quantize.imatrix.file"].contents() == "imatrix.gguf"
    assert outcome.written.plan.bits_a_weight < 6


def test_a_model_differs_from_itself_in_nothing(plain_llama: Path) -> None:
    logits = last_states(open_checkpoint(plain_llama), IDS)
    same = compare(logits, logits, IDS)
    assert same.kl.value == same.kl_p99 == 0 and same.same_top.value == same.perplexity_ratio.value == 1
    assert same.num_tokens == 165


def test_held_out_sequences_are_not_calibrated_with(plain_llama: Path) -> None:
    used, held_out = sequences(plain_llama, default_text()[:50_000], 128, 10_000)
    assert sum(map(len, used)) <= 10_000 and len(used[0]) == 128
    assert not {tuple(s) for s in used} & {tuple(s) for s in held_out}
    assert sum(map(len, cut_to(held_out, 300))) == 300


class FirstLayers(DelegatingCheckpoint):
    """A model cut off after some layers."""

    def __init__(self, checkpoint: Checkpoint, num_layers: int) -> None:
        super().__init__(checkpoint)
        self._num_layers = num_layers

    @property
    def config(self) -> CheckpointConfig:
        return self._checkpoint.config.with_values({"num_hidden_layers": self._num_layers})

    def names(self) -> list[str]:
        dropped = re.compile(r"model\.layers\.(\d+)\.")
        known = ((name, dropped.match(name)) for name in super().names())
        return [name for name, match in known if match is None or int(match[1]) < self._num_layers]


@pytest.mark.slow
def test_importance_lowers_the_divergence_of_the_default_model(default_model: Path, tmp_path: Path) -> None:
    """Of its dequantized weights: the file is a 4-bit one. To keep this quick, three layers are quantized and run."""
    checkpoint = FirstLayers(open_checkpoint(default_model), 3)
    used, held_out = sequences(default_model, default_text()[:60_000], 64, 192)
    importance = collect_importance(checkpoint, used, "the default text", CPU(), lambda *_: None)
    measured = cut_to(held_out, 64)
    original = last_states(checkpoint, measured)
    losses = []
    for index, given in enumerate((Importance(), importance)):
        out = tmp_path / f"{index}.gguf"
        options = QuantizeOptions("Q4_0", requantize=True, pure=True, ignore=(r"blk\.([3-9]|\d\d)\.", "token_embd"))
        run = QuantizeRun(default_model, out, options, importance=given)
        write(run.plan(checkpoint), run.settings(), lambda *_: None)
        states = last_states(FirstLayers(open_checkpoint(out), 3), measured)
        losses.append(compare(original, states, measured).kl.value)
    assert losses[1] < 0.8 * losses[0], losses
