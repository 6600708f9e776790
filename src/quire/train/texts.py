"""The file of `--data` as prompts to be answered, or as texts that are used as they are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.text.tokenizers.tokenizer import Tokenizer
from quire.train.options import TrainError

MAX_FILE_BYTES = 1 << 30
MAX_LINE_CHARACTERS = 1 << 22
TEXT_PROMPT_TOKENS = 64  # of a text that the model goes on with
MIN_PARAGRAPH = 200  # characters; shorter ones of a .txt file are joined
KEYS = ("text", "prompt", "messages")
LINE_HINT = 'a line looks like {"text": "..."}, {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True, slots=True)
class Example:
    """A text as ids; those from `start` on are what the model has written, and what a head is taught."""

    ids: list[int]
    start: int


def read_prompts(path: Path, tokenizer: Tokenizer, max_length: int) -> Iterator[list[int]]:
    """What the model is to go on with, at most `max_length` tokens each: the last ones where there are more."""
    for where, sample in _samples(path):
        if "messages" in sample:
            yield _rendered(tokenizer, _without_answer(_messages(sample, where), where), where, True)[-max_length:]
        elif "prompt" in sample:
            yield tokenizer.encode(sample["prompt"])[-max_length:]
        else:
            ids = tokenizer.encode(sample["text"])
            size = min(TEXT_PROMPT_TOKENS, max_length)
            stride = max_length + size
            yield from (ids[first : first + size] for first in range(0, max(len(ids) - size, 1), stride))


def read_examples(path: Path, tokenizer: Tokenizer, max_length: int) -> Iterator[Example]:
    """The texts as they are, in pieces of at most `max_length` tokens."""
    for where, sample in _samples(path):
        if "messages" in sample:
            messages = _messages(sample, where)
            ids = _rendered(tokenizer, messages, where, False)
            answered = messages[-1]["role"] == "assistant"
            start = len(_rendered(tokenizer, messages[:-1], where, True)) if answered and len(messages) > 1 else 0
        elif "prompt" in sample:
            prompt = tokenizer.encode(sample["prompt"])
            completion = sample.get("completion", "")
            if not isinstance(completion, str):
                raise TrainError(f"{where}: completion is {_short(completion)}", "it must be a text")
            ids = [*prompt, *tokenizer.encode(completion, add_special_tokens=False)]
            start = len(prompt) if completion else 0
        else:
            ids, start = tokenizer.encode(sample["text"]), 0
        for first in range(0, len(ids), max_length):
            piece = ids[first : first + max_length]
            if len(piece) - max(start - first, 0) > 2:  # the shortest text with a draft to verify
                yield Example(piece, max(start - first, 0))


def _samples(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every text: of a line of .jsonl, or of some paragraphs of any other file."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise TrainError(f"{path} has {size} bytes, and {MAX_FILE_BYTES} are read at most", "cut it")
        with path.open(encoding="utf-8") as file:
            read = _json_lines if path.suffix == ".jsonl" else _paragraphs
            yield from read(path, file)
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror}", "name a .txt or .jsonl file, or `self`") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is not UTF-8: {error.reason}", "convert it, with iconv say") from error


def _json_lines(path: Path, lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        if len(line) > MAX_LINE_CHARACTERS:
            raise TrainError(
                f"{where} has {len(line)} characters, and {MAX_LINE_CHARACTERS} are read at most", "cut it"
            )
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrainError(f"{where} is no JSON: {error}", LINE_HINT) from None
        if not isinstance(sample, dict) or sum(key in sample for key in KEYS) != 1:
            raise TrainError(f"{where} has none of {', '.join(KEYS)}, or several", LINE_HINT)
        for key in ("text", "prompt"):
            if key in sample and (not isinstance(sample[key], str) or not sample[key]):
                raise TrainError(f"{where}: {key} is {_short(sample[key])}", "it is a text")
        yield where, sample


def _paragraphs(path: Path, lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    gathered, length, begin = [], 0, 1
    for number, line in enumerate(lines, 1):
        gathered.append(line)
        length += len(line)
        if (not line.strip() and length >= MIN_PARAGRAPH) or length >= MAX_LINE_CHARACTERS:
            yield f"{path}, line {begin}", {"text": "".join(gathered)}
            gathered, length, begin = [], 0, number + 1
    if "".join(gathered).strip():
        yield f"{path}, line {begin}", {"text": "".join(gathered)}


def _messages(sample: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages = sample["messages"]
    if not isinstance(messages, list) or not messages:
        raise TrainError(f"{where}: messages is {_short(messages)}", "it is a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise TrainError(f"{where}: a message is {_short(message)}", "it has a role and a content")
    return messages


def _without_answer(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    kept = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not kept:
        raise TrainError(f"{where}: there is nothing to answer", "give a message of the user")
    return kept


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], where: str, to_answer: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise TrainError(f"{where} has messages, and the model has no chat template", "give texts or prompts")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=to_answer)
    assert isinstance(ids, list)
    return ids


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 80 else f"{text[:77]}..."
