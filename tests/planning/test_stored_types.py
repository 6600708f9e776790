"""A quantized model that is planned by its config.json alone is the one that its files give."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.planning.packed_bytes import GpuFormat, NativeFormat, PackedFormat, packing_of
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.shape_checkpoint import quantized_checkpoint, shape_checkpoint
from quire.planning.stored_types import METHODS, config_format
from quire.weights.checkpoint import open_checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.formats import FORMATS as READERS
from quire.weights.huggingface import read_config
from weights.quantized_files import CONFIG, FORMATS, Tensors, compressed, write_model
from weights.quantized_files import packed as packed_words

ASYMMETRIC = ("gptq-4-asymmetric", "gptq-4-act-order", "gptq-4-second", "gptq-3", "gptq-8-asymmetric")
BITSANDBYTES = {
    "bitsandbytes-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes-nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bitsandbytes-fp4": {"load_in_4bit": True},
    "bitsandbytes-int8": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
}
GROUPS = {"gptq-4-asymmetric": 32, "gptq-3": 32}


def settings_of(name: str) -> dict[str, Any]:
    """What the tools that write such files say besides."""
    config = dict(FORMATS[name].config)
    if config["quant_method"] == "gptq":
        config |= {"sym": name not in ASYMMETRIC, "group_size": GROUPS.get(name, config["group_size"])}
    if config["quant_method"] == "hqq":
        bits, axis = int(name[4]), 0 if name.endswith("outputs") else 1
        group = {"hqq-3": 32, "hqq-3-outputs": 32, "hqq-8": 128}.get(name, 64)
        config["quant_config"] = {"weight_quant_params": {"nbits": bits, "group_size": group, "axis": axis}}
    if config["quant_method"] == "compressed-tensors":
        group = json.loads(json.dumps(config["config_groups"]["group_0"]))
        group["weights"] |= {
            "type": "float" if name.startswith("fp8") else "int",
            "symmetric": name != "packed-4-asymmetric",
        }
        config |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return config | BITSANDBYTES.get(name, {})


def in_half(tensors: Tensors) -> Tensors:
    """Matrices in floats, as published files have them."""
    names = ("embed_tokens.weight", "lm_head.weight")
    return {name: tensor.half() if name.endswith(names) else tensor for name, tensor in tensors.items()}


def write(path: Path, tensors: Tensors, settings: dict[str, Any]) -> Path:
    save_file(in_half(tensors), path / "model.safetensors")
    config = CONFIG | {"torch_dtype": "float16", "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    return path


def by_files(folder: Path, packing: PackedFormat) -> PlannedModel:
    return plan_model("files", open_checkpoint(folder), packing)


def by_config(folder: Path, packing: PackedFormat) -> PlannedModel:
    config = read_config(folder)
    stored = config_format(config, folder)
    assert stored is not None and not stored.unknown
    return plan_model("config", quantized_checkpoint(config, stored), packing)


def assert_planned_alike(folder: Path) -> None:
    """Every matrix, by its name, type and bytes, on both kinds of hardware."""
    for packing in (NativeFormat(), packing_of(read_config(folder), on_gpu=True)):
        plans = [count(folder, packing) for count in (by_files, by_config)]
        tensors = [{tensor.name: (tensor.type, tensor.nbytes) for tensor in plan.tensors} for plan in plans]
        assert tensors[0] == tensors[1]
        for total in ("weight_bytes", "table_bytes", "vector_bytes", "num_parameters"):
            assert getattr(plans[0], total) == getattr(plans[1], total), total
        assert sorted(plans[0].allocations) == sorted(plans[1].allocations)
        assert sorted(plans[0].copies) == sorted(plans[1].copies)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_counted_as_its_files_are(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, name)
    assert_planned_alike(write(tmp_path, load_file(tmp_path / "model.safetensors"), settings_of(name)))


def test_every_method_that_is_read_is_planned() -> None:
    assert METHODS.keys() == READERS.keys()


def kept_in_floats(tensors: Tensors, module: str) -> Tensors:
    """The module's weight in floats, of the shape that it has in the model."""
    shape = (128, 256) if "down" in module else (256, 128) if "mlp" in module else (128, 128)
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{module}.")}
    assert others.keys() != tensors.keys()
    return others | {f"{module}.weight": torch.zeros(shape, dtype=torch.float16)}


