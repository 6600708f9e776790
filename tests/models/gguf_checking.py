"""Whether a GGUF file computes what the model does that it was written from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from models.checking import PROMPT, assert_close, compute, make_ops
from models.gguf_writing import write_gguf


@torch.inference_mode()
def logits_of(model: PreTrainedModel, mask: torch.Tensor | None = None) -> np.ndarray:
    return model(torch.tensor([PROMPT]), attention_mask=mask).logits[0].numpy()


def check_file(
    model: PreTrainedModel,
    folder: Path,
    write: Callable[..., Path] = write_gguf,
    backend: str = "torch",
    **how: Any,
) -> None:
    """`write` makes a file of the saved model; `how` are its options."""
    model.save_pretrained(folder)
    path = write(folder, folder / "model.gguf", **how)
    assert_close(compute(make_ops(backend), path)(PROMPT, 0), logits_of(model))
