"""`quire train-head` from prompts to a folder, on tiny random models: it learns, goes on after a kill, and refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quire.cli import train_head
from quire.core.errors import QuireError, Unsupported
from quire.train import trainer
from quire.train.answers import TrainingStopped
from quire.train.command import TrainResult, TrainRun
from quire.train.options import TrainError, TrainOptions
from quire.train.trainer import rate

SMALL = TrainOptions(
    method="eagle3", answers=32, answer_tokens=16, max_length=112, held_out=4, steps=32, batch_size=8,
    draft_vocab_size=200, intermediate_size=32, learning_rate=5e-3,
)  # fmt: skip


class Recorded:
    """Progress that is remembered, and may be disturbed."""

    def __init__(self, at: Callable[[str, float], None] = lambda phase, done: None) -> None:
        self.at, self.notes, self.last = at, [], ("", 0.0)

    def update(self, phase: str, done: float, total: float) -> None:
        self.last = (phase, done)
        self.at(phase, done)

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(model: Path, out: Path, options: TrainOptions, progress: Any = None, stop: Any = None) -> TrainResult:
    return TrainRun(model, "tiny", out, options, "cpu").run(progress or Recorded(), stop or (lambda: False))


@pytest.fixture(scope="module")
def undisturbed(counting_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, Recorded]:
    progress = Recorded()
    return train(counting_model, tmp_path_factory.mktemp("heads") / "head", SMALL, progress), progress


def test_a_head_learns_the_answers_of_its_model(undisturbed: tuple[TrainResult, Recorded]) -> None:
    outcome, progress = undisturbed
    losses = [float(note.split("loss ")[1].split(",")[0]) for note in progress.notes]
    assert len(losses) == 7 and losses[-1] < 0.5 * losses[0]
    assert outcome.acceptance.mean_length > 1.5, "chance is 1.005"
    assert outcome.acceptance.rates[0] > 0.3 and list(outcome.acceptance.rates) == sorted(
        outcome.acceptance.rates, reverse=True
    )


def test_the_folder_appears_whole(undisturbed: tuple[TrainResult, Recorded]) -> None:
    outcome, _ = undisturbed
    assert {path.name for path in outcome.out.iterdir()} == {"model.safetensors", "config.json", "training.json"}
    assert not outcome.out.with_name("head.partial").exists()
    config, training = (json.loads((outcome.out / name).read_text()) for name in ("config.json", "training.json"))
    assert config["draft_vocab_size"] == 200 and training["steps"] == SMALL.steps
    assert training["mean_accepted_length"] == pytest.approx(outcome.acceptance.mean_length, abs=1e-4)
    assert load_file(outcome.out / "model.safetensors")["lm_head.weight"].shape == (200, 72)
    assert outcome.nbytes == (outcome.out / "model.safetensors").stat().st_size


def same_weights(a: Path, b: Path) -> bool:
    return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def test_after_ctrl_c_the_same_command_gives_the_same_head(
    counting_model: Path, tmp_path: Path, undisturbed: tuple[TrainResult, Recorded]
) -> None:
    progress = Recorded()
    for phase, done in (("answering", 0), ("training", 13), ("training", 14)):
        with pytest.raises(TrainingStopped):
            train(
                counting_model, tmp_path / "head", SMALL, progress,
                lambda phase=phase, done=done: progress.last >= (phase, done),
            )  # fmt: skip
        assert not (tmp_path / "head").exists()
    outcome = train(counting_model, tmp_path / "head", SMALL)
    assert outcome.training["resumed_steps"] == 14
    assert same_weights(outcome.out, undisturbed[0].out)


def test_after_a_kill_the_same_command_gives_the_same_head(
    counting_model: Path, tmp_path: Path, undisturbed: tuple[TrainResult, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(phase: str, done: float) -> None:
        if phase == "training" and done == 9:  # computed, and not saved
            raise RuntimeError("killed")

    monkeypatch.setattr(trainer, "SAVE_SECONDS", -1)
    with pytest.raises(RuntimeError, match="killed"):
        train(counting_model, tmp_path / "head", SMALL, Recorded(killed))
    partial = tmp_path / "head.partial"
    with (partial / "answers.jsonl").open("a") as file:
        file.write("[[3, [1, 2")  # the line that was being written
    monkeypatch.undo()
    outcome = train(counting_model, tmp_path / "head", SMALL)
    assert outcome.training["resumed_steps"] == 8
    assert same_weights(outcome.out, undisturbed[0].out)


def test_other_settings_start_over_and_keep_the_answers(counting_model: Path, tmp_path: Path) -> None:
    options = replace(SMALL, steps=6)
    progress = Recorded()
    with pytest.raises(TrainingStopped):
        train(counting_model, tmp_path / "head", options, progress, lambda: progress.last == ("training", 3))
    answers = (tmp_path / "head.partial" / "answers.jsonl").read_text()
    again = Recorded(lambda phase, done: pytest.fail("answered again") if phase == "answering" else None)
    progress = Recorded()
    with pytest.raises(TrainingStopped):
        train(
            counting_model, tmp_path / "head", replace(options, learning_rate=1e-4), progress,
            lambda: progress.last == ("training", 1),
        )  # fmt: skip
    assert (tmp_path / "head.partial" / "answers.jsonl").read_text() == answers
    assert train(counting_model, tmp_path / "head", replace(options, learning_rate=1e-4), again).training[
        "resumed_steps"
    ]


def test_medusa_heads_are_trained_and_written(counting_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}, {n + 1}, {n + 2}"}) + "\n" for n in range(40)))
    options = replace(SMALL, method="medusa", data=str(data), drafts=2, draft_vocab_size=None, intermediate_size=None)
    outcome = train(counting_model, tmp_path / "heads", options)
    assert {path.name for path in outcome.out.iterdir()} == {
        "medusa_lm_head.safetensors", "config.json", "training.json"
    }  # fmt: skip
    assert outcome.acceptance.mean_length > 1.2 and len(outcome.acceptance.rates) == 2
    assert load_file(outcome.out / "medusa_lm_head.safetensors")["medusa_head.1.1.weight"].shape == (259, 72)


def test_texts_are_used_as_they_are_without_generate(counting_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.txt"
    data.write_text("\n\n".join("The cat sat on the mat. " * 12 for _ in range(30)))
    outcome = train(counting_model, tmp_path / "head", replace(SMALL, data=str(data), generate=False, steps=2))
    assert outcome.training["answers"] > 20 and not outcome.training["options"]["generate"]


def test_minutes_choose_the_number_of_steps(
    counting_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "TIMED_FROM", 1)
    monkeypatch.setattr(trainer, "TIMED_TO", 3)
    monkeypatch.setattr(trainer, "FINISH_SECONDS", 0)
    outcome = train(counting_model, tmp_path / "head", replace(SMALL, minutes=1 / 120))
    assert 3 < outcome.training["steps"] < 2000


def test_the_learning_rate_goes_up_and_down() -> None:
    rates = [rate(step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20) and max(rates) > 0.95 and rates[-1] < 0.06
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert rate(60, 0) == 1.0, "until the number of steps is known"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drafts": 0}, "--drafts is 0"),
        ({"drafts": 17}, "--drafts is 17"),
        ({"answer_tokens": 112}, "--answer-tokens is 112, and --max-length 112"),
        ({"learning_rate": 0.0}, "--learning-rate is 0"),
        ({"minutes": 0.0}, "--minutes is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"temperature": 3.0}, "--temperature is 3"),
        ({"generate": False}, "--no-generate needs texts"),
        ({"method": "medusa"}, "--intermediate-size is of eagle3"),
        ({"max_length": 1024}, "--max-length is 1024, and the model's context holds 512"),
        ({"draft_vocab_size": 260}, "--draft-vocab-size is 260, and the model has 259 tokens"),
        ({"aux_layers": (0, 1, 3)}, "--aux-layers is 0,1,3"),
        ({"data": "missing.jsonl"}, "missing.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_work(
    counting_model: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        train(counting_model, tmp_path / "head", replace(SMALL, **changed))
    assert not (tmp_path / "head").exists() and not list(tmp_path.glob("head.partial/*.jsonl"))


def test_a_file_without_prompts_is_refused_in_a_sentence(counting_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TrainError, match="gives 0 texts"):
        train(counting_model, tmp_path / "head", replace(SMALL, data=str(tmp_path / "empty.jsonl")))


def test_an_output_that_exists_is_not_overwritten(counting_model: Path, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "notes.txt").write_text("mine")
    with pytest.raises(QuireError, match="exists already"):
        train(counting_model, tmp_path / "head", SMALL)


def test_a_family_that_is_not_like_llama_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=600)).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="a draft head for a `GPT2LMHeadModel`"):
        train(tmp_path, tmp_path / "head", SMALL)


def test_the_command_trains_and_prints_one_object(
    counting_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    flags = "--answers 12 --answer-tokens 8 --max-length 128 --held-out 2 --steps 2 --draft-vocab-size 64 --json -q"
    assert train_head.run(["--method", "eagle3", str(counting_model), str(out), *flags.split(), "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["output"] == str(out) and printed["steps"] == 2 and 1 <= printed["mean_accepted_length"] <= 4


def test_the_command_refuses_what_it_does_not_know(counting_model: Path, tmp_path: Path) -> None:
    for flags, message in (
        (["--method", "eagle9"], "invalid choice: 'eagle9'"),
        (["--method", "eagle3", "--aux-layers", "low"], "--aux-layers is low"),
        (["--method", "eagle3", "--draft-vocab", "5"], "there is no flag `--draft-vocab`"),
        ([], "--method"),
    ):
        with pytest.raises(QuireError, match=message):
            train_head.run([str(counting_model), str(tmp_path / "head"), *flags])
