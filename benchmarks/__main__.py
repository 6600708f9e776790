"""All benchmarks, one after the other, on a machine that should have nothing else to do.

    python -m benchmarks [--llama-python .venv-llama/bin/python]

Each ends in one line of JSON; each can be run alone: `python -m benchmarks.speed --help`."""

import argparse
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python, to compare with")
    args = parser.parse_args()
    peers = ["--llama-python", args.llama_python] if args.llama_python else []
    for name, more in {"speed": peers, "scheduler": [], "sampler": [], "matrix": [], "accuracy": peers}.items():
        print(f"\n== {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *more], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
