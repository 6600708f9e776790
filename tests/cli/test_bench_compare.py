"""Comparisons of a tiny model: what they count is exact, whatever the clock says."""

import json
import shlex
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fakes import make_drafts_free
from page.browser import browser
from quire.cli import main as cli
from quire.cli.bench.compare.charts import BarChart, LineChart, even_ticks, log_ticks, number, svg
from quire.cli.bench.compare.command import _parser, _repeated
from quire.cli.bench.compare.comparisons import COMPARISONS
from quire.cli.bench.compare.formats import find_variants
from quire.cli.bench.compare.lab import Lab
from quire.cli.bench.compare.result import Column, Figure, Result, bars, doubt, ratio, times
from quire.cli.bench.compare.sizes import Sizes
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.executors.attention_layer import AttentionLayer
from quire.executors.options import ExecutorOptions
from quire.ops.gpu.attention.naive import naive_attention

SAME = "both sides gave the same tokens"


@pytest.fixture
def compare(tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """-> what a comparison prints with --json."""
    monkeypatch.setenv("QUIRE_THREADS", "1")

    def run(name: str, *flags: str, status: int = 0) -> dict[str, Any]:
        argv = ["bench", "compare", name, "-m", str(tiny_model), "--device", "cpu", "--json", *flags]
        assert cli.main(argv) == status
        return dict(json.loads(capsys.readouterr().out))

    return run


def rows_of(figures: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """The rows, when what every comparison has is there."""
    assert figures["conclusion"] and figures["held_fixed"] and figures["machine"]["cpu"]
    assert figures["rounds"] == rounds and not figures["interrupted"]
    for row in figures["rows"]:
        for cell in row.values():
            if isinstance(cell, dict):
                assert 0 < cell["low"] <= cell["median"] <= cell["high"]
    return list(figures["rows"])


def test_static_batches_leave_rows_empty(compare: Any) -> None:
    flags = ("--num-prompts", "9", "--batch-size", "3", "--input-len", "5", "--output-len", "16", "--repeats", "2")
    figures = compare("batching", *flags)
    static, continuous = rows_of(figures, 2)
    assert (static["side"], continuous["side"]) == ("static", "continuous")
    assert 0 < static["rows_used"] < continuous["rows_used"] <= 100
    assert SAME in figures["notes"]
    assert figures["command"].endswith(" ".join(flags)) and "--json" not in figures["command"]


def test_without_a_cache_every_token_is_computed_again(compare: Any) -> None:
    figures = compare("kv-cache", "--lengths", "8", "40", "--repeats", "1")
    rows = rows_of(figures, 1)
    assert [(row["without_computed"], row["with_computed"]) for row in rows] == [(9, 1), (41, 1)]
    assert SAME in figures["notes"]


def test_pages_waste_less_than_reservations(compare: Any) -> None:
    flags = ("--num-prompts", "8", "--batch-size", "2", "--input-len", "20", "--output-len", "24", "--context", "128")
    reserved, exact, pages = rows_of(compare("paged", *flags, "--repeats", "1"), 1)
    assert [row["how"] for row in (reserved, exact, pages)] == ["measured", "computed", "measured"]
    assert reserved["wasted"] > exact["wasted"] > pages["wasted"] > 0
    assert reserved["sequences"] == 2 and pages["sequences"] == 8
    assert reserved["fit"] == pytest.approx(2) and reserved["fit"] < exact["fit"] < pages["fit"]
    token_bytes = 2 * 2 * 3 * 16 * 2  # keys and values, layers, KV heads, columns, fp16
    assert reserved["reserved"] / reserved["mean_running"] == pytest.approx(128 * token_bytes / 2**20)


def test_a_warm_prefix_is_not_computed(compare: Any) -> None:
    rows = rows_of(compare("prefix-cache", "--lengths", "64", "128", "--input-len", "7", "--repeats", "2"), 2)
    assert [(row["cold_computed"], row["warm_computed"]) for row in rows] == [(71, 7), (135, 7)]


def test_chunks_bound_a_step(compare: Any) -> None:
    flags = (
        "--num-prompts",
        "2",
        "--batch-size",
        "3",
        "--input-len",
        "200",
        "--output-len",
        "24",
        "--chunk-size",
        "48",
    )
    figures = compare("chunked-prefill", *flags, "--repeats", "1")
    off, on = rows_of(figures, 1)
    assert (off["largest_step"], on["largest_step"]) == (203, 51)
    assert SAME in figures["notes"]


def test_flash_attention_gives_the_same_in_less_memory(compare: Any) -> None:
    rows = rows_of(compare("attention", "--lengths", "64", "512", "--repeats", "1"), 1)
    assert all(0 <= row["difference"] < 0.01 for row in rows)
    if rows[-1]["naive_memory"] is not None:  # Linux
        assert rows[-1]["naive_memory"] > 6 * 512 * 512 * 4 / 2**20 > rows[-1]["flash_memory"]


def test_the_naive_twin_is_a_softmax_over_all_positions_before() -> None:
    layer = AttentionLayer(ExecutorOptions(), heads=2, kv_heads=1, head_dim=4, length=3)
    first = layer.ready("naive")()[0].reshape(2, 4)
    assert (first == layer.rows[0, 12:]).all()  # the first token sees itself only: its value, for both heads
    assert layer.difference(layer.ready("naive")(), layer.ready("flash")()) < 0.01
    on_gpu = naive_attention(layer.rows, layer.columns, layer.head_dim, layer.scale, "float32", device="cpu")
    assert layer.difference(layer.ready("naive")(), on_gpu()) < 1e-6


def test_formats_of_plain_weights_are_quantized_while_loading(compare: Any) -> None:
    figures = compare("formats", "--input-len", "8", "--output-len", "4", "--text-len", "64", "--repeats", "1")
    stored, int8, int4, _ = rows_of(figures, 1)
    assert [row["side"] for row in figures["rows"]] == ["as stored", "int8", "int4", "nf4"]
    assert stored["divergence"] == 0 and stored["same_top"] == 100
    assert 0 < int8["divergence"] < int4["divergence"]
    assert stored["weights"] > int8["weights"] > int4["weights"]
    assert stored["perplexity"] > 1


def test_files_that_are_the_same_have_no_divergence(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, text = tmp_path / "copy", tmp_path / "text.txt"
    shutil.copytree(tiny_model, copy)
    text.write_text("A quire is a gathering of sheets.\n" * 3)
    flags = [
        "--device",
        "cpu",
        "--input-len",
        "4",
        "--output-len",
        "2",
        "--repeats",
        "1",
        "--text",
        str(text),
        "--json",
    ]
    assert cli.main(["bench", "compare", "formats", str(tiny_model), str(copy), *flags]) == 0
    one, other = json.loads(capsys.readouterr().out)["rows"]
    assert other["divergence"] == 0 and other["perplexity"] == one["perplexity"] and other["file"] == one["file"]


def test_a_quantized_model_is_compared_by_its_cache(default_model: Path) -> None:
    variants, what = find_variants(Lab(EngineOptions(model=str(default_model), device="cpu"), Sizes()))
    assert [variant.name for variant in variants] == ["KV cache float32", "KV cache float16", "KV cache int8"]
    assert "quantized already" in what


def test_heads_are_computed(compare: Any) -> None:
    figures = compare("kv-heads", "--lengths", "1024")
    kib = {row["side"]: row["token"] for row in figures["rows"]}
    assert kib == {"MHA": 0.75, "GQA (this model's)": 0.375, "MQA": 0.125, "MLA": 0.28125}
    assert figures["computed"] and figures["rows"][0]["1024"] == 0.75


def test_drafts_are_verified_and_change_nothing(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Lab.engine

    def started(lab: Lab, **options: Any) -> Engine:
        engine = start(lab, **options)
        if engine.capacity.drafts:
            make_drafts_free(engine._scheduler.speculation)
        return engine

    monkeypatch.setattr(Lab, "engine", started)
    figures = compare("speculation", "--output-len", "48", "--repeats", "1")
    off, on, _, _ = rows_of(figures, 1)
    assert off["steps"] == 48 >= on["steps"] and off["drafts"] is None
    assert on["drafts"] > 0 and 0 <= on["acceptance"] <= 100
    assert SAME in figures["notes"]


def test_batch_sizes(compare: Any) -> None:
    rows = rows_of(compare("batch-size", "--batch-sizes", "4", "1", "--output-len", "6", "--repeats", "2"), 2)
    assert [row["batch"] for row in rows] == ["1", "4"]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str, names: list[str]) -> None:
    page = Page(text)
    assert set(page.ids) >= set(names) and page.tags.count("svg") == len(names)
    assert all(link.startswith("#") for link in page.links), "the page asks for something outside of it"
    assert not {"script", "link", "img", "iframe"} & set(page.tags) and "@import" not in text and "url(" not in text


def test_all_make_one_page_that_needs_no_network(compare: Any, tmp_path: Path) -> None:
    path, names = tmp_path / "report.html", ["kv-heads", "batching", "cuda-graphs"]
    figures = compare("all", "--only", *names, "--repeats", "1", "--html", str(path))
    assert [result["comparison"] for result in figures["comparisons"]] == names[:2]
    assert "CUDA graphs are for GPUs" in figures["skipped"][0]["reason"] and not figures["interrupted"]
    text = path.read_text()
    check_page(text, names[:2])
    commands = [result["command"] for result in figures["comparisons"]]
    assert "--repeats" not in commands[0] and commands[1].endswith("--repeats 1")
    for name, command in zip(names, commands, strict=False):
        again = _parser(name).parse(shlex.split(command)[3:])
        assert again.comparison == name and again.device == "cpu" and not again.json and not again.html
    assert "cuda-graphs is skipped" in text and "held fixed" in text.lower()
    with browser() as opened:
        for width, dark in ((1280, False), (390, True)):
            opened.open(path.as_uri(), width=width, height=900, dark=dark)
            assert opened.js("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
            assert opened.js("document.querySelector('svg.chart').getBoundingClientRect().height") > 100
            assert not opened.complaints() and opened.requested() == [path.as_uri()]


def test_ctrl_c_keeps_what_is_done(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, 8)
    path = tmp_path / "report.html"
    figures = compare("all", "--only", "kv-heads", "kv-cache", "batching", "--html", str(path), status=cli.INTERRUPTED)
    assert [result["comparison"] for result in figures["comparisons"]] == ["kv-heads"] and figures["interrupted"]
    check_page(path.read_text(), ["kv-heads"])


def test_ctrl_c_keeps_the_rounds_that_are_done(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 4 * 3 + 2)  # 4 steps a round, the first of which does not count
    flags = ("--batch-sizes", "2", "--input-len", "4", "--output-len", "4", "--repeats", "9")
    figures = compare("batch-size", *flags, status=cli.INTERRUPTED)
    assert figures["rounds"] == 2 and figures["interrupted"]
    interrupt_at(monkeypatch, 2)


def test_ctrl_c_before_the_first_round(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, 2)
    assert cli.main(["bench", "compare", "batch-size", "-m", str(tiny_model), "--device", "cpu"]) == cli.INTERRUPTED
    assert "before the first round" in capsys.readouterr().err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in that step."""
    step, count = Engine.step, 0

    def stepped(engine: Engine) -> Any:
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", stepped)


def test_text_and_picture_of_one(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "heads.svg"
    argv = ["bench", "compare", "--svg", str(picture), "kv-heads", "-m", str(tiny_model), "--device", "cpu"]
    assert cli.main(argv) == 0
    told = capsys.readouterr().out
    assert "(computed)" in told and "held fixed: 2 layers" in told and "MLA" in told and "6.00 times" in told
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_mistakes_are_named(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*argv: str) -> str:
        assert cli.main(["bench", "compare", *argv]) == cli.USAGE_ERROR
        return capsys.readouterr().err

    model = ("-m", str(tiny_model), "--device", "cpu")
    assert "did you mean `batching`" in error("batchin")
    assert "there is no flag `--lengths`" in error("batching", "--lengths", "3")
    assert "there is no flag `--enable-prefix-caching`" in error("kv-cache", "--enable-prefix-caching")
    assert "--lengths has 0" in error("kv-cache", "--lengths", "0")
    assert "--repeats is 0" in error("batching", "--repeats", "0")
    assert "there is no folder" in error("kv-heads", "--html", "/nowhere/x.html")
    assert "sequences of 605 tokens, and the model was made for 512" in error("kv-cache", *model, "--lengths", "600")
    assert "CUDA graphs are for GPUs" in error("cuda-graphs", *model)
    assert "one file is given" in error("formats", str(tiny_model), "--device", "cpu")
    assert "a file is given twice" in error("formats", str(tiny_model), str(tiny_model), "--device", "cpu")
    assert "--model and files" in error("formats", str(tiny_model), *model)
    assert "cannot be read" in error("formats", *model, "--text", str(tmp_path))
    assert "did you mean `batching`?" in error("all", "--only", "batchin")
    assert "no comparison is named" in error("--html", str(tmp_path / "page.html"))


def test_every_comparison_has_help_with_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for name, comparison in COMPARISONS.items():
        with pytest.raises(SystemExit):
            cli.main(["bench", "compare", name, "--help"])
        told = " ".join(capsys.readouterr().out.split())
        assert comparison.what in told
        for size, default in comparison.sizes.items():
            assert f"--{size.replace('_', '-')} " in told
            if isinstance(default, int):
                assert f"(default: {default})" in told


def test_a_command_is_given_again_without_its_outputs() -> None:
    argv = ["--html", "r", "-m", "x", "--only", "a", "b", "--threads", "2", "--repeats=2", "--svg=p", "--json"]
    assert _repeated(argv, _parser("batching")) == ["-m", "x", "--threads", "2", "--repeats=2"]
    assert _repeated(argv, _parser("attention")) == ["-m", "x", "--repeats=2"]  # which sets its threads itself
    assert _repeated(["--json", "A.gguf", "B.gguf", "--svg", "p"], _parser("formats")) == ["A.gguf", "B.gguf"]


def test_charts_are_well_formed_and_escaped() -> None:
    rows: list[Any] = [{"side": "<a> & b", "x": Figure.of([3, 1, 2])}, {"side": "zero", "x": 0.0}]
    charts = [
        BarChart("bars <1>", "ms", bars(rows, "x")),
        LineChart("one point", "x", "y", {"only": [(1, 0.0)]}),
        LineChart("logarithmic", "x", "y", {"a": [(1, 0.5), (1000, 2e5)], "b": [(1, 3.0)]}, log_x=True, log_y=True),
    ]
    root = ElementTree.fromstring(svg(charts))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<a> & b" in texts and "2" in texts
    assert even_ticks(0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and log_ticks(3, 450) == [1, 10, 100, 1000]
    assert [number(value) for value in (0, 0.004, 0.25, 12.0, 12.34, 1234.5)] == [
        "0",
        "0.004",
        "0.25",
        "12",
        "12.3",
        "1,234",
    ]


def test_factors_are_those_of_a_round_and_disagreement_is_told() -> None:
    slow, fast, other = Figure.of([1, 4]), Figure.of([3, 8]), Figure.of([1.5, 3])
    assert ratio(fast, slow).rounds == (3, 2) and times(fast, slow) == "2.50"  # though the second round was faster
    assert doubt((slow, fast)) == "" and "do not agree" in doubt((slow, fast), (slow, other))
    between = Figure.of([1.5, 5.5])
    result = Result(title="t", columns=[Column("a", "a", 1)], rows=[{"a": between}], conclusion="c", held_fixed="h")
    assert "3.5 (1.5 - 5.5)" in result.as_text()
