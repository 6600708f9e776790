"""How fast a model runs in one process, beside its peers in the same run.

    python -m benchmarks.speed                                  the default model; peers not installed are skipped
    python -m benchmarks.speed --engines quire --rounds 1       a quick look
    python -m benchmarks.speed --formats Q4_0 Q8_0 Q4_K_M F16   the file's twins too, made by llama.cpp
    python -m benchmarks.speed MODEL.gguf --json results.json

Engines take turns, case by case and round by round; the table shows medians, the lowest and the highest, and what
share of this machine's memory bandwidth (decode 1) or of its int8 peak (prefill 512, decode 32) that is. vLLM runs the
dequantized weights of the first file, and its share of the bandwidth is counted with those."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import engines as known
from benchmarks.cases import CASES, Case
from benchmarks.ceilings import Ceilings, Work, measure_ceilings, work_of
from benchmarks.engines import Engines
from benchmarks.formats import FORMATS, float_checkpoint, twins
from benchmarks.machine import note_others
from benchmarks.processes import EngineDied, interruptible, progress
from benchmarks.report import Report
from benchmarks.table import Section
from benchmarks.workers import worker
from quire.hub import resolve_model

WARM_UP = Case("warm-up", 32, 16, 4, "whole")


def measure_speed(
    engines: Engines,
    path: Path,
    rounds: int,
    ceilings: Ceilings | None,
    with_vllm: bool = True,
    cases: Sequence[Case] = CASES,
) -> Section:
    """Every engine's rates on one file."""
    section = Section(f"{path.name}: tokens/s, one process")
    models = {name: path for name in engines.names if name != "vllm" or with_vllm}
    if "vllm" in models:
        models["vllm"] = float_checkpoint(path)
    with ExitStack() as stack:
        workers = {}
        for name, model in models.items():
            progress(f"{path.name}: {name} loads")
            try:
                workers[name] = stack.enter_context(worker(engines.speed(name, model)))
                workers[name].measure(WARM_UP, seed=0)
            except EngineDied as failure:
                progress(f"{name} fails, and has no figures here: {failure}")
                workers.pop(name, None)
        for number in range(1, rounds + 1):
            section.others.append(note_others(f"{path.name}: round {number} of {rounds}"))
            for case in cases:
                for name, engine in workers.items():
                    section.row(case.name).add(name, engine.measure(case, seed=number))
    if ceilings:
        for name, model in models.items():
            work = work_of(model)
            for case in cases:
                if (share := share_per_token(case, work, ceilings)) is not None:
                    section.row(case.name).per_unit[name] = share
    return section


def share_per_token(case: Case, work: Work, ceilings: Ceilings) -> float | None:
    """What one token a second takes of the bandwidth, or of the int8 peak; None where neither bounds the case."""
    if case.counts == "whole":
        return None
    if case.num_seqs == 1 and case.counts == "decode":
        context = case.num_prompt + case.num_output / 2
        return (work.weight_bytes + work.kv_bytes * context) / (ceilings.gigabytes * 1e9)
    if not ceilings.int8_gigamacs:
        return None
    heads = 1.0 if case.counts == "decode" else 1 / case.num_prompt
    return (work.layer_macs + work.head_macs * heads) / (ceilings.int8_gigamacs * 1e9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="a GGUF file, or a name (default: smollm2)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the result there too")
    known.add_arguments(parser)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--formats", nargs="*", choices=FORMATS, default=[], help="measure the file's twins in these formats too"
    )
    args = parser.parse_args()
    interruptible()
    engines = known.find(args, needs=["speed"])
    path = resolve_model(args.model).path
    report = Report(path, engines, measure_ceilings(engines.threads), args.json)
    for number, file in enumerate(twins(path, args.formats, engines.llama_python)):
        report.add(measure_speed(engines, file, args.rounds, report.ceilings, with_vllm=number == 0))
    report.finish()


if __name__ == "__main__":
    main()
