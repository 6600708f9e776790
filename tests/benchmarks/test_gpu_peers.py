"""Quire beside vLLM on a GPU: what is asked of the engines, and what becomes of their times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import peers
from benchmarks.peers.vllm_for_torch import torch_of, wheels
from benchmarks.processes import ROOT
from benchmarks.table import OURS, Row, render

WORK = peers.Work(rows=(1, 4), context=100, steps=50, prompts=(300,), requests=10, request_tokens=40, rounds=3)


class Scripted:
    """Takes a millisecond for each token of a prompt, and two for each sequence's output token."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def ask(self, line: str) -> str:
        self.jobs.append(job := json.loads(line))
        [num_prompt] = {length for [(_, length)] in job["prompts"]}
        seconds = 0.001 * len(job["prompts"]) * (num_prompt + 2 * job["num_output"])
        return json.dumps({"seconds": seconds, "cached": []})


def rows_of(worker: Scripted, work: peers.Work) -> list[Row]:
    return list(peers.figures("vllm", peers.Offline(worker), work))  # type: ignore[arg-type]


def test_a_step_has_no_share_of_prompts() -> None:
    one, four, prompt, requests = rows_of(Scripted(), WORK)
    assert one.rounds["vllm"] == pytest.approx([2, 2, 2]) and four.rounds["vllm"] == pytest.approx([8, 8, 8])
    assert prompt.rounds["vllm"] == pytest.approx([302, 302, 302])
    assert requests.rounds["vllm"] == pytest.approx([10 * 40 / (0.001 * 10 * (40 + 80))])
    assert [row.less_is_better for row in (one, four, prompt, requests)] == [True, True, True, False]


def test_every_engine_has_room_for_what_it_is_asked() -> None:
    worker = Scripted()
    rows_of(worker, WORK)
    longest = max(length + job["num_output"] for job in worker.jobs for [(_, length)] in job["prompts"])
    assert longest <= WORK.max_model_len == 512
    assert peers.Work((), 128, 128, (), 1000, 1000, 1).max_model_len == 2048
    assert peers.Work((1,), 128, 128, (), 0, 1000, 1).max_model_len == 512


def test_two_runs_of_a_step_have_the_same_prompts_and_others_have_not() -> None:
    worker = Scripted()
    engine = peers.Offline(worker)  # type: ignore[arg-type]
    for _ in range(2):
        peers.step_seconds(engine, 4, WORK)
    few, many, *later = [[seed for [(seed, _)] in job["prompts"]] for job in worker.jobs]
    assert few == many and len(set(few)) == 4
    assert later[0] == later[1] and not set(few) & set(later[0])


def test_a_table_has_both_engines_and_how_many_times_better_ours_is() -> None:
    ours = [Row("step of 1 sequence, ms", {OURS: [2.0]}, less_is_better=True), Row("tok/s", {OURS: [30.0]})]
    theirs = [Row("step of 1 sequence, ms", {"vllm": [3.0]}, less_is_better=True)]  # it ended then
    lines = render([peers.section_of("bf16", [ours, theirs])], [OURS, "vllm"]).splitlines()
    assert [line.split()[-3:] for line in lines if line.startswith("  ")][1:] == [
        ["2.00", "3.00", "1.50x"],
        ["30.0", "-", "-"],
    ]


def test_both_get_the_same_limits_and_each_its_format(tmp_path: Path) -> None:
    arguments = peers.parse(["--vllm-python", "/there/python", "--vllm-args", '{"seed": 1}'])
    ours = peers.command(OURS, "int4", tmp_path, WORK, arguments)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    theirs = peers.command("vllm", "awq", tmp_path, WORK, arguments)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq" and config["hidden_size"] == 4096
    ours_given, theirs_given = json.loads(str(ours.words[-1])), json.loads(str(theirs.words[-1]))
    for limit in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"):
        assert ours_given[limit] == theirs_given[limit]
    assert (ours_given["quantization"], theirs_given["quantization"]) == ("int4", None)
    assert theirs.words[0] == Path("/there/python") and theirs_given["seed"] == 1
    fp8 = peers.command("vllm", "fp8", tmp_path, WORK, arguments)
    assert json.loads(str(fp8.words[-1]))["quantization"] == "fp8"
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_more_sequences_than_an_engine_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse(["--rows", "1", "64", "--max-num-seqs", "32"])
    assert "--rows 64 are more than --max-num-seqs 32" in capsys.readouterr().err


def test_without_vllm_it_says_what_installs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = peers.parse(["--vllm-python", str(tmp_path / "python")])
    assert peers.present(arguments) == [OURS]
    said = capsys.readouterr().err
    assert f"{tmp_path}/python has no vllm" in said
    [script] = [word for word in said.split() if word.endswith(".sh")]
    assert (ROOT / script).exists()
    assert peers.present(peers.parse(["--engines", OURS])) == [OURS]


def test_a_tiny_shape_is_measured_on_a_cpu() -> None:
    words = ["--engines", OURS, "--shape", "tiny", "--device", "cpu", "--quantizations", "int4"]
    words += ["--rows", "2", "--prompts", "20", "--steps", "4", "--rounds", "1"]
    words += ["--requests", "3", "--request-tokens", "8"]
    command = [sys.executable, "-m", "benchmarks.gpu.peers", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["versions"].keys() == {OURS} and result["shape"] == "tiny"
    names = ["step of 2 sequences, ms", "prompt of 20 tokens, ms", "3 x 8/8, tok/s"]
    [section] = result["sections"]
    assert (section["title"], [row["name"] for row in section["rows"]]) == ("int4", names)
    assert all(row["rounds"][OURS][0] > 0 for row in section["rows"][1:])


def test_the_newest_wheel_for_a_torch_comes_first() -> None:
    page = "".join(
        f'<a href="https://files/{name}#sha256=0">{name}</a>'
        for name in (
            "vllm-0.9.2-cp38-abi3-manylinux1_x86_64.whl",
            "vllm-0.26.0-cp38-abi3-manylinux_2_28_aarch64.whl",
            "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl",
            "vllm-0.26.0.tar.gz",
            "vllm-0.20.1-1-cp38-abi3-manylinux_2_35_x86_64.whl",
        )
    )
    versions = [version for version, _ in wheels(page, "x86_64")]
    assert versions == [(0, 26, 0), (0, 20, 1), (0, 9, 2)]
    assert torch_of("Requires-Dist: torchaudio==2.11.0\nRequires-Dist: torch==2.13.0\n") == "2.13.0"
    assert torch_of("Requires-Dist: torch (==2.7.1) ; extra\n") == "2.7.1"
    assert torch_of("Requires-Dist: torchvision==0.26.0\n") is None
