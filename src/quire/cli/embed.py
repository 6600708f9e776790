"""`quire embed`: texts to embeddings or scores, as lines of JSON."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

from quire.cli.flags import add_flags, read_flags
from quire.cli.parser import Parser, UsageError
from quire.cli.peer_flags import add_peer_flags
from quire.engine.options import ENGINES, GENERATION, LORA, ROPE, SERVING, SPECULATION, EngineOptions

EXAMPLES = """\
  quire embed -m ./all-MiniLM-L6-v2 "A quire is a gathering of pages"
  quire embed -m ./all-MiniLM-L6-v2 < lines.txt > embeddings.jsonl
  quire embed -m ./ms-marco-MiniLM-L6-v2 --score "What is a quire?" "A gathering of pages" "A group of singers"
  quire embed -m ./Qwen3-Reranker-0.6B --task score --score "What is a quire?" "A gathering of pages"
"""

# Options of queues, sampling and the KV cache have no effect here.
_GENERATION_ONLY = (
    *("model", "seed", "served_model_name", *SERVING, "max_wait", "scheduling_policy"),
    *(
        "enable_prefix_caching",
        "long_prefill_token_threshold",
        "target_itl_ms",
        "block_size",
        "kv_cache_memory_bytes",
        "swap_space",
    ),
    *("kv_offloading_size", "kv_disk_path", "kv_disk_size", "kv_disk_write_policy", "kv_events_config"),
    *("load_format", "gpu_memory_utilization", "enforce_eager", *ENGINES, *GENERATION, *LORA, *ROPE, *SPECULATION),
)


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "embed [TEXT ...]",
        "Print a JSON object for each text: its embedding, or with --score, its score for the query.",
        EXAMPLES,
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, the lines of stdin")
    parser.add_argument("-m", "--model", default=argparse.SUPPRESS, help="a directory or a hub repository")
    parser.add_argument("--score", metavar="QUERY", help="score the texts against this one")
    parser.add_argument("--pooling", choices=("cls", "mean", "last"), help="how hidden states become one embedding")
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="scale embeddings to length 1")
    parser.add_argument("--prompt-name", metavar="NAME", help="put this prompt of the checkpoint before every text")
    parser.add_argument("--dimensions", metavar="N", type=int, help="keep the first N dimensions of each embedding")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")
    add_flags(parser, EngineOptions, "engine", skip=_GENERATION_ONLY)
    add_peer_flags(parser)
    arguments = parser.parse(argv)
    options = read_flags(EngineOptions, arguments)
    if not hasattr(arguments, "model") and "QUIRE_MODEL" not in os.environ:
        raise UsageError("there is no model to embed with", "name one: `quire embed -m ./all-MiniLM-L6-v2`")
    texts = arguments.texts or read_lines()

    from quire.api.embedder import Embedder

    given = {field.name: getattr(options, field.name) for field in fields(options)}
    embedder = Embedder(pooling=arguments.pooling, normalize=arguments.normalize, **given)
    if arguments.score is not None:
        scores = embedder.score(arguments.score, texts, truncate=arguments.truncate)
        write([{"index": index, "score": score} for index, score in enumerate(scores)])
        return 0
    vectors = embedder.embed(
        texts, prompt_name=arguments.prompt_name, truncate=arguments.truncate, dimensions=arguments.dimensions
    )
    write([{"index": index, "embedding": vector} for index, vector in enumerate(vectors.tolist())])
    return 0


def read_lines() -> list[str]:
    if sys.stdin.isatty():
        raise UsageError("there is no text", 'give texts in quotes, `quire embed -m MODEL "some text"`, or on stdin')
    try:
        lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
    except UnicodeError as failure:
        raise UsageError(f"the texts are not UTF-8: {failure}", "convert them, with iconv say") from failure
    if not lines:
        raise UsageError("there is no text on stdin", "write one a line")
    return lines


def write(objects: Sequence[dict[str, object]]) -> None:
    for entry in objects:
        print(json.dumps(entry))
