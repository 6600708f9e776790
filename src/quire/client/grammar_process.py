"""Tries languages out, each in a process of its own: one that takes too much time or memory, or crashes, ends alone.

Started as `python -m quire.client.grammar_process TOKENIZER VOCAB_SIZE`. A line of JSON comes in for each language; a
line goes out: null, or what is wrong with it. It ends with its standard input."""

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

CPU_SECONDS = 0.5  # for one language; real ones take a fiftieth of that
MEMORY = 2**30  # bytes beyond what is there before
PATIENCE = 5  # added to niceness: where there is no core to spare, the engine comes first
FIRST_TOKENS = 16  # of an answer, taken as they come: a language that cannot be followed is often found out by them


def main(tokenizer: Path, vocab_size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    grammars = GrammarCompiler(lambda: Tokenizer.load(tokenizer), vocab_size)
    grammars.compile(Structured("json"))  # all that is needed is loaded now, and there in every child
    _limit_memory()
    os.nice(PATIENCE)
    print("ready", flush=True)
    for line in sys.stdin:
        structured = Structured(**json.loads(line))
        child = os.fork()
        if not child:
            _try_and_exit(grammars, structured)
        _, status = os.waitpid(child, 0)
        if status:
            _tell(_too_complex(structured, "it takes too long" if status == signal.SIGPROF else "it is too deep"))


def _try_and_exit(grammars: GrammarCompiler, structured: Structured) -> None:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # nobody handles SIGPROF: it ends the process
    problem: QuireError | None = None
    try:
        grammars.compile(structured)
        if error := _follow(grammars, structured):
            problem = _too_complex(structured, error)
    except QuireError as error:
        problem = error
    except MemoryError:
        os._exit(1)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _tell(problem)
    os._exit(0)


def _follow(grammars: GrammarCompiler, structured: Structured) -> str:
    """Why an answer could not go on; empty if it could."""
    matcher = grammars.matcher(structured)
    for number in range(FIRST_TOKENS):
        allowed = int.from_bytes(matcher.mask(), "little")
        if matcher.ended or matcher.error:
            break
        part = allowed & (1 << allowed.bit_length() * (number % 4 + 1) // 4) - 1  # of the vocabulary: variety
        matcher.advance([(part or allowed).bit_length() - 1])
    return matcher.error


def _too_complex(structured: Structured, why: str) -> BadRequest:
    return BadRequest(
        f"the {structured.kind} of the answer cannot be used: {why}",
        "ask for something simpler: fewer alternatives, references and repetitions",
    )


def _tell(problem: QuireError | None) -> None:
    print(json.dumps(problem and [problem.message, problem.hint]), flush=True)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
