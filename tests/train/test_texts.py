"""The files of `--data`: texts, prompts and messages, and what is wrong with a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.text.tokenizers.tokenizer import Tokenizer
from quire.train import texts
from quire.train.options import TrainError
from quire.train.texts import Example, read_examples, read_prompts

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
ASKED = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


def lines(path: Path, *samples: Any) -> Path:
    file = path / "data.jsonl"
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in samples))
    return file


def test_prompts_are_what_the_model_goes_on_with(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = lines(
        tmp_path, {"prompt": "Once"}, "", {"messages": [USER]}, {"messages": [USER, ANSWER]}, {"text": "x" * 300}
    )
    prompts = list(read_prompts(file, tokenizer, 100))
    shown = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    assert shown == ["Once", ASKED, ASKED, "x" * 64, "x" * 64]


def test_a_long_prompt_keeps_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(next(read_prompts(lines(tmp_path, {"prompt": "abcdef"}), tokenizer, 3))) == "def"


def test_texts_are_taught_whole_and_answers_without_their_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    samples = {"text": "abc"}, {"prompt": "ab", "completion": "cde"}, {"messages": [USER, ANSWER]}
    examples = list(read_examples(lines(tmp_path, *samples), tokenizer, 100))
    taught = [tokenizer.decode(example.ids[example.start :], skip_special_tokens=False) for example in examples]
    assert taught == ["abc", "cde", "Because.<|im_end|>\n"]


def test_a_text_is_cut_into_pieces(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = lines(tmp_path, {"prompt": "abc", "completion": "defghijkl"})
    pieces = list(read_examples(file, tokenizer, 8))
    assert [(len(piece.ids), piece.start) for piece in pieces] == [(8, 3), (4, 0)]
    assert isinstance(pieces[0], Example)


def test_paragraphs_of_a_text_file_are_joined_until_they_are_long_enough(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("short\n\n" * 10 + "long " * 60 + "\n\nend\n")
    examples = list(read_examples(file, tokenizer, 1000))
    assert len(examples) == 2 and "".join(tokenizer.decode(e.ids) for e in examples) == file.read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is no JSON"),
        ("3", "none of text, prompt, messages"),
        ({"question": "?"}, "none of text, prompt, messages"),
        ({"text": "a", "prompt": "b"}, "or several"),
        ({"text": 5}, "text is 5"),
        ({"prompt": ""}, "prompt is ''"),
        ({"messages": []}, "messages is \\[\\]"),
        ({"messages": [{"role": "user"}]}, "a message is"),
        ({"messages": [ANSWER]}, "there is nothing to answer"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, tokenizer: Tokenizer, line: Any, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        list(read_prompts(lines(tmp_path, line), tokenizer, 100))


def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TrainError, match="is not UTF-8"):
        list(read_prompts(tmp_path / "latin.txt", tokenizer, 10))
    monkeypatch.setattr(texts, "MAX_FILE_BYTES", 3)
    with pytest.raises(TrainError, match="has 4 bytes, and 3 are read at most"):
        list(read_prompts(tmp_path / "latin.txt", tokenizer, 10))
    monkeypatch.setattr(texts, "MAX_LINE_CHARACTERS", 5)
    monkeypatch.setattr(texts, "MAX_FILE_BYTES", 99)
    with pytest.raises(TrainError, match="has 17 characters, and 5"):
        list(read_prompts(lines(tmp_path, {"prompt": "ab"}), tokenizer, 10))
