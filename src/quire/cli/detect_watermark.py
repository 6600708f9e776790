"""`quire detect-watermark`: does a text have a watermark?"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quire.cli.parser import Parser, UsageError
from quire.core.watermark import DEFAULT_GAMMA, DEFAULT_KEY, Watermark
from quire.hub import DEFAULT_MODEL, resolve_model

EXAMPLES = """\
  quire detect-watermark answer.txt
  quire run "Write about rivers" | quire detect-watermark
  quire detect-watermark --model ./model.gguf --key 42 --json answer.txt
"""

DEFAULT_THRESHOLD = 4.0  # standard deviations: one unmarked text in 32,000 has as many green tokens
FOUND, NOT_FOUND = 0, 1


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "detect-watermark [FILE]",
        "Count the tokens that a watermark favours. The exit status is 0 if there is a watermark, 1 if none is found.",
        EXAMPLES,
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the text; left out: stdin")
    parser.add_argument(
        "-m", "--model", default=DEFAULT_MODEL, help="the model that would have written it; its tokenizer is needed"
    )
    parser.add_argument("--key", type=int, default=DEFAULT_KEY, help="as given to `quire serve --watermark-key`")
    parser.add_argument("--gamma", type=float, default=DEFAULT_GAMMA, help="as given to --watermark-gamma")
    parser.add_argument(
        "--threshold",
        type=float,
        default=DEFAULT_THRESHOLD,
        metavar="Z",
        help="z-score of a watermark",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse(argv)
    mark = Watermark(gamma=arguments.gamma, key=arguments.key)
    text = _read(arguments.file)

    from quire.ops.watermark import detect
    from quire.text.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(arguments.model).path)
    evidence = detect(mark, tokenizer.encode(text, add_special_tokens=False))
    marked = evidence.z >= arguments.threshold
    if arguments.json:
        print(json.dumps({**asdict(evidence), "p_value": evidence.p_value, "watermark": marked}))
    else:
        verdict = "a watermark" if marked else "no watermark found"
        print(f"{verdict}: {evidence.green} of {evidence.scored} pairs are green")
        print(f"z = {evidence.z:.2f}; p = {evidence.p_value:.1e} that an unmarked text has as many")
    return FOUND if marked else NOT_FOUND


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode().strip()
    except OSError as failure:
        raise UsageError(f"{name} cannot be read: {failure.strerror}") from failure
    except UnicodeError as failure:
        raise UsageError(f"the text is not UTF-8: {failure}", "convert it, with iconv say") from failure
    if not text:
        raise UsageError("there is no text", "name a file, or write it to stdin")
    return text
