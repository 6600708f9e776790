"""A mark in the choice of tokens: who is green, that it is found again, and that nothing else is taken for it."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.api.llm import LLM
from quire.cli import main as cli
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.watermark import Watermark
from quire.ops.native.sampler import NativeSampler
from quire.ops.row_params import RowParams
from quire.ops.watermark import detect, green_tokens, is_green

MARK = Watermark()
VOCAB = 1003  # not a multiple of the four tokens that share a number, nor of a vector


@pytest.mark.parametrize("mark", [MARK, Watermark(gamma=0.25, key=2**64 - 1)])
def test_a_part_of_the_vocabulary_is_green(mark: Watermark) -> None:
    green = green_tokens(mark, 5, VOCAB)
    assert green.tolist() == [is_green(mark, 5, token) for token in range(VOCAB)]
    share = np.mean([green_tokens(mark, before, VOCAB).mean() for before in range(200)])
    assert share == pytest.approx(mark.gamma, abs=4 * (mark.gamma * (1 - mark.gamma) / 200 / VOCAB) ** 0.5)


def test_token_and_key_decide_who_is_green() -> None:
    one, other = green_tokens(MARK, 5, VOCAB), green_tokens(MARK, 6, VOCAB)
    third = green_tokens(replace(MARK, key=MARK.key + 1), 5, VOCAB)
    for left, right in ((one, other), (one, third)):
        assert (left == right).mean() == pytest.approx(0.5, abs=0.07)  # as if they knew nothing of each other


def test_the_sampler_favours_green_tokens_as_much_as_it_was_told() -> None:
    """All logits equal: e^delta green for every red one."""
    sampler, ids = NativeSampler(1, VOCAB), [7]
    sampler.admit(0, RowParams(seed=1, sample=0, watermark=MARK), ids, 1)
    line = np.zeros((1, VOCAB), dtype=np.float32)
    for _ in range(2000):
        ids += sampler.draw(line, [0])[0].tokens
    evidence = detect(MARK, ids)
    expected = np.exp(MARK.delta) / (np.exp(MARK.delta) + 1)
    assert evidence.green / evidence.scored == pytest.approx(
        expected, abs=4 * (expected * (1 - expected) / 2000) ** 0.5
    )
    assert evidence.z > 30 and evidence.p_value < 1e-100


def test_texts_that_nobody_marked_have_no_evidence() -> None:
    """z is a standard normal over texts: its square is 1 on average, and four deviations do not come up."""
    choose = random.Random(3)
    actual = [detect(MARK, [choose.randrange(VOCAB) for _ in range(200)]).z for _ in range(200)]
    assert max(actual) < 4 and np.mean(np.square(actual)) == pytest.approx(1.0, abs=0.4)


def test_a_pair_counts_once() -> None:
    evidence = detect(MARK, [1, 2] * 500)
    assert evidence.scored == 2 and abs(evidence.z) < 2
    assert detect(MARK, [1]).z == 0.0


@pytest.mark.parametrize(
    "wrong", [{"gamma": 0.0}, {"gamma": 1.0}, {"delta": 0.0}, {"delta": float("nan")}, {"key": -1}]
)
def test_values_that_make_no_mark_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        Watermark(**wrong)  # type: ignore[arg-type]


def test_marked_answers_are_told_from_others(
    default_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the default model, from the request to the command that finds it."""
    mark = Watermark(delta=4.0, key=42)
    prompt = "Rivers are"
    wishes = SamplingParams(temperature=1.0, max_tokens=100, seed=5, ignore_eos=True)
    llm = LLM(default_model, max_model_len=256)
    plain, marked = llm.generate([prompt] * 2, [wishes, replace(wishes, watermark=mark)])
    for answer, status in ((marked, 0), (plain, 1)):
        file = tmp_path / "answer.txt"
        file.write_text(answer.outputs[0].text)
        assert cli.main(["detect-watermark", "--key", "42", "--json", "-m", str(default_model), str(file)]) == status
        told = json.loads(capsys.readouterr().out)
        assert told["watermark"] == (status == 0) and told["scored"] > 50
