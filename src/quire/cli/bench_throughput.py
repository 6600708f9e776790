"""`quire bench throughput`: everything at once, as in offline batches; how much comes out a second."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.cli.bench_engine import BenchRun, EngineBench
from quire.cli.bench_load import add_engine_flags, progress, read_engine_options, start
from quire.cli.bench_prompts import Wanted, random_prompts, read_prompts
from quire.cli.bench_report import check_target, phase, spreads, surroundings, tell
from quire.cli.flags import add_flags, read_flags
from quire.cli.interrupts import first_interrupt_noted
from quire.cli.main import INTERRUPTED
from quire.cli.parser import Parser, UsageError
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions

EXAMPLES = """\
  quire bench throughput --num-prompts 64 --input-len 128 --output-len 64
  quire bench throughput -m ./model.gguf --dataset-path prompts.jsonl --output-json result.json
  quire bench throughput -m ./Llama-3.1-8B --load-format dummy --max-num-batched-tokens 8192 --max-num-seqs 512 \\
      --input-len 1000 --output-len 1000
"""


def _flag(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputFlags:
    num_prompts: int = _flag(1000, "requests, all of them submitted at once")
    input_len: int = _flag(1024, "tokens of each prompt: random ids")
    output_len: int = _flag(128, "tokens drawn for each; nothing ends earlier")
    dataset_path: str | None = _flag(
        None,
        "take the prompts from this file instead: one JSON object a line, with `prompt` or `prompt_token_ids` "
        "and maybe `output_len`; at most --num-prompts of them",
        metavar="FILE",
    )
    temperature: float = _flag(1.0, "how tokens are drawn; 0 takes the most likely")
    num_warmups: int = _flag(1, "requests before it counts: kernels are compiled, memory is touched")
    output_json: str | None = _flag(None, "keep the figures there; - prints them instead of text", metavar="FILE")

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "input_len": 1, "output_len": 1, "num_warmups": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", f"give at least {low}")


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "bench throughput",
        "Complete many prompts as fast as this machine can. Ctrl-C ends it with what was measured so far.",
        EXAMPLES,
    )
    add_flags(parser, ThroughputFlags, "benchmark")
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    flags, options = read_flags(ThroughputFlags, arguments), read_engine_options(arguments)
    check_target(flags.output_json)
    engine, start_seconds = start(options)
    wanted = prompts(flags, options, engine)
    bench = EngineBench(engine, flags.temperature, options.seed or 0)
    with first_interrupt_noted() as noted:
        bench.run([Wanted(one.prompt_ids, min(one.output_len, 2)) for one in wanted[: flags.num_warmups]])
        with progress(len(wanted), "request") as one_more:
            found = bench.run(wanted, one_more, noted.is_set)
    figures = surroundings(options, engine, start_seconds) | measured(found)
    tell(headline(figures), figures, flags.output_json)
    return INTERRUPTED if found.interrupted else 0


def prompts(flags: ThroughputFlags, options: EngineOptions, engine: Engine) -> list[Wanted]:
    if flags.dataset_path is None:
        vocab_size, seed = engine.capacity.vocab_size, options.seed or 0
        return random_prompts(flags.num_prompts, flags.input_len, flags.output_len, vocab_size, seed)
    from quire.hub import resolve_model
    from quire.text.tokenizers.tokenizer import Tokenizer

    place = (
        Path(options.tokenizer) if options.tokenizer else resolve_model(options.model, revision=options.revision).path
    )
    encode = Tokenizer.load(place).encode
    return read_prompts(Path(flags.dataset_path), encode, flags.num_prompts, flags.output_len)


def measured(run: BenchRun) -> dict[str, Any]:
    """The first names are those of vLLM's file."""
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


def headline(found: dict[str, Any]) -> list[str]:
    so_far = f"interrupted: {found['num_finished']} of " if found["interrupted"] else ""
    return [
        f"throughput  {found['requests_per_second']:.2f} requests/s, {found['output_tokens_per_second']:,.1f} output "
        f"tok/s, {found['tokens_per_second']:,.1f} tok/s with prompts",
        f"load        {so_far}{found['num_requests']:,} requests, {found['total_input_tokens']:,} tokens in, "
        f"{found['total_output_tokens']:,} out, {found['elapsed_time']:.2f} s",
    ]
