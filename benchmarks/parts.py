"""Quire's parts by themselves, one after the other: scheduler, sampler, matrices, and how exact the whole is.

    python -m benchmarks.parts [--llama-python .venv-llama/bin/python]

Each ends in one line of JSON; each can be run alone: `python -m benchmarks.matrix --help`."""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT, progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", type=Path, help="interpreter with llama-cpp-python, to compare answers with")
    args = parser.parse_args()
    peer: list[str] = []
    if args.llama_python and args.llama_python.exists():
        peer = ["--llama-python", str(args.llama_python.absolute())]
    else:
        progress("llama.cpp is left out: there is no interpreter for it")
    for name, more in {"scheduler": [], "sampler": [], "matrix": [], "accuracy": peer}.items():
        print(f"\n== {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *more], cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