# -- experts and latent attention --------------------------------------------------------------------------------------

TINY = {"hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
TINY |= {"torch_dtype": "float16", "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
QWEN3_MOE = TINY | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 4, "mlp_only_layers": [0]}
DEEPSEEK = TINY | {
    "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "more"),
    [
        (QWEN3_MOE, "awq-gemm", {"modules_to_not_convert": ["mlp.gate"]}),
        (QWEN3_MOE, "packed-4", {"ignore": ["lm_head", "re:.*mlp.gate$"]}),
        (DEEPSEEK, "fp8-blocks", {"weight_block_size": [128, 128]}),
    ],
)
def test_experts_and_latent_attention_are_counted_as_their_files_are(
    tmp_path: Path, config: dict[str, Any], name: str, more: dict[str, Any]
) -> None:
    shapes = shape_checkpoint(CheckpointConfig(tmp_path / "config.json", config))
    plan_model("shapes", shapes, NativeFormat())
    tensors: Tensors = {}
    for weight, shape in shapes.shapes.items():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        module = weight.removesuffix(".weight")
        packed, _ = FORMATS[name].pack(values.numpy()) if module.rpartition(".")[2] in PACKED else ({}, None)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in packed.items()}
        tensors |= {} if packed else {weight: values.half()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quantization_config": settings_of(name) | more}
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    assert_planned_alike(tmp_path)


def test_the_experts_of_gpt_oss_are_in_mxfp4(tmp_path: Path) -> None:
    """A file has blocks and scales of all experts in one tensor each, and a plan by config.json has their matrices."""
    config = TINY | {
        "architectures": ["GptOssForCausalLM"], "head_dim": 32, "num_local_experts": 4, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True, "swiglu_limit": 7.0,
    }  # fmt: skip
    shapes = shape_checkpoint(CheckpointConfig(tmp_path / "config.json", config))
    plan_model("shapes", shapes, NativeFormat())
    tensors: Tensors = {}
    for name, shape in shapes.shapes.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = shape
            tensors[f"{name}_blocks"] = torch.zeros((experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 127, dtype=torch.uint8)
        else:
            tensors[name] = torch.zeros(shape, dtype=torch.float16)
    assert sum(name.endswith("_blocks") for name in tensors) == 4
    write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    for packing in (NativeFormat(), GpuFormat()):
        files, planned = by_files(tmp_path, packing), by_config(tmp_path, packing)
        for total in ("weight_bytes", "table_bytes", "vector_bytes", "num_parameters"):
            assert getattr(files, total) == getattr(planned, total), total
        assert sum(files.allocations) == sum(planned.allocations)


PACKED = ("gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj")
PACKED += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

LEFT = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("gptq-4", {"dynamic": {r"-:.*\.1\.mlp\.down_proj": {}}}),
        ("awq-gemm", {"modules_to_not_convert": [LEFT]}),
        ("bitsandbytes-nf4", {"llm_int8_skip_modules": ["lm_head", LEFT]}),
        ("packed-4", {"ignore": ["lm_head", r"re:.*layers\.1\.mlp\.down"]}),
        ("packed-4", {"ignore": ["lm_head", LEFT]}),
        ("fp8-blocks", {"modules_to_not_convert": ["lm_head", LEFT, "model.layers.1.mlp.up"]}),
        ("fp8-tensor", {"ignored_layers": ["lm_head", LEFT]}),
        ("eetq", {"modules_to_not_convert": ["lm_head", LEFT]}),
        ("hqq-4", {"skip_modules": ["lm_head", "layers.1.mlp.down_proj"]}),
    ],
)
def test_layers_that_are_left_in_floats_are(tmp_path: Path, name: str, left: dict[str, Any]) -> None:
    write_model(tmp_path, name)
    tensors = kept_in_floats(load_file(tmp_path / "model.safetensors"), LEFT)
    assert_planned_alike(write(tmp_path, tensors, settings_of(name) | left))


