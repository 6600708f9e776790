"""Layers of one checkpoint in several formats: by patterns, and by recipes of llm-compressor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from quire.cli.main import main
from quire.core.errors import QuireError
from quire.ops.dequantize import dequantize
from quire.quantize.plan import QuantizeError
from quire.quantize.recipe import read_recipe
from quire.weights.checkpoint import open_checkpoint

LAYERS = [f"model.layers.{layer}" for layer in range(2)]
QUICK = ("--report-tokens", "0", "-q", "--calibration-tokens", "256", "--sequence-length", "64")


def quantized(*arguments: object) -> dict[str, Any]:
    """-> quantization_config of the folder that is the second argument."""
    assert main(["quantize", *map(str, arguments), *QUICK]) == 0
    config = json.loads((Path(str(arguments[1])) / "config.json").read_text())
    settings: dict[str, Any] = config["quantization_config"]
    return settings


def values(path: Path, name: str) -> np.ndarray:
    return dequantize(open_checkpoint(path).tensor(name))


def recipe(tmp_path: Path, **modifiers: Any) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"quant_stage": {"quant_modifiers": modifiers}}))
    return path


def test_layers_of_several_formats_are_those_of_each_format_alone(plain_llama: Path, tmp_path: Path) -> None:
    flags = ("--tensor-type", "down_proj=FP8_DYNAMIC", "--tensor-type", r"layers\.1\..*gate_proj=W8A8")
    config = quantized(plain_llama, tmp_path / "mixed", "--method", "W4A16", *flags, "--tensor-type", "v_proj=NVFP4A16")
    assert config["format"] == "mixed-precision"
    groups = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert groups["float-quantized"] == [f"{layer}.mlp.down_proj" for layer in LAYERS]
    assert groups["int-quantized"] == ["model.layers.1.mlp.gate_proj"]
    assert len(groups["pack-quantized"]) == 14 - 2 - 1 - 2
    for method, part in (
        ("FP8_DYNAMIC", "layers.0.mlp.down_proj"), ("W8A8", "layers.1.mlp.gate_proj"),
        ("W4A16", "layers.0.mlp.gate_proj"), ("NVFP4A16", "layers.1.self_attn.v_proj"),
    ):  # fmt: skip
        if not (tmp_path / method).exists():
            quantized(plain_llama, tmp_path / method, method)
        name = f"model.{part}.weight"
        assert np.array_equal(values(tmp_path / "mixed", name), values(tmp_path / method, name)), name


def test_gptq_rounds_the_integers_of_a_mix(plain_llama: Path, tmp_path: Path) -> None:
    flags = ("--algorithm", "gptq", "--tensor-type", "down_proj=FP8_DYNAMIC")
    quantized(plain_llama, tmp_path / "mixed", "--method", "W4A16", *flags)
    for method, algorithm in (("W4A16", "nearest"), ("FP8_DYNAMIC", "nearest")):
        quantized(plain_llama, tmp_path / method, "--method", method, "--algorithm", algorithm)
    down, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "up"))
    assert np.array_equal(values(tmp_path / "mixed", down), values(tmp_path / "FP8_DYNAMIC", down))
    assert not np.array_equal(values(tmp_path / "mixed", up), values(tmp_path / "W4A16", up))


def test_a_recipe_says_which_layers_get_which_scheme(plain_llama: Path, tmp_path: Path) -> None:
    modifier = {
        "ignore": ["lm_head", "re:.*layers.1.*"],
        "scheme": {"W4A16": ["Linear"], "FP8_DYNAMIC": ["re:.*o_proj$"]},
    }
    config = quantized(plain_llama, tmp_path / "out", "--recipe", recipe(tmp_path, QuantizationModifier=modifier))
    groups = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert groups["float-quantized"] == ["model.layers.0.self_attn.o_proj"]
    assert len(groups["pack-quantized"]) == 6 and "model.layers.1.mlp.up_proj" in config["ignore"]


def test_targets_that_are_not_all_layers_leave_the_others(plain_llama: Path, tmp_path: Path) -> None:
    modifier = {"targets": ["re:.*mlp.*", "model.layers.0.self_attn.q_proj"], "scheme": "w8a8"}
    config = quantized(plain_llama, tmp_path / "out", "--recipe", recipe(tmp_path, QuantizationModifier=modifier))
    kept = {name for name in config["ignore"] if "layers" in name}
    assert "model.layers.1.self_attn.q_proj" in kept and "model.layers.0.self_attn.q_proj" not in kept
    assert len(kept) == 14 - 7


def test_numbers_of_groups_and_of_gptq_are_taken_from_the_recipe(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64}
    modifier = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
        "dampening_frac": 0.02, "actorder": "group", "block_size": 128, "kv_cache_scheme": {"num_bits": 8},
    }  # fmt: skip
    read = read_recipe(recipe(tmp_path, GPTQModifier=modifier))
    assert (read.method, read.algorithm, read.group_size) == ("W4A16_ASYM", "gptq", 64)
    assert (read.damping, read.act_order, read.kv_scales) == (0.02, "activation", True)
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["re:.*"], "weights": fp8, "input_activations": inputs}
    assert read_recipe(recipe(tmp_path, QuantizationModifier={"config_groups": {"a": group}})).method == "FP8_DYNAMIC"
    smooth = {"SmoothQuantModifier": {"smoothing_strength": 0.8}, "QuantizationModifier": {"scheme": "W8A8"}}
    read = read_recipe(recipe(tmp_path, **smooth))
    assert (read.algorithm, read.smoothing_strength) == ("smoothquant", 0.8)
    transform = {"AWQModifier": None, "QuantizationModifier": {"scheme": "W4A16"}}
    assert read_recipe(recipe(tmp_path, **transform)).algorithm == "awq"
    assert read_recipe(recipe(tmp_path, AWQModifier={"scheme": "W4A16_ASYM"})).algorithm == "awq"


@pytest.mark.parametrize(
    ("modifiers", "said"),
    [
        ({}, "has no modifiers"),
        ({"QuIPModifier": {}}, "a QuIPModifier, which there is not here"),
        ({"QuantizationModifier": {"scheme": "W4A16", "bits": 4}}, "`bits`, which is not read"),
        ({"QuantizationModifier": {"targets": "Linear"}}, "names no scheme"),
        ({"QuantizationModifier": {"scheme": "W9A16"}}, "no method `W9A16`"),
        ({"QuantizationModifier": {"scheme": "Q4_K_M"}}, "is no method of a folder"),
        ({"QuantizationModifier": "W4A16"}, "is 'W4A16'"),
        ({"GPTQModifier": {"scheme": "W4A16"}, "SmoothQuantModifier": None}, "not combined here"),
        ({"QuantizationModifier": {"scheme": {"W4A16": ["Linear"], "W8A8": "Linear"}}}, "all linear layers W4A16"),
        ({"QuantizationModifier": {"config_groups": {"a": {"weights": {"num_bits": 9}}}}}, "no method has weights"),
        ({"QuantizationModifier": {"scheme": "W4A16", "targets": ["re:(("]}}, "is no regex"),
    ],
)  # fmt: skip
def test_what_a_recipe_asks_for_and_there_is_not_is_refused_by_name(
    modifiers: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(QuireError, match=said.replace("(", r"\(")) as caught:
        read_recipe(recipe(tmp_path, **modifiers))
    assert caught.value.hint


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for path in (tmp_path / "bad.yaml", tmp_path / "none.yaml"):
        with pytest.raises(QuantizeError, match="--recipe"):
            read_recipe(path)


def test_formats_of_other_libraries_are_not_mixed(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--method", "W4A16", "--tensor-type", "down_proj=NF4"]
    assert main(["quantize", str(plain_llama), str(tmp_path / "out"), *flags]) != 0
    assert "NF4 is written as bitsandbytes, which has one format for all layers" in capsys.readouterr().err
