"""Loads a model into this process from flags, for `run` and `chat`."""

import argparse
import time
from dataclasses import fields
from typing import Any

from quire.cli.answer import TextEngine
from quire.cli.flags import About, add_flags, add_model_flag, read_flags
from quire.cli.parser import Parser
from quire.cli.peer_flags import add_peer_flags
from quire.cli.sampling import SamplingFlags
from quire.engine.options import ENGINES, LORA, SERVING, EngineOptions

# `seed` is the sampling flag here. The rest has no effect on a process with one user.
_SERVING_ONLY = ("seed", "served_model_name", *SERVING, "scheduling_policy", *ENGINES, *LORA)


def add_model_flags(parser: Parser, *, about: About | None = None) -> None:
    add_model_flag(parser)
    parser.add_argument(
        "--lora", metavar="PATH", default="", help="a LoRA adapter: a directory saved by PEFT, or a .gguf file"
    )
    add_flags(parser, SamplingFlags, "sampling", about=about)
    add_flags(parser, EngineOptions, "engine", skip=("model", *_SERVING_ONLY))
    add_peer_flags(parser)


def load(arguments: argparse.Namespace) -> tuple[TextEngine, str, float]:
    """-> the engine, the name of the model, and the seconds that loading took."""
    options = read_flags(EngineOptions, argparse.Namespace(**_without_seed(arguments)))
    started = time.monotonic()
    from quire.api.llm import LLM

    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(options)}
    if arguments.lora:
        given |= {"enable_lora": True, "max_loras": 1}
    llm = LLM(**given)
    if arguments.lora:
        llm.load_adapter(arguments.lora, arguments.lora)
    return llm, options.model, time.monotonic() - started


def _without_seed(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "seed"}
