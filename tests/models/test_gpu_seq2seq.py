"""Encoder-decoders with the GPU's op set beside transformers, on a GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch
from transformers import BartForConditionalGeneration, T5ForConditionalGeneration

from quire.ops.gpu.opset import GpuOps

from .checking import assert_close
from .checking_seq2seq import ANSWER, SOURCE, START, Cases, Ours, checkpoints_of
from .test_seq2seq import BART_TINY, T5_TINY, TINY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 32}
CASES: Cases = {
    "t5-gpu": (T5ForConditionalGeneration, {**T5_TINY, **SMALL, "relative_attention_max_distance": 17}),
    "bart-gpu": (
        BartForConditionalGeneration,
        {
            **BART_TINY,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 1,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        },
    ),
}
checkpoints = checkpoints_of(CASES, TINY)


@pytest.mark.verifies("safetensors", backend="gpu")
@pytest.mark.parametrize(("name", "batch_invariant"), [("t5-gpu", False), ("t5-gpu", True), ("bart-gpu", False)])
def test_logits_are_those_of_transformers(checkpoints, name, batch_invariant):
    theirs = checkpoints(name)
    ours = Ours(GpuOps(DEVICE, dtype="float32", batch_invariant=batch_invariant), theirs.path)
    assert_close(ours.read(SOURCE), theirs.encoded)
    chunks = [ours.write(ANSWER[:end], start) for start, end in ((0, 5), (5, 6), (6, len(ANSWER)))]
    assert_close(np.concatenate(chunks), theirs.logits)
    assert int(ours.write([START], 0)[-1].argmax()) == theirs.generated[1]
