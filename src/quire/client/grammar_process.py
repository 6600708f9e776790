"""Tries out grammars, each in a process of its own: one that takes too much time or memory, or crashes, ends alone.

Started as `python -m quire.client.grammar_process TOKENIZER VOCAB_SIZE`. It reads a line of JSON for each
grammar and prints one: null, or what is wrong with it. It ends with its standard input."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

from quire.core.errors import BadRequest, QuireError
from quire.core.structured import Structured
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer

MAX_CPU_SECONDS = 0.5  # for one grammar; real ones take a fiftieth of that
MAX_MEMORY = 2**30  # bytes beyond what is loaded at the start
CHECK_NICENESS = 5  # added to the process's: where no core is to spare, the engine comes first
TRIED_TOKENS = 16  # of an output that follows the grammar: many a grammar that compiles fails on the first tokens


def main(tokenizer: Path, vocab_size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    grammars = GrammarCompiler(lambda: Tokenizer.load(tokenizer), vocab_size)
    grammars.compile(Structured("json"))  # loads all that compiling needs, for every child
    _limit_memory()
    os.nice(CHECK_NICENESS)
    print("ready", flush=True)
    for line in sys.stdin:
        structured = Structured(**json.loads(line))
        child = os.fork()
        if not child:
            _try_and_exit(grammars, structured)
        _, status = os.waitpid(child, 0)
        if status:
            _report(_too_complex(structured, "it takes too long" if status == signal.SIGPROF else "it is too deep"))


def _try_and_exit(grammars: GrammarCompiler, structured: Structured) -> None:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)  # SIGPROF is not handled: it ends the process
    failure: QuireError | None = None
    try:
        grammars.compile(structured)
        if error := _follow(grammars, structured):
            failure = _too_complex(structured, error)
    except QuireError as error:
        failure = error
    except MemoryError:
        os._exit(1)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _report(failure)
    os._exit(0)


def _follow(grammars: GrammarCompiler, structured: Structured) -> str:
    """Why an output could not follow the grammar; empty if it could."""
    matcher = grammars.matcher(structured)
    for number in range(TRIED_TOKENS):
        allowed = int.from_bytes(matcher.mask(), "little")
        if matcher.ended or matcher.error:
            break
        part = allowed & (1 << allowed.bit_length() * (number % 4 + 1) // 4) - 1  # of the vocabulary: variety
        matcher.advance([(part or allowed).bit_length() - 1])
    return matcher.error


def _too_complex(structured: Structured, why: str) -> BadRequest:
    return BadRequest(
        f"the {structured.kind} cannot be used for structured output: {why}",
        "ask for something simpler: fewer alternatives, references and repetitions",
    )


def _report(failure: QuireError | None) -> None:
    print(json.dumps(failure and [failure.message, failure.hint]), flush=True)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
