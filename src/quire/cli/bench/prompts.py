"""The requests of a benchmark: random ids of one length, or the prompts of a file."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.parser import UsageError

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_ids: list[int]
    output_len: int


def random_prompts(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """No two share a prefix, so no cache helps. The same seed gives the same ids on every machine."""
    rng = random.Random(seed)
    return [BenchRequest(rng.choices(range(vocab_size), k=input_len), output_len) for _ in range(count)]


def read_prompts(path: Path, encode: Encode, max_prompts: int, output_len: int) -> list[BenchRequest]:
    """From a file with one JSON object on each line: `prompt` or `prompt_token_ids`, and maybe `output_len`."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = _first_lines(file, max_prompts)
            requests = [_parse(line, f"{path}, line {number}", encode, output_len) for number, line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "give a file with one JSON object a line") from error
    if not requests:
        raise UsageError(f"{path} holds no prompt", 'a line looks like {"prompt": "Why is the sky blue?"}')
    return requests


def _first_lines(lines: Any, max_prompts: int) -> Iterator[tuple[int, str]]:
    """Numbered from 1; empty ones do not count."""
    count = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line
            count += 1
        if count == max_prompts:
            return


def _parse(line: str, where: str, encode: Encode, output_len: int) -> BenchRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: {error}", "every line is one JSON object") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("prompt_token_ids" in entry):
        raise UsageError(f"{where} has no prompt, or two", 'a line looks like {"prompt": "Why is the sky blue?"}')
    length, ids = entry.get("output_len", output_len), entry.get("prompt_token_ids")
    if not _is_count(length) or length == 0:
        raise UsageError(f"{where}: output_len is {length!r}", "it is a number of tokens")
    if ids is None:
        if not isinstance(entry["prompt"], str):
            raise UsageError(f"{where}: prompt is {entry['prompt']!r}", "it is a text; ids are prompt_token_ids")
        ids = encode(entry["prompt"])
    if not isinstance(ids, list) or not ids or not all(_is_count(token) for token in ids):
        raise UsageError(f"{where}: the prompt is empty, or has a value that is no token id", "give at least one token")
    return BenchRequest(ids, length)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
