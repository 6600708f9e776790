"""What can be planned, and what is said of wrong input."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hollow_files import write_llama_gguf
from benchmarks.plan_memory_cases import MODELS
from benchmarks.turns import SMALL as HYBRID

from quire.cli.main import main
from quire.ops.kv_spec import StateSpec
from quire.planning.hardware import find_hardware

GPU = ["--hardware", "l4"]


def test_a_gguf_header_a_folder_and_a_config_are_planned_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", MODELS["dense"], "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["dense"]))
    sizes = []
    for model in (path, tmp_path / "config.json"):
        assert main(["plan", str(model), *GPU, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["memory"])
    assert sizes[0] == sizes[1]


def test_hardware_may_be_called_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "llama-3.2-1b", "--gpu", "l4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["name"] == "l4"


def test_a_gpu_keeps_keys_and_values_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "llama-3.2-1b", *GPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["dtype"] == "bfloat16"


def test_checkpoints_of_states_are_counted_by_their_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    sizes = {}
    for dtype in ("float32", "bfloat16", "int8"):
        flags = ["plan", str(tmp_path / "config.json"), *GPU, "--state-checkpoint-dtype", dtype]
        assert main([*flags, "--json"]) == 0
        sizes[dtype] = json.loads(capsys.readouterr().out)["memory"]["kv_cache"]
        assert main([*flags, "--explain"]) == 0
        assert (f"bytes of checkpoints in {dtype}" in capsys.readouterr().out) == (dtype != "float32")
    slot = StateSpec(9, (12, 64, 64), 1536, 4).slot_bytes
    assert sizes["float32"] - sizes["bfloat16"] == 2 * slot  # four checkpoints a sequence
    assert sizes["float32"] - sizes["int8"] == pytest.approx(4 * slot * (1 - 68 / 256), rel=1e-3)


def test_several_devices_and_other_engines_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "llama-3.1-8b", "--tp", "2", "--pp", "2", "--explain", "--draft-model", "llama-3.2-1b"]
    assert main([*flags, "--hardware", "mi300x"]) == 0
    said = capsys.readouterr().out
    for words in ("all-reduces of", "is a bubble", "choose vLLM or SGLang", "ROCm", "acceptance", "k=4", "draft model"):
        assert words in said
    assert main(["plan", "--shape", "llama-3.1-8b", "--hardware", "h200"]) == 0
    assert "vLLM" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tp", "64"], "--tp is 64, and the model has 32 heads"),
        (["-pp", "64"], "--pp is 64, and the model has 32 layers"),
        (["--tensor-parallel-size", "two"], "`two` is no number such as 4, or several such as 2,4,8"),
    ],
)
def test_degrees_that_an_engine_refuses_are_not_planned(
    capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["plan", "--shape", "llama-3.1-8b", "--hardware", "h200", *flags]) == 2
    assert told in capsys.readouterr().err


def test_several_degrees_are_a_table_that_says_it_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "qwen3-8b", "--hardware", "h100", "--tp", "2,4,8,16", "--users", "16"]
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert (
        "predicted" in said
        and "choose vLLM" in said
        and "16 devices keep 16 KV heads for 8" in said
        and said.count("x") > 4
    )
    assert main([*flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["scaling"]
    assert [row["tp"] for row in rows] == [1, 2, 4, 8, 16] and rows[0]["gain"] == 1 < rows[2]["gain"] < 4


def test_stages_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Four stages of 8 users each have a quarter of the weights, and wait for the one that has the head."""
    flags = ["plan", "--shape", "llama-3.1-8b", "--hardware", "h100", "--pp", "2,4", "--users", "32"]
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "pipeline parallel: predicted from data sheets, not measured" in said and "(p-1)/(m+p-1)" in said
    assert main([*flags, "--json"]) == 0
    one, two, four = json.loads(capsys.readouterr().out)["scaling"]
    assert (one["pp"], one["gain"], one["bubble"], one["bubble_when_emptied"]) == (1, 1, 0, 0)
    assert sum(four["layers"]) == 32 and four["bubble_when_emptied"] == pytest.approx(3 / 7)
    assert 0 <= four["bubble"] < 0.15 and four["bytes_per_device"] < 0.4 * one["bytes_per_device"]
    assert two["gain"] > four["gain"] * 0.9, "smaller steps read the weights again: stages gain memory, not speed"
    assert main(["plan", "--shape", "llama-3.1-8b", "--hardware", "h100", "--pp", "2,4", "--json"]) == 0
    _, two, four = json.loads(capsys.readouterr().out)["scaling"]
    assert four["bubble"] == pytest.approx(0.75, abs=0.01), "one user alone: three of four devices wait"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shape", "qwen3-8b", "--tp", "2,2"], "each once"),
        (["--shape", "qwen3-8b", "--tp", "2,4", "--slo", "ttft=1s", "--rate", "2"], "leave --tp out"),
        (["--shape", "qwen3-8b", "--num-speculative-tokens", "3"], "--draft-model or --draft-head"),
        (["--shape", "lama-3.1-8b"], "llama-3.1-8b"),
        (["--shape", "qwen3-8b", "--hardware", "h20"], "h200"),
        (["--shape", "qwen3-8b", "--format", "q4_k"], "q4_k_m"),
        (["--shape", "qwen3-8b", "--users", "-1"], "users is -1"),
        (["--shape", "qwen3-8b", "--context", "0"], "context is 0"),
        (["--shape", "qwen3-8b", "--max-num-batched-tokens", "-5"], "max_num_batched_tokens is -5"),
        (["--shape", "qwen3-8b", "--max-loras", "-1"], "num_loras is -1"),
        (["--shape", "qwen3-8b", "--price", "-1"], "price is -1"),
        (["--shape", "qwen3-8b", "--tp", "0"], "--tp is 0"),
        (["--shape", "qwen3-8b", "--pp", "0"], "--pp is 0"),
        (["--shape", "qwen3-8b", "--pp", "2,4", "--tp", "2"], "leave out --slo and --tp"),
        (["--shape", "qwen3-8b", "--hardware", "h100", "--pp", "2,64"], "the model has 36 layers"),
        (["--shape", "qwen3-8b", "--hardware", "graviton4", "--pp", "2,4"], "one device"),
        (["--shape", "qwen3-8b", "--rate", "-2"], "rate is -2"),
        (["--shape", "qwen3-8b", "--slo", "ttft=fast", "--rate", "2"], "500ms"),
        (["--shape", "qwen3-8b", "--slo", "ttft=1s", "--rate", "-2"], "rate is -2"),
        (["--shape", "qwen3-8b", "--draft-model", "qwen3-0.6b", "--num-speculative-tokens", "0"], "at least 1"),
        (["--shape", "qwen3-8b", "--kv-cache-dtype", "int3"], "float16"),
        (["--shape", "qwen3-8b", "--hardware", "graviton4", "--tp", "2"], "one device"),
        (["--shape", "qwen3-8b", "--hardware", "graviton4", "--quantization", "fp8"], "int8"),
        (["--shape", "qwen3-8b", "--hardware", "l4,h100"], "--slo"),
        (["./no/such/config.json"], "no/such"),
        (["--shape", "qwen3-8b", "--tp", "two"], "`two` is no number such as 4"),
        (["--shape", "qwen3-8b", "--context", "1000000"], "--context is 1,000,000, and qwen3-8b has 40,960 positions"),
        (["--shape", "qwen3-8b", "--slo", ""], "choose from ttft"),
        (["--shape", "qwen3-8b", "--max-loras", "2", "--max-lora-rank", "0"], "--max-lora-rank is 0"),
        (["--shape", "qwen3-8b", "--gpu-memory-utilization", "1.5"], "above 0, and 1 at most"),
        (["--shape", "qwen3-8b", "--hardware", "graviton4", "--gpu-memory-utilization", "0.5"], "is a CPU"),
        (["--shape", "qwen3-8b", "--slo", "ttft=1s", "--rate", "2", "--gpu-memory-utilization", "0.5"], "takes 90 %"),
        (["one.gguf", "--model", "two.gguf"], "one.gguf and --model two.gguf are given"),
    ],
)
def test_wrong_input_is_one_sentence_with_what_is_near(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *([] if "--hardware" in flags else GPU), *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and said.count("error:") == 1


def test_flags_are_those_of_vllm_and_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["dense"]))
    path, plans = str(tmp_path / "config.json"), []
    for flags in (
        [path, "--tp", "2", "--pp", "1", "--context", "2048", "--users", "8"],
        ["--model", path, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "1", "--max_model_len=2048",
         "--max-num-seqs", "8"],
        ["-m", path, "-tp", "2", "-pp", "1", "-c", "2048", "-np", "8"],
    ):  # fmt: skip
        assert main(["plan", *flags, "--hardware", "h100", "--json"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] == plans[2] and json.loads(plans[0])["load"]["users"] == 8


def test_a_smaller_share_of_a_gpu_has_room_for_fewer_users(capsys: pytest.CaptureFixture[str]) -> None:
    fits = []
    for share in ("0.9", "0.5"):
        flags = ["--shape", "qwen3-8b", "--hardware", "h100", "--gpu-memory-utilization", share, "--json"]
        assert main(["plan", *flags]) == 0
        fits.append(json.loads(capsys.readouterr().out)["kv"]["users_by_context"]["4096"])
    token = 36 * 2 * 8 * 128 * 2  # bytes of its KV cache
    assert fits[0] - fits[1] == pytest.approx(0.4 * 79.2 * 2**30 / (4096 * token), abs=1)


def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    for model in (broken, tmp_path / "config.json"):
        assert main(["plan", str(model), *GPU]) == 2
        assert capsys.readouterr().err.startswith("error:")


def test_planning_imports_no_torch() -> None:
    code = "import sys; from quire.cli.main import main; main(['plan', '--shape', 'qwen3-0.6b', '--hardware', 'l4']); "
    check = "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code + check], check=False, capture_output=True).returncode == 0


def test_degrees_are_told_beside_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "llama-3.1-70b", "--format", "awq", "--hardware", "h100", "--users", "4"]
    assert main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rows = {(row["kind"], row["devices"]): row for row in plan["degrees"]}
    assert list(rows) == [("tp", 2), ("tp", 4), ("tp", 8), ("dp", 2), ("dp", 4)]
    assert rows["tp", 2]["tpot"] < plan["tpot_seconds"] < 2 * rows["tp", 2]["tpot"], "all-reduces are not free"
    assert rows["dp", 2]["ttft"] == plan["ttft_seconds"] and rows["dp", 2]["tpot"] < plan["tpot_seconds"]
    assert rows["tp", 8]["bytes_per_device"] < plan["memory"]["total"] / 3 < rows["dp", 4]["bytes_per_device"]
    assert 0 < rows["tp", 8]["gain"] < rows["tp", 2]["gain"] < 1
    assert main(flags) == 0
    assert "dp 4: 4 have all weights each" in capsys.readouterr().out


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that remembers this machine; measuring it takes no time here."""
    rates = {"bandwidth": 1e10, "flops_8bit": 1e11, "flops": 1e11}
    monkeypatch.setattr("quire.planning.this_machine.measure", lambda threads: rates)
    monkeypatch.setattr("quire.cli.planning_flags.cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "machine.json"


def test_this_machine_is_planned_for_where_its_cache_cannot_be_written(
    measured: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    measured.parent.write_text("a file, and no directory")
    assert main(["plan", "--shape", "llama-3.2-1b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]
    assert "cannot be kept" in caplog.text


def test_a_measurement_of_a_busy_machine_is_warned_of_whenever_it_is_used(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for load in (1000.0, 0.0):  # the second plan takes what the first has measured
        monkeypatch.setattr("quire.planning.this_machine.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main(["plan", "--shape", "llama-3.2-1b"]) == 0
        assert "1000.0 programs" in capsys.readouterr().err
    assert main(["plan", "--shape", "llama-3.2-1b", "--measure"]) == 0
    assert "warning" not in capsys.readouterr().err


def planned_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_hundred_million_users_are_planned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The step of all users was added up user by user, which never ended."""
    began = time.process_time()
    found = planned_json(capsys, "--shape", "llama-3.2-1b", *GPU, "--users", "100000000")
    assert time.process_time() - began < 10 and not found["memory"]["fits"]
    assert found["advice"][0]["what"].startswith("serve fewer users")


