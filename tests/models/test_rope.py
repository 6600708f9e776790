"""Rotary frequencies against those of transformers."""

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.rope import frequencies, read_rope

HEAD_DIM = 32
FACTORS = [1.0 + i / 16 for i in range(HEAD_DIM // 2)]
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": [3 * f for f in FACTORS],
        "original_max_position_embeddings": 512,
    },
    {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 512,
        "factor": 16.0,
    },
]


@pytest.mark.parametrize("max_model_len", [256, 2048, 5000])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_scalings_are_those_of_transformers(scaling: dict[str, Any], max_model_len: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 20000.0, **scaling},
    )
    theirs, their_scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=max_model_len)
    older = read_rope({"rope_theta": 20000.0, "rope_scaling": scaling}, HEAD_DIM, 2048)
    newer = read_rope({"rope_parameters": {"rope_theta": 20000.0, **scaling}}, HEAD_DIM, 2048)
    for spec in (older, newer):
        ours, our_scale = frequencies(spec, max_model_len)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
        assert our_scale == pytest.approx(their_scale)


def test_without_scaling() -> None:
    inv_freq, scale = frequencies(read_rope({}, 8, 100), 100)
    np.testing.assert_allclose(inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    assert scale == 1


def test_part_of_a_head_turns() -> None:
    spec = read_rope({"partial_rotary_factor": 0.25}, HEAD_DIM, 100)
    assert spec.rotary_dim == 8
    np.testing.assert_allclose(frequencies(spec, 100)[0], [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_factors_from_a_file_divide() -> None:
    inv_freq, _ = frequencies(read_rope({}, 8, 100), 100, np.array([1, 1, 2, 8], np.float32))
    np.testing.assert_allclose(inv_freq, [1, 0.1, 0.005, 0.000125], rtol=1e-6)
    with pytest.raises(BadCheckpoint, match="3 factors"):
        frequencies(read_rope({}, 8, 100), 100, np.ones(3, np.float32))


def test_lengths() -> None:
    yarn = read_rope({"rope_scaling": SCALINGS[2]}, HEAD_DIM, 512)  # the length before stretching was kept
    assert (yarn.default_length, yarn.max_length) == (2048, 2048)
    dynamic = read_rope({"rope_scaling": SCALINGS[1]}, HEAD_DIM, 512)
    assert (dynamic.default_length, dynamic.max_length) == (512, 2048)


def test_unknown_and_incomplete_scalings() -> None:
    with pytest.raises(Unsupported, match="`spiral`"):
        read_rope({"rope_scaling": {"type": "spiral"}}, HEAD_DIM, 512)
    with pytest.raises(BadCheckpoint, match="`rope_scaling` is 4"):
        read_rope({"rope_scaling": 4}, HEAD_DIM, 512)
    with pytest.raises(BadCheckpoint, match="is 'four' and not a number"):
        frequencies(read_rope({"rope_scaling": {"type": "linear", "factor": "four"}}, HEAD_DIM, 512), 512)
    with pytest.raises(BadCheckpoint, match="`factor`"):
        frequencies(read_rope({"rope_scaling": {"type": "linear"}}, HEAD_DIM, 512), 512)
    with pytest.raises(BadCheckpoint, match="`short_factor` has 1 factors"):
        frequencies(read_rope({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, HEAD_DIM, 512), 512)
