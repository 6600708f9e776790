"""`quire run`: one prompt, one answer."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.cli.answer import PrintedAnswer, TextEngine
from quire.cli.flags import read_flags
from quire.cli.load import add_model_flags, load
from quire.cli.parser import Parser, UsageError
from quire.cli.sampling import SamplingFlags
from quire.cli.terminal import Terminal
from quire.client.generate_request import GenerateRequest
from quire.core.params import SamplingParams
from quire.text.chat.chat_format import chat_format

EXAMPLES = """\
  quire run "What is photosynthesis?"
  quire run "Summarize this:" - < notes.txt
  echo "Name three rivers" | quire run --max-tokens 64 --stats
  quire run --raw --temperature 0 "A quire is"
  quire run -m ./model.gguf --json "2 + 2 ="
"""

MAX_TOKENS = 512  # by default: `run` may be unattended


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "run [PROMPT ...]",
        "Answer one prompt. The text is streamed to stdout, all else goes to stderr.",
        EXAMPLES,
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="the prompt; - stands for stdin")
    parser.add_argument("--system", metavar="TEXT", help="how the model should behave")
    parser.add_argument("--raw", action="store_true", help="continue the prompt, without the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of streamed text")
    parser.add_argument("--stats", action="store_true", help="print tokens, time to first token and tokens/s on stderr")
    add_model_flags(parser, about={"max_tokens": {"help": f"longest answer, in tokens (default: {MAX_TOKENS})"}})
    arguments = parser.parse(argv)
    if arguments.raw and arguments.system is not None:
        raise UsageError("--system needs the chat template, and --raw leaves it out", "put the text into the prompt")
    check_is_no_model(arguments.prompt)
    prompt = read_prompt(arguments.prompt)
    flags = read_flags(SamplingFlags, arguments, given={"max_tokens": MAX_TOKENS})
    flags.params()  # a wrong one is refused before the model is loaded

    engine, model, load_seconds = load(arguments)
    params = flags.params(engine.generation.sampling)
    request = make_request(engine, prompt, params, system=arguments.system, raw=arguments.raw)
    request.adapter = arguments.lora
    answer, terminal = PrintedAnswer(), Terminal()
    answer.follow(engine.stream(request), (lambda text: None) if arguments.json else terminal.write)
    if arguments.json:
        print(json.dumps({"model": model, **answer.as_json(), "load_s": load_seconds}, ensure_ascii=False))
    elif not answer.text.endswith("\n"):
        terminal.write("\n")
    if arguments.stats:
        terminal.note(f"{answer.stats()} · loaded in {load_seconds:.2f} s")
    return 0


def check_is_no_model(words: Sequence[str]) -> None:
    """`quire run smollm2 "Why?"`, as it is typed for Ollama, would ask the default model about smollm2."""
    from quire.hub.aliases import ALIASES

    first = words[0] if words else ""
    if len(first) > 255 or not first.strip("."):  # longer than a name can be
        return
    is_file = first.endswith(".gguf") or (Path(first) / "config.json").exists()
    if first.lower() in ALIASES or is_file:
        rest = " PROMPT" if len(words) > 1 else ""
        raise UsageError(
            f"`{first}` is a model, and stands where the prompt does",
            f"write -m: `quire {'run' if rest else 'chat'} -m {first}{rest}`",
        )


def read_prompt(words: Sequence[str]) -> str:
    """The words, with stdin for every `-`; stdin alone where there are no words and it is not a terminal."""
    if not words and sys.stdin.isatty():
        raise UsageError("there is no prompt", 'give it in quotes, `quire run "What is photosynthesis?"`, or on stdin')
    given = list(words) or ["-"]
    try:
        piped = sys.stdin.read().rstrip("\n") if "-" in given else ""
        prompt = " ".join(piped if word == "-" else word for word in given)
        prompt.encode()
    except UnicodeError as failure:
        raise UsageError(f"the prompt is not UTF-8: {failure}", "convert it, with iconv say") from failure
    if not prompt.strip():
        raise UsageError("the prompt is empty", "give at least one word")
    return prompt


def make_request(
    engine: TextEngine, prompt: str, params: SamplingParams, *, system: str | None = None, raw: bool = False
) -> GenerateRequest:
    """A chat of one message if the model has a chat template, else the plain prompt."""
    if raw or not engine.tokenizer.chat_template:
        if system is not None:
            raise UsageError("--system needs a chat template, and this model has none", "put the text into the prompt")
        return GenerateRequest(id="run", params=params, prompt=prompt)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    messages = chat_format(engine.tokenizer.chat_template).messages(messages)
    return GenerateRequest(id="run", params=params, messages=messages)
