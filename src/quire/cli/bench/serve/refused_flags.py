"""Flags and datasets of `vllm bench serve` that are not here: refused by name, with what to do instead."""

import argparse
from collections.abc import Sequence
from typing import Any

from quire.cli.parser import Parser, UsageError

_CUSTOM = "write its prompts as JSON lines: --dataset-name custom --dataset-path prompts.jsonl"
_TEXT_ONLY = "requests have text only"

DATASETS = {
    "hf": f"datasets of the hub are not downloaded; {_CUSTOM}",
    "sonnet": f"it is prompts that begin alike: --dataset-name prefix_repetition; or {_CUSTOM}",
    "spec_bench": _CUSTOM,
    "speed_bench": _CUSTOM,
    "random-mm": f"{_TEXT_ONLY}: --dataset-name random",
    "random-rerank": "/v1/rerank is not put under load here: --dataset-name random asks for completions",
    "custom_mm": f"{_TEXT_ONLY}; {_CUSTOM}",
    "custom_image": f"{_TEXT_ONLY}; {_CUSTOM}",
    "custom_audio": f"{_TEXT_ONLY}; {_CUSTOM}",
}

# Flag -> what to do. Each may have values.
FLAGS = {
    "--profile": "start the server under a profiler",
    "--use-beam-search": """--extra-body '{"n": 4}' asks for several answers""",
    "--plot-timeline": "--save-detailed writes the times of each request",
    "--timeline-itl-thresholds": "--save-detailed writes the times of each request",
    "--plot-dataset-stats": "--save-detailed writes the lengths of each request",
    "--probe-request-rate": "start a second `quire bench serve` with a low --request-rate beside this one",
    "--chat-template-kwargs": """the server makes the prompt: --extra-body '{"chat_template_kwargs": {...}}'""",
    "--enable-multimodal-chat": _TEXT_ONLY,
    "--no-self-timed": "--dataset-name burstgpt takes the lengths of a CSV file, and --request-rate",
    "--random-batch-size": "--max-concurrency sends several requests at once",
    **dict.fromkeys(("--hf-name", "--hf-subset", "--hf-split", "--hf-output-len"), DATASETS["hf"]),
    **dict.fromkeys(("--sonnet-input-len", "--sonnet-output-len", "--sonnet-prefix-len"), DATASETS["sonnet"]),
    **dict.fromkeys(("--spec-bench-output-len", "--spec-bench-category"), _CUSTOM),
}


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = str(option_string)
        raise UsageError(f"`quire bench serve` has no {flag}, which `vllm bench serve` has", FLAGS[flag])


def add_refused_flags(parser: Parser) -> None:
    for flag in FLAGS:
        parser.add_argument(flag, action=_Refused, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
