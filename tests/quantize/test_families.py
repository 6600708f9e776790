"""Families other than Llama: what is written is near the original, and transformers computes the same with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from quantize.plain_models import write_plain
from quire.quantize import smoothing
from quire.quantize.calibration import default_text, sequences
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.floats import read_floats
from quire.quantize.gptq import GPTQOptions
from quire.quantize.plan import QuantizeOptions
from quire.quantize.quality import compare, last_states
from quire.quantize.run import QuantizeRun
from quire.weights.checkpoint import open_checkpoint

CALIBRATION = CalibrationOptions(measured_tokens=0, num_tokens=256, length=64)


def held_out(source: Path) -> list[int]:
    return sequences(source, default_text()[:20_000], 48, 256)[1][0]


def written(source: Path, out: Path, method: str, algorithm: str | None = None) -> Path:
    run = QuantizeRun(source, out, QuantizeOptions(method))
    quantize(run, CALIBRATION, algorithm, GPTQOptions(), lambda *_: None)
    return out


@pytest.mark.parametrize(
    ("family", "layers", "method", "algorithm", "divergence"),
    [
        ("Gemma3", 1, "W4A16", "gptq", 0.02),
        ("Qwen3", 1, "AWQ", "awq", 0.3),
        ("Qwen3Moe", 1, "GPTQ", "gptq", 0.3),
        ("Qwen3Moe", 1, "W8A8", "smoothquant", 0.01),
        ("Qwen3Next", 2, "W4A16", "gptq", 0.6),
        ("Lfm2", 2, "W4A16", "awq", 0.3),
    ],
)
def test_a_family_is_quantized_and_read_back(
    family: str, layers: int, method: str, algorithm: str, divergence: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(smoothing, "EXPONENTS", smoothing.EXPONENTS[::5])
    source = tmp_path / "model"
    write_plain(source, family, num_hidden_layers=layers)
    out = written(source, tmp_path / "out", method, algorithm)
    ids = held_out(source)
    before, after = (last_states(open_checkpoint(path), [ids]) for path in (source, out))
    assert compare(before, after, [ids]).kl.value < divergence
    floats = written(out, tmp_path / "floats", "F32")  # its values, without the format
    model = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    ours = after.rows(0, len(ids))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_rows_that_a_model_takes_in_another_order_are_written_as_they_were_stored(tmp_path: Path) -> None:
    """Of Qwen3-Next, queries lie between gates, and q, k, v and z of a head together; a run that goes on reads some."""
    source, out = tmp_path / "model", tmp_path / "out"
    write_plain(source, "Qwen3Next")
    run = QuantizeRun(source, out, QuantizeOptions("W4A16", ignore=("mlp",)))

    def stop(phase: str, done: float, total: float) -> None:
        if phase == "GPTQ" and done > 0.4 * total:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        quantize(run, CALIBRATION, "gptq", GPTQOptions(), stop)
    assert quantize(run, CALIBRATION, "gptq", GPTQOptions(), lambda *_: None).written.resumed > 0
    for name in ("model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.1.self_attn.q_proj.weight"):
        before, after = (read_floats(open_checkpoint(path).tensor(name)) for path in (source, out))
        assert np.square(after - before).mean() < 0.04 * np.square(before).mean()
    ids = held_out(source)
    before, after = (last_states(open_checkpoint(path), [ids]) for path in (source, out))
    assert compare(before, after, [ids]).kl.value < 0.2
