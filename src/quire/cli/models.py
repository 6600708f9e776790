"""`quire models`: list the downloaded models."""

import json
from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.hub import ALIASES, cache_dir, cached_models

EXAMPLES = """\
  quire models
  quire models --json | jq -r '.[].name'
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("models", "List the models in Quire's cache and in the Hugging Face hub's.", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="a JSON list")
    arguments = parser.parse(argv)
    models = cached_models()
    if arguments.json:
        rows = [{"name": model.name, "path": str(model.path), "bytes": model.num_bytes} for model in models]
        print(json.dumps(rows, indent=2))
        return 0
    for model in models:
        print(f"{model.num_bytes / 1e9:7.2f} GB  {model.name}")
    if not models:
        print(f"no models yet, neither in {cache_dir()} nor in the hub's cache")
    print(f"\nshort names for `quire pull`: {', '.join(ALIASES)}")
    return 0
