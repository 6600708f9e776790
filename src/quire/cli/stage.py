"""`quire stage`: compute some layers of a model for an engine on another machine."""

import sys
from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.hub import DEFAULT_MODEL, resolve_model

DEFAULT_ADDRESS = "127.0.0.1:7100"

EXAMPLES = """\
  quire stage ./model.gguf --listen 10.0.0.1:7100                 on the machine 10.0.0.1
  quire serve ./model.gguf --pipeline-stages 10.0.0.1:7100        on another one, with the same files
  quire serve ./model.gguf --pipeline-stages 10.0.0.1:7100,10.0.0.2:7100      three stages
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("stage [MODEL]", "Compute some layers of a model for an engine on another machine.", EXAMPLES)
    add = parser.add_argument
    add("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="path, repository or short name")
    add("--listen", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"where to listen (default: {DEFAULT_ADDRESS})")
    add("--threads", type=int, metavar="N", help="threads that compute (default: as many as CPUs)")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: info)")
    arguments = parser.parse(argv)
    path = resolve_model(arguments.model, revision=arguments.revision).path
    from quire.executors.pipeline.listener import StageListener
    from quire.ops.native.cpus import compute_threads
    from quire.server.observe.logs import set_up_logging

    set_up_logging(arguments.log_level, "text")
    listener = StageListener(path, arguments.listen, arguments.threads or compute_threads())
    print(
        f"a stage of {path.name} on {listener.address}\n  quire serve {arguments.model} --pipeline-stages "
        f"{listener.address}",
        file=sys.stderr,
        flush=True,
    )
    listener.serve()
    return 0
