"""Tries to compile languages, so that a process can be ended that takes too long, too much memory, or crashes.

Started as `python -m quire.engine.grammar_process TOKENIZER VOCAB_SIZE`. A line of JSON comes in for each language; a
line goes out: null, or what is wrong with it. It ends with its standard input."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

from quire.core.errors import QuireError
from quire.core.structured import Structured
from quire.text.grammar import GrammarCompiler
from quire.text.tokenizer import Tokenizer

CPU_SECONDS = 1.0  # for one language; real ones take a hundredth of that
MEMORY = 2**30  # bytes beyond what it has when it is ready, all languages together
PATIENCE = 5  # added to niceness: where there is no core to spare, the engine comes first


def main(tokenizer: Path, vocab_size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    grammars = GrammarCompiler(lambda: Tokenizer.load(tokenizer), vocab_size)
    grammars.compile(Structured("json"))  # all that is needed is loaded now
    _limit_memory()
    os.nice(PATIENCE)
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # nobody handles SIGPROF: it ends the process
        try:
            grammars.compile(Structured(**json.loads(line)))
            problem = None
        except QuireError as error:
            problem = [error.message, error.hint]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(problem), flush=True)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
