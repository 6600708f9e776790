"""Quantized checkpoints: every value is the one that the format means, and what does not fit together is named."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import _native
from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.ops.dequantize import dequantize
from quire.weights.bits import packed_words, unpack
from quire.weights.checkpoint import open_checkpoint
from weights.quantized_files import (
    CONFIG,
    FORMATS,
    HIDDEN,
    PACKED,
    awq,
    compressed,
    eetq_bytes,
    fp8,
    gptq,
    packed,
    words_of,
    write_model,
)

MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_that_the_format_means(tmp_path: Path, name: str) -> None:
    values = write_model(tmp_path / name, name)
    checkpoint = open_checkpoint(tmp_path / name)
    assert sorted(checkpoint.names()) == sorted(values)
    for weight, expected in values.items():
        tensor = checkpoint.tensor(weight)
        assert checkpoint.shape(weight) == tensor.shape == expected.shape
        found = dequantize(tensor).reshape(expected.shape)
        # Of two products and a sum, or a quotient, that are in another order here.
        last_bits = 1e-7 if name in ("gptq-8-asymmetric", "bitsandbytes-int8") else 0
        np.testing.assert_allclose(found, expected, rtol=0, atol=last_bits)
        if "proj" in weight:
            assert tensor.type.name == FORMATS[name].stored_as


@pytest.mark.parametrize("name", FORMATS)
def test_packing_for_a_cpu(tmp_path: Path, name: str) -> None:
    """Exact where the table says so, and as small as the format promises, with a scale for 32 weights."""
    expected = write_model(tmp_path / name, name)[MATRIX]
    tensor = open_checkpoint(tmp_path / name).tensor(MATRIX)
    matrix = _native.Matrix(tensor.type.name, [tensor.data], tensor.num_columns, None, tensor.column_order)
    if FORMATS[name].exact:
        np.testing.assert_allclose(matrix.dequantized(), expected, rtol=0, atol=1e-7 if "8-asym" in name else 0)
    else:
        np.testing.assert_allclose(matrix.dequantized(), expected, rtol=2**-8, atol=0.004 * np.abs(expected).max())
    bits = {"Q4_0": 4.5, "Q4_Z": 5, "Q8_0": 8.5, "Q8_M": 10, "Q8_F": 9, "NF4": 5, "FP4": 5, "FP8": 16, "F16": 16}[
        tensor.type.name
    ]
    assert matrix.nbytes == expected.size * bits / 8


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_number_of_bits(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 37))
    assert words_of(codes, bits).shape[1] == packed_words(37, bits)
    np.testing.assert_array_equal(unpack(words_of(codes, bits), bits, 37), codes)


# Of what the steps of EETQ's preprocessing (cutlass_preprocessors.cc, int8, compute capability 7.5 to 8.9), followed on
# a CPU, make of `eetq_codes`.
EETQ = {
    (64, 64): "70c66e41be41656c73d0e7b1d814667a5690a9511cc28661bf321a739e725aa4",
    (192, 64): "0c1d5e25100f2cbca8cb067c317b9347361303797872b0ad4d584f6f9ebe86fc",
    (64, 192): "6f009e01db4b5b8c612ae01e67e290dc683fcdb823be70d2c93ead2c79ec1c1b",
    (320, 128): "022446a7dc2628fdfc2331bda3c1cc8cb3083412eded76b8a6b097afe8949da9",
}


def eetq_codes(shape: tuple[int, int]) -> np.ndarray:
    mixed = np.arange(shape[0] * shape[1], dtype=np.uint64) * 2654435761 >> 16
    return mixed.astype(np.uint8).view(np.int8).reshape(shape)


@pytest.mark.parametrize("shape", EETQ)
def test_eetq_is_read_as_its_library_writes_it(tmp_path: Path, shape: tuple[int, int]) -> None:
    stored = eetq_bytes(eetq_codes(shape))
    assert hashlib.sha256(stored).hexdigest() == EETQ[shape]
    tensors = {"x.weight": torch.from_numpy(stored), "x.weight_scales": torch.ones(shape[1]).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": FORMATS["eetq"].config}))
    np.testing.assert_array_equal(dequantize(open_checkpoint(tmp_path).tensor("x.weight")), eetq_codes(shape).T)


def test_eetq_of_fused_layers_is_refused(tmp_path: Path) -> None:
    save_file({"x.q_proj.qweight": torch.zeros(64, 64, dtype=torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "eetq"}}))
    with pytest.raises(Unsupported, match=r"x\.q_proj\.qweight is in the layout of EETQ's own tool"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("settings", "threshold"), [({}, 6.0), ({"llm_int8_threshold": 3}, 3.0), ({"llm_int8_threshold": 0.0}, 0.0)]
)
def test_the_threshold_of_outliers_comes_with_the_weights_of_llm_int8(
    tmp_path: Path, settings: dict, threshold: float
) -> None:
    for name in ("bitsandbytes-int8", "bitsandbytes-nf4"):
        write_model(tmp_path, name, settings)
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.tensor(MATRIX).threshold == (threshold if name.endswith("int8") else 0)
        assert checkpoint.tensor("model.embed_tokens.weight").threshold == 0


@pytest.mark.parametrize(
    ("name", "inputs", "activations"),
    [
        ("w8a8", {"type": "int", "num_bits": 8, "dynamic": True}, "int8"),
        ("w8a8", {"type": "int", "num_bits": 8, "dynamic": False, "strategy": "tensor"}, "int8"),
        ("w8a8", None, ""),
        ("packed-4", {"type": "float", "num_bits": 8}, "fp8"),
        ("packed-4", {"type": [], "num_bits": {}}, ""),
    ],
)
def test_checkpoints_for_8_bit_activations_say_so_of_their_weights(
    tmp_path: Path, name: str, inputs: dict | None, activations: str
) -> None:
    weights = FORMATS[name].config["config_groups"]["group_0"]["weights"]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    write_model(tmp_path, name, {"config_groups": groups})
    assert open_checkpoint(tmp_path).tensor(MATRIX).activations == activations


def test_a_threshold_below_zero_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, "bitsandbytes-int8", {"llm_int8_threshold": -1.0})
    with pytest.raises(BadCheckpoint, match=r"llm_int8_threshold is -1\.0"):
        open_checkpoint(tmp_path)


ODD = ["gptq-4-act-order", "awq-gemm", "bitsandbytes-nf4", "fp8-outputs", "packed-4", "w8a8"]


@pytest.mark.parametrize("columns", [48, 80])
@pytest.mark.parametrize("name", ODD)
def test_rows_of_any_length_keep_their_values(tmp_path: Path, name: str, columns: int) -> None:
    """They fit no packed layout, and become plain floats."""
    group = columns // 2
    packers = {
        "gptq-4-act-order": gptq(4, group, symmetric=False, act_order=True),
        "awq-gemm": awq("gemm", group),
        "packed-4": packed(4, group, symmetric=False),
    }
    w = np.random.default_rng(1).normal(0, 0.1, (64, columns)).astype(np.float32)
    tensors, expected = packers.get(name, FORMATS[name].pack)(w)
    settings = dict(FORMATS[name].config)
    if "group_size" in settings:
        settings["group_size"] = group
    if name == "packed-4":
        settings = compressed(PACKED, 4, group)
    save_file({f"x.{part}": tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
    tensor = open_checkpoint(tmp_path).tensor("x.weight")
    assert tensor.type.name == "F32"
    np.testing.assert_allclose(dequantize(tensor), expected, rtol=1e-6, atol=1e-7)


def test_fp8_matrices_below_each_other_have_blocks_of_their_own(tmp_path: Path) -> None:
    """As q, k and v of each rank in MiMo-V2.5: 144 rows are two blocks, and all 432 would be four."""
    w = np.random.default_rng(1).normal(0, 0.1, (432, 256)).astype(np.float32)
    packed_parts = [fp8("blocks", "weight_scale_inv")(part) for part in np.split(w, 3)]
    tensors = {f"x.{name}": torch.cat([part[name] for part, _ in packed_parts]) for name in packed_parts[0][0]}
    assert len(tensors["x.weight_scale_inv"]) == 6
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}}))
    found = dequantize(open_checkpoint(tmp_path).tensor("x.weight")).reshape(w.shape)
    np.testing.assert_array_equal(found, np.concatenate([expected for _, expected in packed_parts]))


def damaged(path: Path, name: str, part: str, tensor: torch.Tensor | None) -> Path:
    """A model whose tensors called `part` are replaced, or missing."""
    write_model(path, name)
    tensors = load_file(path / "model.safetensors")
    for key in [key for key in tensors if key.endswith(f"down_proj.{part}")]:
        del tensors[key]
        if tensor is not None:
            tensors[key] = tensor.clone()
    save_file(tensors, path / "model.safetensors")
    return path


WRONG = {
    "gptq scales of another shape": ("gptq-4", "scales", torch.zeros(4, HIDDEN + 8).half(), "down_proj.*is"),
    "gptq without scales": ("gptq-4", "scales", None, r"no tensor.*down_proj\.scales"),
    "gptq groups that do not exist": ("gptq-4", "g_idx", torch.full((256,), 9, dtype=torch.int32), "groups 9 to 9"),
    "gptq codes of no known size": ("gptq-4", "g_idx", torch.zeros(100, dtype=torch.int32), "qweight.*100 inputs"),
    "awq zeros of another shape": ("awq-gemm", "qzeros", torch.zeros(3, 16, dtype=torch.int32), r"qzeros.*\[3, 16\]"),
    "a quant_state that is not JSON": (
        "bitsandbytes-nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), "is not JSON",
    ),
    "too few codes": ("bitsandbytes-nf4", "weight", torch.zeros(5, 1, dtype=torch.uint8), r"5 bytes.*\[128, 256\]"),
    "too few SCB": ("bitsandbytes-int8", "SCB", torch.zeros(5), r"SCB.*\[5\].*\[128\]"),
    "a packed weight of another size": (
        "packed-4", "weight_shape", torch.tensor([128, 512]), r"weight_packed.*\[128, 32\].*\[128, 512\]",
    ),
    "fp8 scales of no shape": ("fp8-blocks", "weight_scale_inv", torch.zeros(7, 3), r"weight_scale_inv.*\[7, 3\]"),
    "hqq scales of no shape": ("hqq-4", "scale", torch.zeros(77, 1), r"zero.*\[512, 1\].*\[77, 1\]"),
    "hqq codes of another shape": ("hqq-4", "W_q", torch.zeros(9, 64, dtype=torch.uint8), r"W_q.*\[9, 64\]"),
    "hqq of five bits": ("hqq-4", "nbits", torch.tensor(5, dtype=torch.int32), "nbits' is 5"),
    "eetq scales of another shape": ("eetq", "weight_scales", torch.zeros(5), r"weight_scales.*\[5\].*\[128\]"),
    "eetq codes that fill no tiles": ("eetq", "weight", torch.zeros(64, 96, dtype=torch.int8), r"I8 \[64, 96\].*64"),
    "a group size that does not divide the inputs": (
        "packed-4", "weight_scale", torch.zeros(128, 2), r"weight_scale.*\[128, 2\] for \[128, 256\] in 4 bits.*is 64",
    ),
    "int8 scales of groups that are not configured": (
        "w8a8", "weight_scale", torch.zeros(128, 4), r"weight_scale.*\[128, 4\] for \[128, 256\] in 8 bits",
    ),
    "int8 scales of no shape": ("w8a8", "weight_scale", torch.zeros(7), r"weight_scale.*\[7\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_together_is_named(tmp_path: Path, case: str) -> None:
    name, part, tensor, message = WRONG[case]
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(damaged(tmp_path, name, part, tensor)).tensor(MATRIX)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        ({"quant_method": "eetq", "weights": "int4"}, "weights is 'int4'"),
        ({"quant_method": "gptq", "bits": 5}, "quantization_config.bits is 5"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
        ({"quant_method": "fp8", "weight_block_size": [128, "wide"]}, r"weight_block_size is \[128, 'wide'\]"),
    ],
)
def test_what_nobody_wrote_code_for_is_named(tmp_path: Path, settings: dict, message: str) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
    with pytest.raises(QuireError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "gptq-4"), ("quant_config.json", "awq-gemm")])
def test_older_checkpoints_have_a_file_of_their_own(tmp_path: Path, file: str, name: str) -> None:
    expected = write_model(tmp_path, name)
    settings = dict(FORMATS[name].config)
    del settings["quant_method"]
    if name == "awq-gemm":
        settings = {"w_bit": 4, "q_group_size": settings["group_size"], "version": "GEMM"}
    (tmp_path / file).write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    np.testing.assert_array_equal(dequantize(open_checkpoint(tmp_path).tensor(MATRIX)), expected[MATRIX])


def test_scales_of_activations_and_of_the_cache_are_not_weights(tmp_path: Path) -> None:
    names = sorted(write_model(tmp_path, "fp8-outputs"))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("mlp.up_proj.input_scale", "self_attn.k_scale", "self_attn.v_proj.output_scale"):
        tensors[f"model.layers.0.{name}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(open_checkpoint(tmp_path).names()) == names


def test_errors_are_ours(tmp_path: Path) -> None:
    """Whatever is missing of a quantized module, it is said in our words."""
    for name in FORMATS:
        write_model(tmp_path, name)
        tensors = load_file(tmp_path / "model.safetensors")
        for part in [part for part in tensors if "layers.1.mlp.down_proj" in part]:
            save_file({key: value for key, value in tensors.items() if key != part}, tmp_path / "model.safetensors")
            try:
                checkpoint = open_checkpoint(tmp_path)
                if MATRIX in checkpoint.names():
                    checkpoint.tensor(MATRIX)
            except QuireError as error:
                assert "down_proj" in error.message, (name, part)


def test_hqq_along_the_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"down_proj\.view_as_float is 1"):
        open_checkpoint(damaged(tmp_path, "hqq-4", "view_as_float", torch.tensor(1, dtype=torch.uint8)))
    with pytest.raises(BadCheckpoint, match=r"down_proj\.scale.*and the weight is"):
        open_checkpoint(damaged(tmp_path, "hqq-4", "axis", torch.tensor(0, dtype=torch.int32)))


def test_groups_of_another_size_than_the_configured_are_refused(tmp_path: Path) -> None:
    """They would be read as groups of the size that the number of scales suggests."""
    write_model(tmp_path, "packed-4", compressed(PACKED, 4, 96))
    with pytest.raises(BadCheckpoint, match=r"weight_scale.*and group_size is 96"):
        open_checkpoint(tmp_path)
    write_model(tmp_path, "gptq-4", {"group_size": 100})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: data for name, data in tensors.items() if "g_idx" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"scales.*inputs, and group_size is 100"):
        open_checkpoint(tmp_path)