def mixed(tensors: Tensors, module_ends: str, bits: int, symmetric: bool) -> Tensors:
    """Some layers packed in other bits."""
    changed = {name: tensor for name, tensor in tensors.items() if module_ends not in name}
    for module in {name.rpartition(".")[0] for name in tensors.keys() - changed.keys()}:
        shape = tensors[f"{module}.weight_shape"].tolist()
        w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).numpy()
        parts, _ = packed_words(bits, 64, symmetric=symmetric)(w)
        changed |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    return changed


@pytest.mark.parametrize("targets", [["re:.*down_proj$"], [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]])
def test_groups_of_compressed_tensors_have_types_of_their_own(tmp_path: Path, targets: list[str]) -> None:
    """The one that names a layer goes before the one of all linear layers, whichever comes first."""
    write_model(tmp_path, "packed-4")
    tensors = mixed(load_file(tmp_path / "model.safetensors"), "down_proj", 8, symmetric=False)
    weights = {"type": "int", "strategy": "group", "group_size": 64}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {**weights, "num_bits": 4, "symmetric": True}},
        "group_1": {"targets": targets, "weights": {**weights, "num_bits": 8, "symmetric": False}},
    }
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
    assert_planned_alike(write(tmp_path, tensors, settings | {"config_groups": groups}))


def type_by_config(settings: dict[str, Any], name: str, **more: Any) -> str:
    config = CheckpointConfig(Path("config.json"), {"torch_dtype": "bfloat16", **more, "quantization_config": settings})
    stored = config_format(config, Path("/nowhere"))
    assert stored is not None
    return stored.type_of(f"{name}.weight", 2).name


Q_PROJ, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.7.down_proj"


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "FP8"),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "FP8"),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "F16"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "MXFP4"),
        ({"num_bits": 4, "type": "int", "group_size": 48}, "F32"),
        ({"num_bits": 3, "type": "int", "group_size": 64, "symmetric": False}, "Q4_0"),
        ({"num_bits": 6, "type": "int", "group_size": 64}, "Q8_0"),
    ],
)
def test_schemes_of_compressed_tensors(weights: dict[str, Any], kind: str) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = compressed("mixed-precision") | {"config_groups": groups, "ignore": ["re:.*gate$"]}
    assert type_by_config(settings, Q_PROJ) == kind
    assert type_by_config(settings, "lm_head") == kind, "it is linear, and nobody ignores it"
    assert type_by_config(settings, "model.layers.0.mlp.gate") == "BF16"
    assert type_by_config(settings, "model.embed_tokens") == "BF16"


def test_experts_routers_and_text_parts_are_found_by_their_names() -> None:
    gpt_oss = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert [type_by_config(gpt_oss, name) for name in (EXPERT, Q_PROJ)] == ["MXFP4", "BF16"]
    fp8 = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp.gate"],
    }
    router, gate_proj = "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"
    assert [type_by_config(fp8, name) for name in (EXPERT, router, gate_proj)] == ["FP8", "BF16", "FP8"]
    experts = {"targets": [r"re:.*experts\.\d+\.(gate|up|down)_proj$"], "weights": {"num_bits": 4, "group_size": 32}}
    only = compressed("pack-quantized") | {"config_groups": {"group_0": experts}}
    assert [type_by_config(only, name) for name in (EXPERT, Q_PROJ)] == ["Q4_0", "BF16"]
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"]}
    assert type_by_config(awq, f"model.language_model.{Q_PROJ.removeprefix('model.')}") == "Q4_Z"
    kept = awq | {"modules_to_not_convert": ["language_model.lm_head", f"language_model.{Q_PROJ}"]}
    assert type_by_config(kept, Q_PROJ) == type_by_config(kept, f"language_model.{Q_PROJ}") == "BF16"
    bitnet = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    assert type_by_config(bitnet, Q_PROJ) == "TQ2_0"


