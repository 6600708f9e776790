"""How fast a model runs, beside llama.cpp in the same run.

    python -m benchmarks.speed [MODEL.gguf] [--llama-python .venv-llama/bin/python] [--json results.json]

Prefill and decode are measured apart: the tokens of steps that only compute a prompt, and of steps in which every
sequence gains one token. Engines take turns, round by round; the table shows medians and the spread."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from quire import LLM, SamplingParams
from quire.engine.sources import resolve_model

Rates = dict[str, list[float]]  # tokens a second, one for each repeat


def quire_speed(path: str, threads: int | None, repeats: int) -> Rates:
    llm = LLM(path, enable_prefix_caching=False, threads=threads, max_num_seqs=32, max_model_len=1024)
    rng = np.random.default_rng(0)
    rates: Rates = {"prefill 512": [], "decode 1": [], "decode 32": []}
    for _ in range(repeats + 1):
        rates["prefill 512"].append(_rate(llm, rng, num_seqs=1, prompt=512, output=1, decode=False))
        rates["decode 1"].append(_rate(llm, rng, num_seqs=1, prompt=16, output=65, decode=True))
        rates["decode 32"].append(_rate(llm, rng, num_seqs=32, prompt=16, output=17, decode=True))
    return {name: found[1:] for name, found in rates.items()}  # the first round warms up


def _rate(llm: LLM, rng: np.random.Generator, *, num_seqs: int, prompt: int, output: int, decode: bool) -> float:
    from quire.engine.generate import GenerateRequest

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for number in range(num_seqs):
        ids = rng.integers(100, llm.tokenizer.vocab_size - 100, prompt).tolist()
        llm._submit(GenerateRequest(id=f"{number}", params=params, prompt_ids=ids))
    tokens, seconds = 0, 0.0
    while llm.engine.has_work:
        begin = time.perf_counter()
        llm.engine.step()
        elapsed = time.perf_counter() - begin
        record = llm.engine.record
        assert record is not None
        if decode == (record.num_tokens == record.num_drawn == num_seqs):
            tokens += record.num_tokens
            seconds += elapsed
    return tokens / seconds


def llama_speed(python: str, path: str, threads: int, repeats: int) -> Rates:
    script = Path(__file__).parent / "peers" / "llama_cpp_speed.py"
    command = [python, str(script), "speed", path, "--threads", str(threads), "--repeats", str(repeats)]
    rates: Rates = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the result there too")
    args = parser.parse_args()
    path = str(resolve_model(args.model).path)
    machine = describe()
    threads = args.threads or machine["cpus"]

    engines: dict[str, Rates] = {}
    for _ in range(args.rounds):
        for name, found in (
            ("quire", quire_speed(path, threads, 1)),
            ("llama.cpp", llama_speed(args.llama_python, path, threads, 1) if args.llama_python else {}),
        ):
            for measure, rates in found.items():
                engines.setdefault(name, {}).setdefault(measure, []).extend(rates)

    print(f"{Path(path).name}, {threads} threads, {machine['cpu']}: tokens/s, median (lowest - highest)\n")
    columns = list(engines["quire"])
    print(f"{'':12}" + "".join(f"{column:>24}" for column in columns))
    for name, measured in engines.items():
        cells = [f"{statistics.median(r):.0f} ({min(r):.0f} - {max(r):.0f})" for r in (measured[c] for c in columns)]
        print(f"{name:12}" + "".join(f"{cell:>24}" for cell in cells))
    if "llama.cpp" in engines:
        medians = {name: {c: statistics.median(m[c]) for c in columns} for name, m in engines.items()}
        print(f"{'ratio':12}" + "".join(f"{medians['quire'][c] / medians['llama.cpp'][c]:>23.2f}x" for c in columns))
    result = {
        "benchmark": "speed",
        "model": Path(path).name,
        "threads": threads,
        "machine": machine,
        "engines": engines,
    }
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
