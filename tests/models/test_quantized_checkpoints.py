"""Checkpoints in every quantized format, from files to logits: each backend beside plain torch on the plain values."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.test_llama import PROMPT, compute, make_ops
from weights.quantized_files import CONFIG, FORMATS, write_model


@cache
def truth(name: str, path: Path) -> np.ndarray:
    """Logits of a plain fp32 checkpoint with the values that the quantized one stands for."""
    save_file(write_model(path, name), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return compute(make_ops("torch"), path)(PROMPT, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_on_every_backend(tmp_path: Path, name: str) -> None:
    expected = truth(name, tmp_path / "plain")
    write_model(tmp_path / "quantized", name)
    plain = compute(make_ops("torch"), tmp_path / "quantized")(PROMPT, 0)
    np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    native = compute(make_ops("native"), tmp_path / "quantized")
    logits = native(PROMPT, 0)
    # 8-bit activations cost about 1.5 %; tables of whole numbers as much again; floats of 16 bits less than either.
    assert np.linalg.norm(logits - expected) < 0.04 * np.linalg.norm(expected)
    np.testing.assert_array_equal(native(PROMPT, len(PROMPT) - 1)[0], logits[-1])