def test_a_plan_reads_counts_as_the_server_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape", "llama-3.2-1b", *GPU, "--context", "32k", "--isl", "2K", "--osl", "1k"]
    load = planned_json(capsys, *flags)["load"]
    assert (load["context"], load["prompt"], load["output"]) == (32000, 2048, 1000)


def test_usual_lengths_are_no_longer_than_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-c 512` planned the memory of 512 tokens and the speed of a prompt of 1,024; a model with 512 positions, a
    context of 1,280."""
    load = planned_json(capsys, "--shape", "llama-3.2-1b", *GPU, "-c", "512")["load"]
    assert load["prompt"] + load["output"] == 512 == load["context"]
    assert planned_json(capsys, "--shape", "llama-3.2-1b", *GPU, "-c", "512", "--prompt", "500")["load"]["output"] == 12
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["dense"], "max_position_embeddings": 512}))
    assert planned_json(capsys, str(tmp_path / "config.json"), *GPU)["load"]["context"] == 512


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "200000"], "llama-3.2-1b has 131,072 positions"),
        (["--prompt", "300", "--output", "300", "-c", "512"], "tokens are more than --context, 512"),
        (["-c", "1x"], "`1x` is not a whole number"),
        (["--rate", "inf"], "and finite"),
        (["--hardware", "a100"], "a100-40gb, a100-80gb"),
        (["--slo", "ttft=1s", "--rate", "1", "--prompt", "200000"], "llama-3.2-1b has 131,072 positions"),
        (["--slo", "ttft=1s,ttft=2s", "--rate", "1"], "slo has ttft twice"),
        (["--slo", "ttft=1s", "--rate", "1", "--explain"], "--explain is of a single plan"),
        (["--slo", "ttft=1s", "--rate", "1", "--pp", "2"], "--pp is of a single plan"),
        (["--slo", "ttft=1s", "--rate", "1", "--draft-head"], "--draft-head is of a single plan"),
        (["--tp", "2,4", "--explain"], "several degrees are a table, and --explain is of a single plan"),
        (["--pp", "2,4", "--price", "3"], "--price is of a single plan"),
        (["--draft-head", "--num-speculative-tokens", "200000"], "llama-3.2-1b has room for 131,070"),
    ],
)
def test_lengths_and_rates_that_cannot_be_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--shape", "llama-3.2-1b", *GPU, *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "row"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("h200_sxm", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("L40S", "l40s"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("AMD Instinct MI300X OAM", "mi300x")],
)  # fmt: skip
def test_hardware_is_found_by_the_name_that_its_driver_has(name: str, row: str) -> None:
    assert find_hardware(name).name == row


def test_the_experts_of_a_token_are_in_the_formulas_and_not_all_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """A prefill of gpt-oss-20b was explained as 2 x 20.9 B parameters x 1,024 tokens = 6.33 TFLOP."""
    assert main(["plan", "--shape", "gpt-oss-20b", "--hardware", "h100", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "20.9 B parameters, 3.61 B of them for a token" in said
    assert "2 x 3.03 B parameters in layers x 1,024 tokens = 6.2 + 0.127 of attention" in said
    assert "32 x (1 - (1 - 4 / 32) ^ 1 user) = 4.0 of each layer" in said


def test_one_user_is_no_users_and_no_figure_is_a_power_of_ten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "llama-3.1-70b", "--hardware", "h100", "--tp", "4", "--explain"]) == 0
    said = capsys.readouterr().out
    assert " 1 user:" in said and "1 users" not in said
    assert "prefill of 1,024 at 1,024   141,566" in said, "2 x 68.5 B x 1,024 and attention; it was 1.416e+05"
    assert "with 1 user always served $" in said


def test_a_cost_that_is_not_known_is_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "llama-3.2-1b", "--hardware", "graviton4"]
    assert set(planned_json(capsys, *shape)["cost"].values()) == {None}
    assert set(planned_json(capsys, *shape, "--price", "0")["cost"].values()) == {0}


def test_shapes_are_stored_as_they_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss-20b was counted in 16 bits, 39 GiB, and DeepSeek-V3 as 1,250 GiB, which no eight H200s hold."""
    small = planned_json(capsys, "--shape", "gpt-oss-20b", "--hardware", "rtx-4090")
    assert small["memory"]["fits"] and small["memory"]["weights"] / 2**30 == pytest.approx(13.16, abs=0.01)
    large = planned_json(capsys, "--shape", "deepseek-v3", "--hardware", "h200", "--tp", "8")
    assert large["memory"]["fits"] and large["memory"]["weights"] / 2**30 == pytest.approx(629, abs=1)
    assert (
        planned_json(capsys, "--shape", "gpt-oss-20b", *GPU, "--format", "bfloat16")["memory"]["weights"] > 38 * 2**30
    )


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (["--kv-cache-dtype", "fp8_e4m3"], "fp8"),
        (["-ctk", "q8_0", "-ctv", "q8_0"], "int8"),
        (["-ctk", "f16"], "float16"),
    ],
)
def test_caches_have_the_names_that_the_server_takes(
    flags: list[str], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned_json(capsys, "--shape", "llama-3.2-1b", *GPU, *flags)["kv"]["dtype"] == dtype


def test_a_cache_that_is_less_than_its_tokens_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """4 x 4,096 tokens of 48 KiB are 768 MiB, and the cache of gpt-oss-20b 438 MiB: half of its layers have windows."""
    flags = ["plan", "--hardware", "h100", "--users", "4", "--context", "4096"]
    assert main([*flags, "--shape", "gpt-oss-20b"]) == 0
    said = capsys.readouterr().out
    assert "tokens in bfloat16, less what is behind windows" in said
    assert "12 of 24 layers keep the last 128 tokens of it" in said
    assert main([*flags, "--shape", "llama-3.2-1b"]) == 0
    assert "windows" not in (said := capsys.readouterr().out) and "layers keep" not in said


def test_the_list_has_the_columns_that_the_guide_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """The guide compares bandwidth and arithmetic "in both columns", and only names were listed."""
    assert main(["plan", "--list"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["hardware"] == ["GiB", "GB/s", "TFLOP/s", "in", "8", "bits", "$/hour"]
    assert rows["h100"] == ["79.2", "3,350", "989", "1,979", "3.00"]
    assert rows["raspberry-pi-5"] == ["8.0", "17", "0.077", "0.307", "-"]
    assert main(["plan", "--list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["hardware"]} >= {"l4", "l40s"}


def test_a_search_says_one_request_and_names_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """It said "1 requests", "1e+12 requests" and "1000 x 2 x l4"."""
    for rate, words in (("1", "1 request a second"), ("1e12", "1,000,000,000,000 requests a second")):
        flags = ["plan", "--shape", "llama-3.2-1b", *GPU, "--slo", "ttft=1ms", "--rate", rate]
        assert main(flags) == 0
        said = capsys.readouterr().out
        assert said.startswith(words) and " of 8 x l4, awq, KV fp8: " in said
