"""`quire bench throughput`: everything at once, as in offline batches; tokens and requests a second."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.bench.engine import BenchRun, EngineBench
from quire.cli.bench.prompts import BenchRequest, random_prompts, read_prompts
from quire.cli.bench.report import check_target, phase, report, spent, spreads, surroundings
from quire.cli.bench.resources import Resources
from quire.cli.bench.setup import add_engine_flags, add_json_flag, check_bounds, progress, read_engine_options, start
from quire.cli.flags import add_flags, read_flags
from quire.cli.interrupts import first_interrupt_noted
from quire.cli.main import INTERRUPTED
from quire.cli.parser import Parser
from quire.engine.engine import Engine
from quire.engine.option import option
from quire.engine.options import EngineOptions

EXAMPLES = """\
  quire bench throughput --num-prompts 64 --input-len 128 --output-len 64
  quire bench throughput -m ./model.gguf --dataset-path prompts.jsonl --output-json result.json
  quire bench throughput -m ./Llama-3.1-8B --load-format dummy --max-num-batched-tokens 8192 --max-num-seqs 512 \\
      --input-len 1000 --output-len 1000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputFlags:
    num_prompts: int = option(1000, "requests, all of them submitted at once", minimum=1)
    input_len: int = option(1024, "tokens of each prompt: random ids", minimum=1)
    output_len: int = option(128, "tokens sampled for each; nothing ends earlier", minimum=1)
    dataset_path: str | None = option(
        None,
        "take the prompts from this file instead: one JSON object a line, with `prompt` or `prompt_token_ids` "
        "and maybe `output_len`; at most --num-prompts of them",
        metavar="FILE",
    )
    temperature: float = option(1.0, "sampling temperature; 0 takes the most likely token")
    num_warmups: int = option(1, "requests before measuring begins: kernels are compiled, memory is touched", minimum=0)
    output_json: str | None = option(
        None, "write the figures to this file; - prints them instead of text", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "bench throughput",
        "Complete many prompts as fast as this machine can. Ctrl-C ends it with what was measured so far.",
        EXAMPLES,
    )
    add_flags(parser, ThroughputFlags, "benchmark")
    add_json_flag(parser)
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    flags, options = read_flags(ThroughputFlags, arguments), read_engine_options(arguments)
    check_target(flags.output_json)
    engine, start_seconds = start(options)
    requests = prompts(flags, options, engine)
    bench = EngineBench(engine, flags.temperature, options.seed or 0)
    with first_interrupt_noted() as noted:
        warmups = requests[: flags.num_warmups]
        bench.run([BenchRequest(request.prompt_ids, min(request.output_len, 2)) for request in warmups])
        resources = Resources()
        with progress(len(requests), "request") as one_more:
            result = bench.run(requests, one_more, noted.is_set)
    figures = surroundings(options, engine, start_seconds) | measured(result) | spent(resources, options)
    report(headline(figures), figures, flags.output_json)
    return INTERRUPTED if result.interrupted else 0


def prompts(flags: ThroughputFlags, options: EngineOptions, engine: Engine) -> list[BenchRequest]:
    if flags.dataset_path is None:
        vocab_size, seed = engine.capacity.vocab_size, options.seed or 0
        return random_prompts(flags.num_prompts, flags.input_len, flags.output_len, vocab_size, seed)
    from quire.hub import resolve_model
    from quire.text.tokenizers.tokenizer import Tokenizer

    path = (
        Path(options.tokenizer) if options.tokenizer else resolve_model(options.model, revision=options.revision).path
    )
    encode = Tokenizer.load(path).encode
    return read_prompts(Path(flags.dataset_path), encode, flags.num_prompts, flags.output_len)


def measured(run: BenchRun) -> dict[str, Any]:
    """The first keys are those of vLLM's file."""
    seconds = run.seconds or float("inf")  # interrupted before the first step ended
    return {
        "elapsed_time": run.seconds,
        "num_requests": len(run.requests),
        "total_num_tokens": run.num_input + run.num_output,
        "requests_per_second": run.num_finished / seconds,
        "tokens_per_second": (run.num_input + run.num_output) / seconds,
        "num_finished": run.num_finished,
        "total_input_tokens": run.num_input,
        "total_output_tokens": run.num_output,
        "output_tokens_per_second": run.num_output / seconds,
        "prefill": phase([run], "prefill"),
        "decode": phase([run], "decode"),
        **spreads([run]),
        "interrupted": run.interrupted,
    }


def headline(figures: dict[str, Any]) -> list[str]:
    so_far = f"interrupted: {figures['num_finished']} of " if figures["interrupted"] else ""
    return [
        f"throughput  {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['output_tokens_per_second']:,.1f} output tok/s, "
        f"{figures['tokens_per_second']:,.1f} tok/s with prompts",
        f"load        {so_far}{figures['num_requests']:,} requests, {figures['total_input_tokens']:,} tokens in, "
        f"{figures['total_output_tokens']:,} out, {figures['elapsed_time']:.2f} s",
    ]
