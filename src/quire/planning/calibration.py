"""What was measured of a model on this machine, kept in a file: step times, and what serving adds to them."""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from quire.ops.native.cpus import available_cpus
from quire.planning.fitted_times import FittedTimes
from quire.planning.step_fit import FitQuality, MeasuredStep, fit
from quire.planning.step_times import ServingCosts, StepWork

VERSION = 1  # of the file; others are measured again
NUM_EARLIER = 6  # numbers of a StepWork, in earlier files
FINGERPRINT_BYTES = 1 << 20  # of a file's beginning

# What changes step times, by the names of the engine's options.
OPTIONS = (
    "threads", "device", "kv_cache_dtype", "quantization", "dtype", "load_format", "block_size", "enforce_eager",
    "batch_invariant",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    about: dict[str, Any]  # model, machine and options: the key
    times: FittedTimes
    costs: ServingCosts
    quality: FitQuality
    steps: tuple[MeasuredStep, ...] = ()  # that the times were fitted to; earlier files have none

    def as_json(self) -> dict[str, Any]:
        steps = [[*astuple(step.work), step.seconds, step.count] for step in self.steps]
        return {
            "version": VERSION, "about": self.about, "times": self.times.as_json(), "costs": asdict(self.costs),
            "quality": asdict(self.quality), "steps": steps,
        }  # fmt: skip

    def refitted(self) -> "Calibration":
        """With the fit that these steps would have now."""
        if not self.steps:
            return self
        on_gpu = self.about["device"] == "cuda"
        known = [step for step in self.steps if step.work.num_rows or not on_gpu]  # earlier files have the others, too
        return replace(self, times=fit(known, on_gpu and not self.about["enforce_eager"]))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Calibration":
        """What `as_json` gave. Raises KeyError, TypeError or ValueError where it is something else."""
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']}")
        costs = values["costs"]
        if "arrival" not in costs:  # earlier files
            costs = {**costs, "arrival": 0.0 if values["about"]["device"] == "cuda" else costs["request"] / 2}
        return cls(
            values["about"],
            FittedTimes.of(values["times"]),
            ServingCosts(**costs),
            FitQuality(**values["quality"]),
            tuple(measured_steps(values.get("steps", ()))),
        )


def measured_steps(rows: Iterable[Sequence[Any]]) -> list[MeasuredStep]:
    """The steps in rows as `Calibration.as_json` has them."""
    return [MeasuredStep(_work_of(work), float(seconds), count) for *work, seconds, count in rows]


def _work_of(numbers: Sequence[int]) -> StepWork:
    """Earlier files do not have what prompts read: it is taken from pairs, with prompts alike."""
    work = StepWork(*numbers)
    if len(numbers) == NUM_EARLIER and work.num_chunks:
        tokens = max(1.0, (work.num_tokens - work.num_rows + min(work.num_rows, 0.5)) / work.num_chunks)  # of a prompt
        pairs = (work.num_pairs - work.num_read) / work.num_chunks - tokens * (tokens - 1) / 2
        work.longest = round(max(0.0, pairs) / max(1.0, tokens - 1) + tokens)
        work.num_chunk_read = min(work.num_read, work.num_chunks * work.longest)
    return work


def calibration_key(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`: values of the engine's options, those of OPTIONS at least."""
    return {
        "model": fingerprint(path),
        "machine": machine_name(),
        **{name: options[name] for name in OPTIONS},
    }


def keep(directory: Path, calibration: Calibration) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _file_name(calibration.about)
    path.write_text(json.dumps(calibration.as_json(), indent=1) + "\n")
    return path


def find(directory: Path, about: dict[str, Any]) -> Calibration | None:
    """The calibration that was kept of this model on this machine, if it can be read."""
    try:
        kept = Calibration.of(json.loads((directory / _file_name(about)).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_earlier = kept.times.graphs and not kept.times.most  # a GPU's steps had what its engine's loop takes
    return kept if kept.about == about and not is_earlier else None


def _file_name(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16] + ".json"


def fingerprint(path: Path) -> str:
    """A digest of a model's files: their names, sizes, and how each begins."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + opened.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def machine_name() -> str:
    """The CPU and how much of it is ours; the GPUs."""
    cpu = _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    return ", ".join([f"{available_cpus()} CPUs of {cpu}", *gpu_names()])


def gpu_names() -> list[str]:
    return [_field(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]


def _field(path: Path, name: str) -> str:
    """The value in the first line `name: value`."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
