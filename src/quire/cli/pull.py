"""`quire pull`: download a model before it is needed."""

from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.hub import DEFAULT_MODEL, resolve_model

EXAMPLES = """\
  quire pull                                              the default model
  quire pull Qwen/Qwen2.5-0.5B-Instruct
  quire pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M       one GGUF file of a repository
  HF_HUB_OFFLINE=1 quire pull Qwen/Qwen2.5-0.5B-Instruct  is it here already?
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("pull [MODEL]", "Download a model, unless it is in the cache, and print its path.", EXAMPLES)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="repository or short name")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    arguments = parser.parse(argv)
    print(resolve_model(arguments.model, revision=arguments.revision, progress=not arguments.quiet).path)
    return 0
