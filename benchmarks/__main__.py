"""Quire beside llama.cpp and vLLM: one run, one table. `make bench` installs the peers and runs this.

    python -m benchmarks                                    everything: most of an hour on two cores
    python -m benchmarks --engines quire llama.cpp          without vLLM, whose every start takes minutes
    python -m benchmarks --formats --served-formats         the default model's own file only
    python -m benchmarks --rounds 5 --json results.json

On a machine that should have nothing else to do. The parts can be run alone: `python -m benchmarks.speed --help`,
`python -m benchmarks.serving --help`. See docs/benchmarks.md."""

import argparse

from benchmarks import engines as known
from benchmarks.ceilings import measure_ceilings
from benchmarks.formats import FORMATS, twins
from benchmarks.processes import interruptible
from benchmarks.report import Report
from benchmarks.serving import measure_serving
from benchmarks.speed import add_arguments, measure_speed
from quire.hub import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--formats", nargs="*", choices=FORMATS, default=list(FORMATS), help="twins to measure alone (default: all)"
    )
    parser.add_argument(
        "--served-formats", nargs="*", choices=FORMATS, default=["Q8_0"], help="twins to serve (default: Q8_0)"
    )
    args = parser.parse_args()
    interruptible()
    engines = known.find(args, needs=["speed", "server"])
    path = resolve_model(args.model).path
    report = Report(path, engines, measure_ceilings(engines.threads), args.json)
    for number, file in enumerate(twins(path, args.formats, engines.llama_python)):
        report.add(measure_speed(engines, file, args.rounds, report.ceilings, with_vllm=number == 0))
    for number, file in enumerate(twins(path, args.served_formats, engines.llama_python)):
        report.add(*measure_serving(engines, file, args.rounds, with_vllm=number == 0))
    report.finish()


if __name__ == "__main__":
    main()
