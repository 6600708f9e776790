"""`quire train-head`: a draft head for a model, taught with the model's own answers."""

import json
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.interrupts import first_interrupt_noted
from quire.cli.parser import Parser, UsageError
from quire.cli.progress import ProgressLine

if TYPE_CHECKING:
    from quire.train.command import TrainResult
    from quire.train.options import TrainOptions

EXAMPLES = """\
  quire train-head --method eagle3 smollm2 ./head                            the model writes prompts and answers itself
  quire train-head --method eagle3 smollm2 ./head --data chats.jsonl         answers to the prompts of a file
  quire train-head --method eagle3 smollm2 ./head --minutes 8 --draft-vocab-size 4096
  quire train-head --method medusa ./llama ./heads --data answers.jsonl --no-generate
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "train-head --method METHOD MODEL OUT", "Teach a draft head to a model with its own answers.", EXAMPLES
    )
    add_flags(parser)
    arguments = parser.parse(argv)
    if find_spec("torch") is None:
        raise UsageError("train-head needs torch, and it is not installed", "pip install 'quire[train]'")
    return _train(arguments)


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory, a GGUF file or a hub repository: the target")
    add("out", metavar="OUT", help="the folder of the head; it appears when it is whole")
    add("--method", required=True, choices=("eagle3", "medusa"), help="what is trained")
    add("--data", default="self", metavar="FILE", help="a .txt or .jsonl file; self: the model writes the prompts, too")
    add("--no-generate", action="store_true", help="train on the texts as they are, instead of the model's answers")
    add("--answers", type=int, default=4096, metavar="N", help="texts to train on, at most (default: 4096)")
    add("--answer-tokens", type=int, default=256, metavar="N", help="of an answer, at most (default: 256)")
    add("--max-length", type=int, default=512, metavar="N", help="tokens of prompt and answer (default: 512)")
    add("--temperature", type=float, default=0.8, metavar="X", help="of every second answer (default: 0.8)")
    add("--held-out", type=int, default=64, metavar="N", help="prompts kept for measuring (default: 64)")
    add("--drafts", type=int, default=3, metavar="N", help="draft tokens of a step that are trained (default: 3)")
    add("--draft-vocab-size", type=int, metavar="N", help="tokens that can be drafted (default: eagle3 8192)")
    add("--intermediate-size", type=int, metavar="N", help="of eagle3's layer (default: the model's)")
    add(
        "--aux-layers",
        metavar="N,N,N",
        help="of eagle3: the layers whose inputs it gets (default: 2, middle, last - 3)",
    )
    add("--steps", type=int, default=2000, metavar="N", help="of the optimizer (default: 2000)")
    add("--minutes", type=float, metavar="X", help="take as many steps as fit into this time, answers included")
    add("--batch-size", type=int, default=32, metavar="N", help="texts of a step (default: 32)")
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="the highest (default: 0.001)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, answers and the order of texts (default: 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU where there is one")
    add("--json", action="store_true", help="one JSON object")
    add("-q", "--quiet", action="store_true", help="show no progress")


def _train(arguments: Namespace) -> int:
    from quire.hub import resolve_model
    from quire.train.command import TrainRun

    options = _options(arguments)
    options.check()
    files = resolve_model(arguments.model, progress=not arguments.quiet)
    job = TrainRun(files.path, files.name, Path(arguments.out), options, arguments.device)
    with first_interrupt_noted() as noted, ProgressLine(quiet=arguments.quiet) as progress:
        try:
            outcome = job.run(progress, noted.is_set)
        except KeyboardInterrupt:
            progress.note(f"stopped; what is done is kept in {arguments.out}.partial: the same command goes on")
            raise
    print(json.dumps(outcome.as_json(), indent=2) if arguments.json else report(outcome))
    return 0


def _options(arguments: Namespace) -> "TrainOptions":
    from quire.train.options import TrainOptions

    same = (
        "method", "data", "answers", "answer_tokens", "max_length", "temperature", "held_out", "drafts",
        "draft_vocab_size", "intermediate_size", "steps", "minutes", "batch_size", "learning_rate", "seed",
    )  # fmt: skip
    given = {name: getattr(arguments, name) for name in same}
    return TrainOptions(**given, generate=not arguments.no_generate, aux_layers=_layers(arguments.aux_layers))


def _layers(given: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in given.split(",")) if given else ()
    except ValueError:
        raise UsageError(f"--aux-layers is {given}", "give three numbers, such as 2,15,27") from None


def report(outcome: "TrainResult") -> str:
    training, acceptance = outcome.training, outcome.acceptance
    rates = ", ".join(f"{100 * rate:.1f}" for rate in acceptance.rates)
    return "\n".join([
        f"{outcome.out}: {outcome.nbytes / 1e6:,.1f} MB, {training['weights'] / 1e6:,.2f} M weights",
        f"  {training['answers']:,} texts, {training['answer_tokens']:,} tokens, {training['steps']:,} steps: "
        f"answers {training['answer_seconds']:.0f} s, training {training['train_seconds']:.0f} s",
        f"held out, greedy, {acceptance.num_drafts} drafts a step, {acceptance.num_steps:,} steps:",
        f"  mean accepted length {acceptance.mean_length:.3f} (the verifier's own token counts)",
        f"  drafts accepted, by position: {rates} %; tokens that can be drafted at all: "
        f"{100 * training['draft_vocab_coverage']:.1f} %",
    ])  # fmt: skip
