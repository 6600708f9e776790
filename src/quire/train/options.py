"""What `quire train-head` is asked for, checked before any work."""

from dataclasses import dataclass

from quire.core.errors import QuireError

METHODS = ("eagle3", "medusa")
SELF = "self"  # in place of a file: the model writes the prompts
MIN_ANSWERS = 2


class TrainError(QuireError):
    """The head cannot be trained so."""

    status, code = 400, "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    method: str
    data: str = SELF  # a file, or SELF
    generate: bool = True  # False: the texts themselves are what the model would have written
    answers: int = 4096  # texts to train on, at most
    answer_tokens: int = 256  # of an answer, at most
    max_length: int = 512  # tokens of prompt and answer
    temperature: float = 0.8  # of every second answer; the others, and those held out, are greedy
    held_out: int = 64  # prompts that are answered for measuring alone
    drafts: int = 3  # draft tokens of a step: the heads of Medusa, the unrolled steps of EAGLE-3
    draft_vocab_size: int | None = None  # None: 8192 (EAGLE-3), the model's (Medusa)
    intermediate_size: int | None = None  # of EAGLE-3's layer; None: the model's
    aux_layers: tuple[int, ...] = ()  # of EAGLE-3; empty: chosen by the number of layers
    steps: int = 2000
    minutes: float | None = None  # in place of steps: as many as fit, answers included
    batch_size: int = 32  # texts in a step
    learning_rate: float = 1e-3
    seed: int = 0

    def check(self) -> None:
        least = {
            "answers": MIN_ANSWERS, "answer_tokens": 8, "max_length": 16, "held_out": 1, "drafts": 1, "steps": 1,
            "batch_size": 1, "draft_vocab_size": 2, "intermediate_size": 1,
        }  # fmt: skip
        most = {"drafts": 16, "answers": 10**7, "max_length": 1 << 17, "held_out": 10**5, "batch_size": 1 << 14}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise TrainError(f"{_flag(name)} is {value}", f"give {bound} or more")
        for name, bound in most.items():
            if getattr(self, name) > bound:
                raise TrainError(f"{_flag(name)} is {getattr(self, name)}", f"give at most {bound}")
        if self.answer_tokens >= self.max_length:
            raise TrainError(
                f"--answer-tokens is {self.answer_tokens}, and --max-length {self.max_length} holds the prompt, too",
                f"give at most {self.max_length - 1}",
            )
        if not 0 < self.learning_rate <= 1:
            raise TrainError(f"--learning-rate is {self.learning_rate}", "give a number such as 0.001")
        if not 0 <= self.temperature <= 2:
            raise TrainError(f"--temperature is {self.temperature}", "give a number from 0 to 2")
        if self.minutes is not None and not 0 < self.minutes <= 10**5:
            raise TrainError(f"--minutes is {self.minutes}", "give a number such as 8")
        if not 0 <= self.seed < 1 << 31:
            raise TrainError(f"--seed is {self.seed}", f"give a number from 0 to {(1 << 31) - 1}")
        if self.data == SELF and not self.generate:
            raise TrainError("--no-generate needs texts, and --data is `self`", "name a file with --data")
        if self.method != "eagle3":
            for name in ("intermediate_size", "aux_layers"):
                if getattr(self, name):
                    raise TrainError(f"{_flag(name)} is of eagle3, and --method is {self.method}", "leave it out")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