# -- the command -------------------------------------------------------------------------------------------------------


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(["plan", *words, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


@pytest.mark.parametrize("hardware", ["l4", "graviton4"])
def test_a_config_and_a_folder_without_weights_are_planned_as_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hardware: str
) -> None:
    write_model(tmp_path, "awq-gemm")
    write(tmp_path, load_file(tmp_path / "model.safetensors"), settings_of("awq-gemm"))
    flags = ["--hardware", hardware, "--context", "64", "--prompt", "32", "--output", "32"]
    files, _ = plan(capsys, str(tmp_path), *flags)
    config, said = plan(capsys, str(tmp_path / "config.json"), *flags)
    assert config["memory"] == files["memory"] and "awq, 4 bits in groups of 128" in said
    (tmp_path / "model.safetensors").unlink()
    folder, _ = plan(capsys, str(tmp_path), *flags)
    assert folder["memory"] == files["memory"]
    other, said = plan(capsys, str(tmp_path), *flags, "--format", "bfloat16")
    read = [planned["decode"][0]["weight_bytes"] for planned in (config, files, other)]
    assert read[0] == read[1] < 0.5 * read[2] and "counted as" not in said


def test_what_the_configuration_leaves_open_is_said_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(settings: dict[str, Any], *flags: str) -> tuple[int, str]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
        words = ["plan", str(tmp_path), "--hardware", "l4", "--context", "64", "--prompt", "32", "--output", "32"]
        return main([*words, *flags]), capsys.readouterr().err

    status, said = planned({"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert status == 0 and "`sym` is missing: counted with zero points" in said
    for settings, words in (
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        ({"quant_method": "hqq"}, "quant_config is missing"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5"),
        (compressed("marlin-24"), "format is 'marlin-24'"),
        (compressed("pack-quantized", 4, 64) | {"ignore": ["re:(["]}, "which is no regex"),
    ):
        status, said = planned(settings)
        assert status == 2 and words in said and said.count("error:") == 1 and "Traceback" not in said
    assert planned({"quant_method": "aqlm"}, "--format", "q2_k")[0] == 0


def test_fewer_bits_are_no_advice_for_a_model_whose_layers_have_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its head, which is in 16 bits, is most of a small model."""
    advised = {}
    for name, settings in (("awq", {"quantization_config": settings_of("awq-gemm")}), ("plain", {})):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 64000} | settings))
        flags = ["--hardware", "l4", "--context", "64", "--prompt", "32", "--output", "32"]
        advised[name] = [advice["what"] for advice in plan(capsys, str(tmp_path), *flags)[0]["advice"]]
    assert "4-bit weights" in advised["plain"] and "4-bit weights" not in advised["awq"]


def test_a_text_part_is_planned_by_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the language model is counted."""
    text = {key: value for key, value in CONFIG.items() if key != "architectures"} | {"model_type": "mistral"}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text | {"dtype": "float16"}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    flags = ["--hardware", "l4", "--context", "64", "--prompt", "32", "--output", "32"]
    image, _ = plan(capsys, str(tmp_path), *flags)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MistralForCausalLM"]}))
    assert plan(capsys, str(tmp_path), *flags)[0]["memory"] == image["memory"]


def test_a_config_of_another_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama-config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", str(tmp_path / "llama-config.json"), "--hardware", "l4"]) == 2
    assert "is not called config.json" in capsys.readouterr().err


def test_floats_are_those_of_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": dtype}))
        flags = ["--hardware", "graviton4", "--context", "64", "--prompt", "32", "--output", "32"]
        sizes[dtype] = plan(capsys, str(tmp_path), *flags)[0]["memory"]["tables"]
    assert sizes["float32"] > sizes["bfloat16"]


def test_both_kinds_of_hardware_have_quantized_matrices() -> None:
    """Against a test that compares nothing."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config = CheckpointConfig(Path("config.json"), CONFIG | {"quantization_config": settings})
    stored = config_format(config, Path("/nowhere"))
    assert stored is not None
    for packing in (NativeFormat(), GpuFormat(group=128)):
        model = plan_model("x", quantized_checkpoint(config, stored), packing)
        assert {tensor.type for tensor in model.tensors if "proj" in tensor.name} == {"Q4_Z"}
