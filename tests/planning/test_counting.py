"""Counted weights and activations are those that the engine then has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.hub import DEFAULT_MODEL, resolve_model
from quire.models.registry import family
from quire.ops.compiled import native
from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.native import NativeOps
from quire.ops.native.scan_recorder import new_value
from quire.ops.opset import Mamba2Weights, ProgramSpec
from quire.ops.tensors import STORAGE_TYPES, StoredTensor
from quire.planning.packed_bytes import GpuFormat, NativeFormat
from quire.planning.planned_model import plan_model
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import SHAPES, shape_config
from quire.planning.step_counter import StepCounter, StepShape, count_step, expected_experts
from quire.weights.checkpoint import open_checkpoint

PUBLISHED = {  # parameters, as the models' own pages or papers give them
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
}


def test_states_are_read_and_written_once_a_step() -> None:
    spec = KVSpec(0, 1, 16, 16, "float16", states=StateSpec(2, (4, 8, 16), 80, 4))
    counter, vector = StepCounter(spec, StepShape(3, new_tokens=5)), np.zeros(4, np.float32)
    x, dt, b, c = (new_value(columns) for columns in (64, 4, 8, 8))
    counter.mamba2_scan(x, dt, b, c, Mamba2Weights(vector, vector, vector), None, 0)
    count = counter.count.ops["scan"]
    assert count.kv_bytes == 3 * 2 * 4 * (4 * 8 * 16 + 3 * 80)
    assert count.flops == 15 * 6 * 4 * 8 * 16
    delta = StepCounter(spec, StepShape(3, new_tokens=5))
    delta.delta_rule(*(new_value(columns) for columns in (32, 32, 64, 4, 4)), None, 0, 8)
    assert delta.count.ops == counter.count.ops


@pytest.mark.parametrize("kind", STORAGE_TYPES.values(), ids=str)
def test_a_packed_matrix_has_the_bytes_that_are_counted(kind) -> None:
    num_rows, num_columns = 37, 512
    data = np.zeros((num_rows, num_columns // kind.block * kind.block_bytes), np.uint8)
    packed = native.Matrix(kind.name, [data], num_columns, None, None, 0.0)
    _, counted = NativeFormat().packed(StoredTensor("w", (num_rows, num_columns), kind, data), None)
    assert counted == packed.nbytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_parameters_of_the_published_model(name: str) -> None:
    model = plan_model(name, shape_checkpoint(shape_config(name)), GpuFormat())
    assert model.num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in SHAPES if "deepseek" not in name and "235b" not in name])
def test_every_shape_is_counted_on_both_backends(name: str) -> None:
    for packing in (NativeFormat(), GpuFormat()):
        model = plan_model(name, shape_checkpoint(shape_config(name), "q8_0"), packing)
        count = model.step(StepShape(4, 1, 100), model.kv_spec("auto")).count
        assert model.weight_bytes > 0.9 * model.num_parameters and count.total.flops > 0


def test_the_cache_of_a_70b_model_with_8_kv_heads_is_1_25_gib_for_4096_tokens() -> None:
    model = plan_model("llama-3.1-70b", shape_checkpoint(shape_config("llama-3.1-70b")), GpuFormat())
    kv = model.kv_spec("float16")
    assert 4096 // kv.block_size * kv.block_bytes == 1.25 * 2**30


def test_the_default_model_has_the_weights_and_activations_that_are_counted() -> None:
    checkpoint = open_checkpoint(resolve_model(DEFAULT_MODEL, progress=False).path)
    model = plan_model("smollm2", checkpoint, NativeFormat())
    ops = NativeOps()
    loaded = family(checkpoint.config.architecture).load(ops, checkpoint, model.config, 2048)
    vectors = sum(tensor.nbytes for tensor in model.tensors if len(tensor.shape) == 1)
    assert model.weight_bytes == loaded.weight_bytes + vectors
    kv = model.kv_spec("auto")
    program = ops.compile(loaded.forward, ops.new_cache(kv, 1), ProgramSpec(512))
    assert model.step(StepShape(1), kv).arena_bytes(512) == program.arena_bytes


def test_a_prefill_does_two_operations_a_parameter_and_token_and_those_of_attention() -> None:
    model = plan_model("llama-3.1-8b", shape_checkpoint(shape_config("llama-3.1-8b")), GpuFormat())
    tokens = 1024
    count = model.step(StepShape(1, tokens, tokens), model.kv_spec("auto")).count
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)  # by hand: qkv, output, gate, up, down
    assert count.ops["linear"].flops == 2 * tokens * layers
    assert count.ops["attention"].flops == 4 * 32 * 4096 * tokens * (tokens + 1) / 2
    assert count.ops["head"].flops == 2 * 4096 * 128256  # of the last token alone


def test_a_window_bounds_what_a_step_attends_to() -> None:
    assert StepShape(1, 1, 1000).attended(128) == 128
    assert StepShape(1, 4, 4).attended() == 1 + 2 + 3 + 4
    assert StepShape(1, 4, 4).attended(2) == 1 + 2 + 2 + 2
    assert StepShape(1, 2, 10).attended() == 9 + 10


def test_few_tokens_read_few_experts() -> None:
    assert expected_experts(128, 8, 1) == pytest.approx(8)
    assert expected_experts(128, 8, 1000) == pytest.approx(128)


def test_a_config_alone_can_be_planned(tmp_path: Path) -> None:
    from quire.cli.main import main

    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048,'
        ' "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}'
    )
    assert main(["plan", str(tmp_path / "config.json"), "--format", "q4_k_m", "--hardware", "l4"]) == 0


def test_a_plan_is_printed_explained_and_given_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from quire.cli.main import main

    flags = ["plan", "--shape", "llama-3.1-70b", "--format", "fp8", "--hardware", "h100", "--tp", "2", "--users", "8"]
    assert main([*flags, "--context", "4096", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"]["kv_cache"] == 8 * 1.25 * 2**30 and plan["memory"]["fits"]
    assert plan["kv"]["variants"]["MHA"] == 8 * plan["kv"]["variants"]["GQA"]
    assert plan["decode"][0]["bound"] == "memory" and plan["prefill"]["bound"] == "compute"
    assert main([*flags, "--explain"]) == 0
    assert "80 layers x 2 x 8 heads x 128 columns x 2 bytes = 327,680 bytes = 320.0 KiB" in capsys.readouterr().out


def test_too_small_a_machine_and_unknown_names_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli.main import main

    assert main(["plan", "--shape", "llama-3.1-70b", "--hardware", "l4"]) == 0
    assert "does NOT fit" in capsys.readouterr().out
    for flags, hint in (
        (["plan", "--shape", "lama-3.1-8b"], "llama-3.1-8b"),
        (["plan", "--shape", "qwen3-8b", "--hardware", "h20"], "h200"),
        (["plan", "--shape", "qwen3-8b", "--hardware", "l4", "--format", "q9"], "q8_0"),
        (["simulate", "--shape", "qwen3-8b", "--hardware", "l4", "--rate", "-1"], "above 0"),
        (["simulate", "--shape", "llama-3.1-70b", "--hardware", "l4"], "--tp"),
    ):
        assert main(flags) == 2 and hint in capsys.readouterr().err


def test_the_forward_pass_is_recorded_once_for_steps_of_all_shapes() -> None:
    """A plan recorded it for each of its steps, a fifth of the time of a plan of 80 layers."""
    model = plan_model("smollm2-135m", shape_checkpoint(shape_config("smollm2-135m")), GpuFormat())
    kv, shapes = model.kv_spec("bfloat16"), [StepShape(1), StepShape(7, 1, 300), StepShape(2, 64, 512)]
    alone = [count_step(model.forward, kv, shape).count for shape in shapes]
    calls = []
    counted = replace(model, forward=lambda ops, batch: (calls.append(1), model.forward(ops, batch)))
    assert [counted.step(shape, kv).count for shape in shapes] == alone and len(calls) == 1
