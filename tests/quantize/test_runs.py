"""A run that is killed, stopped or refused leaves nothing half-written."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.plain_models import write_plain
from quire.cli.main import main
from quire.core.errors import QuireError
from quire.quantize import output
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.gptq import GPTQOptions
from quire.quantize.plan import QuantizeOptions
from quire.quantize.run import QuantizeRun


def run_of(source: Path, out: Path, method: str, **options: object) -> QuantizeRun:
    return QuantizeRun(source, out, QuantizeOptions(method, **options))  # type: ignore[arg-type]


def finished(run: QuantizeRun, algorithm: str | None = None, calibration: CalibrationOptions | None = None) -> int:
    options = calibration or CalibrationOptions(measured_tokens=0, num_tokens=512, length=128)
    return quantize(run, options, algorithm, GPTQOptions(), lambda *_: None).written.resumed


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (sorted(path.iterdir()) if path.is_dir() else [path])}


class Stop(BaseException):
    pass


def stopping_after(count: int) -> object:
    """A progress report that ends the run when so much is written."""

    def report(phase: str, done: float, total: float) -> None:
        if phase in ("writing", "GPTQ") and done >= total * count / 10:
            raise Stop

    return report


@pytest.mark.parametrize(("method", "algorithm"), [("Q4_K_M", None), ("NF4", None), ("W4A16", "gptq")])
def test_a_stopped_run_goes_on_and_writes_the_same(
    method: str, algorithm: str | None, plain_llama: Path, tmp_path: Path
) -> None:
    suffix = ".gguf" if method == "Q4_K_M" else ""
    whole, again = (
        run_of(plain_llama, tmp_path / f"{name}{suffix}", method, ignore=("mlp",)) for name in ("whole", "again")
    )
    finished(whole, algorithm)
    calibration = CalibrationOptions(measured_tokens=0, num_tokens=512, length=128)
    with pytest.raises(Stop):
        report = stopping_after(6)
        quantize(again, calibration, algorithm, GPTQOptions(), report)  # type: ignore[arg-type]
    partial = again.out.with_name(again.out.name + ".partial")
    assert not again.out.exists() and partial.is_dir()
    assert finished(again, algorithm) > 0
    assert [*contents(again.out).values()] == [*contents(whole.out).values()]
    assert not partial.exists()


def test_other_settings_start_over(plain_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(Stop):
        quantize(
            run_of(plain_llama, out, "Q4_0"), CalibrationOptions(measured_tokens=0), None, GPTQOptions(),
            stopping_after(6),  # type: ignore[arg-type]
        )  # fmt: skip
    assert finished(run_of(plain_llama, out, "Q5_0")) == 0


def test_damaged_bytes_of_a_partial_output_are_written_again(plain_llama: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    finished(run_of(plain_llama, whole, "Q8_0"))
    with pytest.raises(Stop):
        quantize(
            run_of(plain_llama, out, "Q8_0"), CalibrationOptions(measured_tokens=0), None, GPTQOptions(),
            stopping_after(9),  # type: ignore[arg-type]
        )  # fmt: skip
    partial = tmp_path / "out.gguf.partial" / "out.gguf"
    data = bytearray(partial.read_bytes())
    data[len(data) // 2] ^= 255
    partial.write_bytes(data)
    finished(run_of(plain_llama, out, "Q8_0"))
    assert out.read_bytes() == whole.read_bytes()


def test_kill_9_loses_nothing_that_is_done(plain_llama: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    finished(run_of(plain_llama, whole, "Q4_K_M"))
    slow = (
        "import time\nfrom quire.quantize import output\nfrom quire.cli.main import main\n"
        "write = output.PartialOutput.write\n"
        "def slowly(self, pieces):\n    write(self, pieces)\n    time.sleep(0.2)\n"
        "output.PartialOutput.write = slowly\n"
        f"main(['quantize', {str(plain_llama)!r}, {str(out)!r}, '--method', 'Q4_K_M', '--report-tokens', '0'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", slow], env=os.environ, stderr=subprocess.DEVNULL)
    journal = tmp_path / "out.gguf.partial" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert finished(run_of(plain_llama, out, "Q4_K_M")) >= 2
    assert out.read_bytes() == whole.read_bytes()


def test_what_needs_no_look_at_the_model_is_refused_before_it_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.hub.resolve_model", lambda *_, **__: pytest.fail("downloaded"))
    (tmp_path / "there.gguf").touch()
    missing = str(tmp_path / "no.txt")
    for out, flags, message in (
        ("out.gguf", ["--method", "Q9"], "there is no method"),
        ("there.gguf", ["--method", "Q8_0"], "exists already"),
        ("out.gguf", ["--method", "Q8_0", "--calibrate", missing], "no.txt cannot be read"),
    ):
        assert main(["quantize", "someone/something", str(tmp_path / out), *flags]) == 2
        assert message in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = output.PartialOutput.write, []

    def interrupted(self: output.PartialOutput, pieces: output.Pieces) -> None:
        if len(written) == 5:
            signal.raise_signal(signal.SIGINT)
        written.append(write(self, pieces))

    monkeypatch.setattr(output.PartialOutput, "write", interrupted)
    command = ["quantize", str(plain_llama), str(tmp_path / "out.gguf"), "--method", "Q8_0", "--report-tokens", "0"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(command) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopped: 5 of 21 tensors are done, and the same command goes on in " in capsys.readouterr().err
    monkeypatch.undo()
    assert main(command) == 0
    assert "5 tensors were there from an earlier run" in capsys.readouterr().out


def test_a_disk_that_fills_up_keeps_what_is_done(
    plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, calls = os.pwrite, []

    def filling(*arguments: object) -> int:
        calls.append(pwrite(*arguments))  # type: ignore[arg-type]
        if len(calls) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return calls[-1]

    out = tmp_path / "out.gguf"
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", filling)
        with pytest.raises(QuireError, match="cannot be written: No space left on device") as caught:
            finished(run_of(plain_llama, out, "Q8_0"))
    assert "run it again" in caught.value.hint
    assert finished(run_of(plain_llama, out, "Q8_0")) > 0


def test_files_that_may_not_be_so_large_are_an_error_in_words(plain_llama: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(QuireError, match="cannot be written: File too large"):
            finished(run_of(plain_llama, tmp_path / "out", "W8A8"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_not_a_number_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_plain(source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, source / "model.safetensors")
    for method, name in (("Q8_0", "out.gguf"), ("W8A8", "out")):
        with pytest.raises(QuireError, match=r"layers\.1\.mlp\.up_proj\.weight' has 1 weights that are not numbers"):
            finished(run_of(source, tmp_path / name, method))
        assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing half-written is left


def test_a_quantized_model_is_not_quantized_again_unless_asked_to(plain_llama: Path, tmp_path: Path) -> None:
    for method, name in (("Q8_0", "first.gguf"), ("W8A8", "first")):
        first = tmp_path / name
        finished(run_of(plain_llama, first, method))
        with pytest.raises(QuireError, match="quantized already") as caught:
            finished(run_of(first, tmp_path / "second.gguf", "Q4_0"))
        assert "--requantize" in caught.value.hint
    finished(run_of(tmp_path / "first.gguf", tmp_path / "second.gguf", "Q4_0", requantize=True))
    finished(run_of(tmp_path / "first", tmp_path / "third.gguf", "Q4_0", requantize=True))
    assert (tmp_path / "second.gguf").stat().st_size == (tmp_path / "third.gguf").stat().st_size


def test_a_full_disk_is_seen_before_anything_is_written(
    plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(QuireError, match=r"GB on the disk, and 0\.00 GB are free"):
        finished(run_of(plain_llama, tmp_path / "out.gguf", "Q8_0"))
    assert [*tmp_path.iterdir()] == []


def test_activations_that_do_not_fit_are_refused_with_a_number_that_does(
    plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.quantize.device.available_memory", lambda: 1 << 20)
    with pytest.raises(QuireError, match=r"GPTQ of 512 tokens needs 0\.0 GB") as caught:
        finished(run_of(plain_llama, tmp_path / "out", "GPTQ"))
    assert "--calibration-tokens 42" in caught.value.hint
    assert [*tmp_path.iterdir()] == []


def test_an_output_is_never_overwritten(plain_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(QuireError, match="exists already"):
        finished(run_of(plain_llama, out, "Q8_0"))
    assert out.read_bytes() == b"mine"
    with pytest.raises(QuireError, match="exists already"):
        finished(run_of(plain_llama, plain_llama, "W8A8"))
    (tmp_path / "empty").mkdir()
    finished(run_of(plain_llama, tmp_path / "empty", "W8A8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "Q4_K_M"], "an output is missing"),
        (["out.gguf"], "--method is missing"),
        (["out.gguf", "--method", "Q9"], "there is no method `Q9`"),
        (["out", "--method", "Q4_0"], "Q4_0 is a type of GGUF"),
        (["out", "--method", "smoothquant"], "`--method W8A8 --algorithm smoothquant`"),
        (["out", "--method", "bitsandbytes"], "NF4, FP4 and LLM_INT8"),
        (["out", "--method", "something"], "`quire quantize --list`"),
        (["out.gguf", "--method", "Q4_0", "--imatrix", "no.gguf"], "there is no such file"),
        (["out.gguf", "--method", "Q4_0", "--save-imatrix", "no/x.gguf"], "there is no folder no"),
        (["out.gguf", "--method", "NF4"], "NF4 is written to a folder"),
        (["out", "--method", "NF4", "--group-size", "64"], "NF4 has no --group-size"),
        (["out", "--method", "W4A16", "--group-size", "48"], "--group-size is 48"),
        (["out", "--method", "FP8", "--algorithm", "gptq"], "--algorithm gptq is for integers"),
        (["out", "--method", "W4A16", "--act-order"], "--act-order is the order in which GPTQ rounds"),
        (["out", "--method", "W4A16", "--act-order", "group"], "--act-order is the order in which GPTQ rounds"),
        (["out", "--method", "GPTQ", "--damping", "-1"], "--damping is -1"),
        (["out", "--method", "GPTQ", "--damping", "nan"], "--damping is nan"),
        (["out.gguf", "--method", "Q8_0", "--split-max-size", "1"], "--split-max-size is 1"),
        (["out", "--method", "FP8_STATIC", "--imatrix", "x.gguf"], "needs the largest inputs"),
        (["out", "--method", "W4A16", "--ignore", "("], "is no regex"),
        (["out.gguf", "--method", "Q4_0", "--output-tensor-type", "Q9"], "--output-tensor-type is Q9"),
        (["out.gguf", "--method", "Q4_0", "--calibrate", "no.txt"], "no.txt cannot be read"),
    ],
)
def test_usage_errors(
    arguments: list[str], message: str, plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", str(plain_llama), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_texts_that_are_empty_or_short_are_refused(plain_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    for content, message in (("  \n", "is empty"), ("a few words", "tokens, and 64 are the least")):
        text.write_text(content)
        with pytest.raises(QuireError, match=message):
            finished(
                run_of(plain_llama, tmp_path / "out.gguf", "Q4_0"), None,
                CalibrationOptions(wanted=True, text=text, measured_tokens=0),
            )  # fmt: skip


def test_the_command_reports_as_text_and_as_json(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--calibrate", "--calibration-tokens", "256", "--sequence-length", "64", "--report-tokens", "128"]
    assert main(["quantize", str(plain_llama), str(tmp_path / "a.gguf"), "--method", "q4_k_m", *flags]) == 0
    printed = capsys.readouterr()
    assert "bits a weight" in printed.out and "KL divergence" in printed.out
    assert "calibrating" in printed.err and "writing" in printed.err
    assert main(["quantize", str(plain_llama), str(tmp_path / "b"), "--method", "GPTQ", *flags, "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["bits_per_weight"] > 4 and outcome["quality"]["num_tokens"] == 128
    assert 0 < outcome["quality"]["kl"]["value"] < 1 and np.isfinite(outcome["quality"]["perplexity"])
    assert main(["quantize", "--list"]) == 0
    assert "FP8_BLOCK" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_method(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--report-tokens", "96", "--sequence-length", "64", "--calibration-tokens", "128", "-q"]
    table = ["quantize", "--table", str(plain_llama), *flags]
    assert main([*table, "--methods", "Q8_0,Q4_0,W4A16", "--no-speed", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["methods"]
    divergences = [row["quality"]["kl"]["value"] for row in rows]
    assert [row["method"] for row in rows] == ["original", "Q8_0", "Q4_0", "W4A16"]
    assert divergences[0] == 0 and rows[0]["bits_per_weight"] == 32
    assert divergences[1] < 0.1 * divergences[2]
    chart = tmp_path / "chart.svg"
    assert main([*table, "--methods", "Q8_0", "--chart", str(chart)]) == 0
    heading, original, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:5] == ["method", "bits", "MB", "memory", "MB"] and (original[0], row[0]) == ("original", "Q8_0")
    assert all(float(cell.replace(",", "")) > 0 for cell in row[1:6])  # bits, MB, memory, tokens a second, perplexity
    picture = ElementTree.parse(chart).getroot()
    text = "".join(picture.itertext())
    assert picture.tag.endswith("svg") and all(word in text for word in ("Q8_0", "Peak memory", "tokens a second"))
