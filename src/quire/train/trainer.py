"""The training loop: batches in an order that the seed decides, held-out acceptance on the way, resumable anywhere."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.train.acceptance import Acceptance, measure
from quire.train.answers import Answers, Progress, TrainingStopped
from quire.train.options import TrainError, TrainOptions
from quire.train.state import load_state, save_state
from quire.train.target import TargetModel
from quire.train.trainable_head import TextBatch, TrainableHead, loss

WARMUP_STEPS = 50
FINAL_RATE = 0.05  # of the learning rate, at the end
MAX_GRADIENT = 1.0  # norm
MEASUREMENTS = 8  # of held-out acceptance on the way
SAVE_SECONDS = 60
TIMED_FROM, TIMED_TO = 10, 40  # the steps that --minutes is divided by
FINISH_SECONDS = 10  # for the last measurement and the output


@dataclass(slots=True)
class Trainer:
    """`deadline`: of time.monotonic(); with it, the number of steps is chosen once their time is known."""

    head: TrainableHead
    target: TargetModel
    answers: Answers
    options: TrainOptions
    path: Path  # of the state
    key: str  # of all that the weights depend on
    progress: Progress
    stop: Callable[[], bool]
    deadline: float | None = None
    step: int = 0
    num_steps: int = 0  # 0: not known yet
    resumed: int = 0  # steps that an earlier run had done
    mean_loss: float = 0.0  # of the last steps
    optimizer: Any = None

    def run(self) -> Acceptance:
        self.num_steps = 0 if self.deadline else self.options.steps
        self.optimizer = torch.optim.AdamW(
            list(self.head.weights.values()), lr=self.options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        if position := load_state(self.path, self.key, self.head.weights, self.optimizer):
            self.step, self.num_steps = position["step"], position["num_steps"]
            self.resumed = self.step
        saved, timed = time.monotonic(), 0.0
        while not self.num_steps or self.step < self.num_steps:
            self._train()
            self.progress.update("training", self.step, self.num_steps or 10**9)
            now = time.monotonic()
            if self.step - self.resumed == TIMED_FROM:
                timed = now
            if not self.num_steps and self.step - self.resumed == TIMED_TO:
                self.num_steps = self._steps_left(now, (now - timed) / (TIMED_TO - TIMED_FROM))
            if self.num_steps and self._is_time_to_measure():
                self.progress.note(f"step {self.step}: loss {self.mean_loss:.3f}, held out {self._measured()}")
            if self.stop() or time.monotonic() - saved > SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
            if self.stop():
                raise TrainingStopped
        self._save()
        return self._measured()

    def _train(self) -> None:
        batch = self._batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * rate(self.step, self.num_steps)
        with self._autocast():
            value = loss(self.head, self.target, batch)
        number = float(value.detach())
        if not math.isfinite(number):
            raise TrainError(f"the loss is {number} in step {self.step}", "give a lower --learning-rate")
        self.mean_loss = number if not self.mean_loss else 0.95 * self.mean_loss + 0.05 * number
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(self.head.weights.values()), MAX_GRADIENT)
        self.optimizer.step()
        self.step += 1

    def _batch(self) -> TextBatch:
        """Every epoch has an order of its own; its last batch may be small."""
        examples, size = self.answers.examples, self.options.batch_size
        epoch, index = divmod(self.step, -(-len(examples) // size))
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.options.seed + epoch))
        chosen = order[index * size : (index + 1) * size].tolist()
        return TextBatch.of([examples[number] for number in chosen], self.target.device)

    def _autocast(self) -> Any:
        """bf16 on a GPU; weights and moments stay fp32."""
        return torch.autocast("cuda", self.target.dtype) if self.target.device == "cuda" else nullcontext()

    def _steps_left(self, now: float, seconds: float) -> int:
        assert self.deadline is not None
        return self.step + max(int((self.deadline - FINISH_SECONDS - now) / seconds), 1)

    def _is_time_to_measure(self) -> bool:
        return self.step % max(self.num_steps // MEASUREMENTS, 1) == 0 and self.step < self.num_steps

    def _measured(self) -> Acceptance:
        held_out, size = self.answers.held_out, self.options.batch_size
        with self._autocast():
            return measure(self.head, self.target, held_out, self.options.drafts, size)

    def _save(self) -> None:
        position = {"step": self.step, "num_steps": self.num_steps}
        save_state(self.path, self.key, position, self.head.weights, self.optimizer)


def rate(step: int, num_steps: int) -> float:
    """The learning rate as a share of the highest: up in a line, then down in a cosine. 0 steps: not known yet."""
    warmup = min(WARMUP_STEPS, max(num_steps // 10, 1)) if num_steps else WARMUP_STEPS
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps)) if num_steps else 1.0
    return min((step + 1) / warmup, 1.0) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)
