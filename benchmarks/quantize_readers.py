"""Every format of `quire quantize` in the library whose format it is: does it load, and are the logits the same?

    python -m benchmarks.quantize_readers [MODEL] --json result.json
    python -m benchmarks.quantize_readers --quick                                   on its first layer, in minutes

MODEL: a folder in Hugging Face's layout, or a model to convert (its dequantized weights). Each row quantizes it, has
the library compute the logits of some tokens, and says how far they are from those of Quire's forward pass on the same
files, relative to the largest. A library that is not installed is left out, and said so. The result is
written after each row."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.cut_model import cut_to_layers
from benchmarks.machine import describe
from benchmarks.processes import ROOT, progress
from benchmarks.quantize import peer_environment
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.quantize import quality
from quire.quantize.calibration import default_text, sequences
from quire.weights.checkpoint import open_checkpoint

EXACT, ACTIVATIONS = 1e-3, 0.3  # fp32 or fp16 sums; the library quantizes activations too
FP16, BF16 = 5e-3, 0.05  # what the library computes in
NUM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ReaderCase:
    """`tolerance`: of the largest logit."""

    method: str
    reader: str
    environment: str  # the interpreter's
    tolerance: float = EXACT
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.method, *self.flags))


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A row of the result."""

    case: str
    reader: str
    versions: dict[str, str]
    difference: float  # of the largest logit
    same_top: float
    within: bool


def cases(arguments: argparse.Namespace) -> list[ReaderCase]:
    compressed, bits = arguments.llmcompressor_python, arguments.bitsandbytes_python
    gptq, llama = arguments.gptqmodel_python, arguments.llama_python
    group = ("--group-size", "64")
    return [
        *(ReaderCase(name, "transformers", compressed, flags=group)
          for name in ("W4A16", "W4A16_ASYM", "W3A16", "W5A16", "W8A16")),
        ReaderCase("W4A16", "transformers", compressed, flags=(*group, "--algorithm", "gptq")),
        *(ReaderCase(name, "transformers", compressed, BF16) for name in ("MXFP4A16", "MXFP8A16", "NVFP4A16")),
        *(ReaderCase(name, "transformers", compressed, ACTIVATIONS) for name in ("MXFP8", "W4A8", "W4AFP8")),
        *(ReaderCase(name, "transformers", compressed, ACTIVATIONS)
          for name in ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")),
        *(ReaderCase(name, "gptqmodel", gptq, FP16, group) for name in ("GPTQ", "GPTQ_V2", "AWQ")),
        ReaderCase("GPTQ", "gptqmodel", gptq, FP16, (*group, "--act-order")),
        *(ReaderCase(name, "transformers", bits, 0.01) for name in ("NF4", "FP4")),
        ReaderCase("LLM_INT8", "transformers", bits, ACTIVATIONS),
        # llama.cpp quantizes activations to 8 bits for most types.
        *(ReaderCase(name, "llama.cpp", llama, 0.05)
          for name in ("F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")),
    ]  # fmt: skip


class Reading:
    """`folder`: where the source and outputs are."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.source = model
        if not model.is_dir():
            self.source = folder / "source"
            self._quantize(model, self.source, "--method", "F16")
        used, _ = sequences(self.source, default_text(), NUM_TOKENS, 1024, measures=False)
        self.ids = used[0]
        (folder / "ids.json").write_text(json.dumps(self.ids))

    def _quantize(self, source: Path, out: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "quire.cli.main", "quantize", str(source), str(out), "--report-tokens", "0"]
        subprocess.run([*command, "-q", *flags], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    def row(self, case: ReaderCase) -> ReadBack | str:
        """The row, or why there is none."""
        out = self.folder / ("out.gguf" if case.reader == "llama.cpp" else "out")
        logits = self.folder / "logits.npy"
        self._quantize(self.source, out, "--method", case.method, "--calibration-tokens", "1024", *case.flags)
        try:
            python = str(Path(case.environment).absolute())
            command = [python, "-m", "benchmarks.peers.native_logits", case.reader, str(out)]
            done = subprocess.run(
                [*command, str(self.folder / "ids.json"), str(logits)],
                cwd=self.folder, env=peer_environment(), text=True, capture_output=True,
            )  # fmt: skip
            if done.returncode:
                return f"ended with status {done.returncode}: {done.stderr[-600:]}"
            ours = quality.last_states(open_checkpoint(out), [self.ids]).rows(0, len(self.ids))
        finally:
            subprocess.run(["rm", "-rf", str(out)], check=True)
        theirs = np.load(logits)[:, : ours.shape[1]]
        difference = float(np.abs(theirs - ours).max() / np.abs(ours).max())
        same = float((theirs.argmax(1) == ours.argmax(1)).mean())
        versions = json.loads(done.stdout.strip().splitlines()[-1])
        return ReadBack(case.name, case.reader, versions, difference, same, difference <= case.tolerance)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--llmcompressor-python", default=".venv-llmcompressor/bin/python")
    parser.add_argument("--gptqmodel-python", default=".venv-gptqmodel/bin/python")
    parser.add_argument("--bitsandbytes-python", default=".venv-bitsandbytes/bin/python")
    parser.add_argument("--llama-python", default=".venv-llama/bin/python")
    parser.add_argument("--layers", type=int, metavar="N", help="of the model, the first alone")
    parser.add_argument("--quick", action="store_true", help="the same as --layers 1")
    parser.add_argument("--methods", nargs="*", help="some of the table; default: all")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench-readers.json"), help="keep the result there (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.layers = arguments.layers or 1
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    given = Path(arguments.model)
    model = given if given.is_dir() else resolve_model(arguments.model).path
    rows: list[ReadBack] = []
    failures: dict[str, str] = {}
    outcome = {"benchmark": "quantize_readers", "machine": describe(), "failures": failures}
    with tempfile.TemporaryDirectory(prefix="quire-bench-readers-") as folder:
        if arguments.layers:
            model = cut_to_layers(model, Path(folder) / f"{model.stem}-{arguments.layers}-layers", arguments.layers)
        print(model.name, flush=True)
        reading = Reading(model, Path(folder))
        for case in installed(cases(arguments), arguments.methods):
            row = reading.row(case)
            if isinstance(row, str):
                failures[f"{case.name}: {case.reader}"] = row
                progress(f"{case.name}: {case.reader} {row}")
            else:
                rows.append(row)
                print(line(row, case), flush=True)
            outcome |= {"model": model.name, "rows": [asdict(row) for row in rows]}
            arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome))
    return 1 if failures or not all(row.within for row in rows) else 0


def installed(wanted: Sequence[ReaderCase], methods: Sequence[str] | None) -> Iterator[ReaderCase]:
    for case in wanted:
        if methods and case.method not in methods:
            continue
        if Path(case.environment).exists():
            yield case
        else:
            progress(f"{case.name} is left out: there is no {case.environment}")


def line(row: ReadBack, case: ReaderCase) -> str:
    verdict = "" if row.within else f"   more than {case.tolerance}"
    figures = f"{row.difference:.2e}  same top {100 * row.same_top:.0f} %{verdict}"
    return f"{row.case:<44} {row.reader:<13} {figures}"


if __name__ == "__main__":
    sys.exit(main())
