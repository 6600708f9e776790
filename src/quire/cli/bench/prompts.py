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


@dataclass(frozen=True, slots=True)
class FilePrompt:
    prompt: str | list[int]
    output_len: int


def read_prompts(path: Path, encode: Encode, max_prompts: int, output_len: int) -> list[BenchRequest]:
    """The first prompts of a file, as ids."""
    requests = []
    for entry in read_file(path, max_prompts, output_len):
        ids = encode(entry.prompt) if isinstance(entry.prompt, str) else entry.prompt
        if not ids:
            raise UsageError(f"{path} has an empty prompt", "give at least one token")
        requests.append(BenchRequest(ids, entry.output_len))
    return requests


def read_file(path: Path, max_prompts: int | None, output_len: int) -> list[FilePrompt]:
    """One JSON object on each line: `prompt` or `prompt_token_ids`, and maybe `output_len` (or `output_tokens`)."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = _first_lines(file, max_prompts)
            prompts = [_parse(line, f"{path}, line {number}", output_len) for number, line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "give a file with one JSON object a line") from error
    if not prompts:
        raise UsageError(f"{path} holds no prompt", 'a line looks like {"prompt": "Why is the sky blue?"}')
    return prompts


def _first_lines(lines: Any, max_prompts: int | None) -> Iterator[tuple[int, str]]:
    """Numbered from 1; empty ones do not count."""
    count = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line
            count += 1
        if count == max_prompts:
            return


def _parse(line: str, where: str, output_len: int) -> FilePrompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: {error}", "every line is one JSON object") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("prompt_token_ids" in entry):
        raise UsageError(f"{where} has no prompt, or two", 'a line looks like {"prompt": "Why is the sky blue?"}')
    length = entry.get("output_len", entry.get("output_tokens", output_len))
    if length is None or not _is_count(length) or length == 0:
        raise UsageError(f"{where}: output_len is {length!r}", "it is a number of tokens")
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise UsageError(f"{where}: prompt is {entry['prompt']!r}", "it is a text; ids are prompt_token_ids")
        return FilePrompt(entry["prompt"], length)
    ids = entry["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or not all(_is_count(token) for token in ids):
        raise UsageError(f"{where}: the prompt is empty, or has a value that is no token id", "give at least one token")
    return FilePrompt(ids, length)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
