"""Hidden states that outlive a step, for heads that draft from them: at a fixed place, where CUDA graphs read them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.ops.opset import Float32, Int32, Program, StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class GpuHiddenStates:
    rows: Tensor  # [num_rows, columns]

    def put(self, rows: Int32, program: Program, lines: Int32) -> None:
        """Queued on the stream: the next step may overwrite what was kept."""
        assert program.kept is not None, "the program keeps no hidden states"
        both = torch.from_numpy(np.stack([rows, lines]).astype(np.int64))
        both = both.pin_memory() if self.rows.is_cuda else both
        targets, sources = both.to(self.rows.device, non_blocking=True)
        with torch.inference_mode():
            self.rows.index_copy_(0, targets, program.kept.index_select(0, sources).to(self.rows.dtype))

    def fetch(self, batch: StepBatch) -> StepBatch:
        """Before a step: the rows that it reads are here."""
        return batch

    def load(self, values: Float32) -> None:
        """Returns when the values may be overwritten."""
        self.rows[: len(values)].copy_(torch.from_numpy(values))
