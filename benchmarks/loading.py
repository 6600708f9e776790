"""How fast a checkpoint loads for a CPU, beside what reading its files alone costs.

    python -m benchmarks.loading MODEL [--quantization int8] [--rounds 3]

Every round is a process of its own: with the files in the page cache, and with their pages dropped before; reading and
loading take turns. Reading is one thread that reads blocks of 8 MB into the same buffer. `loaded` is the time from
opening the checkpoint to all of its matrices packed."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

BLOCK = 8 << 20


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted({*path.glob("*.safetensors"), *path.glob("*.bin")})


def read(path: Path, quantization: str | None) -> None:
    buffer = bytearray(BLOCK)
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def load(path: Path, quantization: str | None) -> None:
    from quire.models.registry import family
    from quire.ops.native import NativeOps
    from quire.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config.architecture)
    module.load(NativeOps(quantization=quantization), checkpoint, module.config(checkpoint.config), 512)


WORK: dict[str, Callable[[Path, str | None], None]] = {"read": read, "loaded": load}


def drop(path: Path) -> None:
    """Their pages, which nobody has mapped, leave the page cache."""
    os.sync()
    for file in files_of(path):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one(path: Path, what: str, quantization: str | None) -> None:
    """In a process of its own: prints seconds, and seconds of CPU."""
    import quire.ops.native  # noqa: F401  is not what is measured

    began, cpu = time.perf_counter(), time.process_time()
    WORK[what](path, quantization)
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=WORK, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        one(arguments.model, arguments.one, arguments.quantization)
        return
    size = sum(file.stat().st_size for file in files_of(arguments.model))
    command = [sys.executable, "-m", "benchmarks.loading", str(arguments.model)]
    command += ["--quantization", arguments.quantization] if arguments.quantization else []
    rows = []
    for cached in (True, False):
        times: dict[str, list[list[float]]] = {what: [] for what in WORK}
        for _ in range(arguments.rounds):
            for what in WORK:
                if cached:
                    read(arguments.model, None)
                else:
                    drop(arguments.model)
                done = subprocess.run([*command, "--one", what], check=True, capture_output=True, text=True)
                times[what].append(json.loads(done.stdout))
        for what in WORK:
            seconds = [wall for wall, _ in times[what]]
            row = {"cached": cached, "what": what, "s": round(median(seconds), 3)}
            row |= {"least_s": round(min(seconds), 3), "most_s": round(max(seconds), 3)}
            row |= {
                "cpu_s": round(median(cpu for _, cpu in times[what]), 2),
                "gb_per_s": round(size / median(seconds) / 1e9, 2),
            }
            rows.append(row)
            name = f"{what}, {'in the page cache' if cached else 'from disk'}"
            print(
                f"{name:28} {row['s']:7.2f} s ({row['least_s']:.2f} - {row['most_s']:.2f})  {row['gb_per_s']:6.2f} GB/s"
            )
    print(json.dumps({"model": arguments.model.name, "bytes": size, "rows": rows}))


if __name__ == "__main__":
    main()
