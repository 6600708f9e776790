"""What quantizing on load costs on a GPU, by the plain definitions and on any machine: KL divergence from the model.

    python -m benchmarks.activation_quality [MODEL] [--chunks 4] [--only w4a8 int4 ...]

`w4` is w4a8 with activations in fp32, and `w8` w8a8: what the weights alone cost. The head keeps its bits here. Of a
GGUF file the dequantized weights are the original. Prints a table, then one line of JSON."""

import argparse
import json
import pydoc_data.topics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.matmuls import plain_weight
from benchmarks.machine import describe
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.models.registry import family
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.gpu.linear.w4a8 import W4A8Weight
from quire.ops.gpu.weights import QUANTIZERS
from quire.ops.opset import Keep, ProgramSpec, StepBatch
from quire.ops.reference import TorchOps
from quire.ops.reference.quantized_linear import quantize_tokens
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.runtime.kv import kv_spec
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint

CHUNK, BLOCK = 256, 16
# name: how weights are quantized, and activations
METHODS: dict[str, tuple[str, torch.dtype | None]] = {
    "w8": ("w8a8", None),
    "w8a8": ("w8a8", torch.int8),
    "fp8": ("fp8", torch.float8_e4m3fn),
    "int4": ("int4", None),
    "w4": ("w4a8", None),
    "w4a8": ("w4a8", torch.float8_e4m3fn),
}


class RoundingOps(TorchOps):
    """Weights and activations are those that the method leaves, in fp32: sums are those of the definitions."""

    def __init__(self, method: str | None) -> None:
        super().__init__()
        self.method = method

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        packed = super().pack(parts, bias, keep)
        if self.method is None or keep is not Keep.NOTHING:
            return packed
        rounded = numbers(QUANTIZERS[METHODS[self.method][0]](packed.packed))
        activations = METHODS[self.method][1]
        return PackedWeight(packed.num_outputs, packed.num_inputs, packed.nbytes, (rounded, activations), packed.bias)

    def linear(self, x: Tensor, w: PackedWeight) -> Tensor:
        if isinstance(w.packed, Tensor):
            return super().linear(x, w)
        weight, activations = w.packed
        if activations is not None:
            q, scales = quantize_tokens(x, activations)
            x = q.float() * scales
        return torch.nn.functional.linear(x, weight, w.bias)


def numbers(weight: Any) -> Tensor:
    """A quantized weight in fp32."""
    if isinstance(weight, Tensor | ScaledWeight | W4A8Weight):
        return plain_weight(weight)
    assert isinstance(weight, GroupedWeight) and weight.has_zero_points
    shifts = 4 * torch.arange(8)[:, None]
    q = (weight.words[:, :, None, :] >> shifts & 15).flatten(1).float()
    pairs = weight.scales.transpose(0, 1).reshape(weight.num_outputs, -1).contiguous().view(torch.int16)
    scales, points = pairs[:, ::2].contiguous().view(torch.float16).float(), pairs[:, 1::2].float()
    each = [field.repeat_interleave(weight.group, 1)[:, : q.shape[1]] for field in (scales, points)]
    return (each[0] * (q - each[1]))[:, : weight.num_inputs]


def logits_of(path: Any, method: str | None, chunks: Sequence[Sequence[int]]) -> Tensor:
    """[chunks * CHUNK, vocab]"""
    ops, checkpoint = RoundingOps(method), open_checkpoint(path)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    model = kind.load(ops, checkpoint, config, CHUNK)
    blocks = CHUNK // BLOCK
    cache = ops.new_cache(kv_spec(config, BLOCK, "float32"), blocks)
    program = ops.compile(model.forward, cache, ProgramSpec(CHUNK, CHUNK, CHUNK))
    positions = np.arange(CHUNK, dtype=np.int32)
    found = []
    for ids in chunks:
        batch = StepBatch(
            ids=np.array(ids, np.int32),
            positions=positions,
            slots=positions,
            seq_starts=np.array([0, CHUNK], np.int32),
            context_lens=np.array([CHUNK], np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logit_rows=positions,
        )
        found.append(torch.as_tensor(program.run(batch)).float().clone())
    return torch.cat(found)


def compare(truth: Tensor, logits: Tensor) -> dict[str, float]:
    p, q = truth.log_softmax(1), logits.log_softmax(1)
    divergence = (p.exp() * (p - q)).sum(1)
    return {
        "mean_kl": float(divergence.mean()),
        "p99_kl": float(divergence.quantile(0.99)),
        "same_top": float((p.argmax(1) == q.argmax(1)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--chunks", type=int, default=4, help=f"of {CHUNK} tokens")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    path = resolve_model(arguments.model).path
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = Tokenizer.load(path).encode(text[: arguments.chunks * CHUNK * 6], add_special_tokens=False)
    chunks = [ids[i * CHUNK : (i + 1) * CHUNK] for i in range(arguments.chunks)]
    truth = logits_of(path, None, chunks)
    rows = {}
    for method in arguments.only:
        rows[method] = compare(truth, logits_of(path, method, chunks))
        print(f"{method:6}" + "  ".join(f"{name} {value:.5f}" for name, value in rows[method].items()), flush=True)
    print(json.dumps({"benchmark": "activation_quality", "model": str(arguments.model), "tokens": len(truth),
                      "machine": describe(), "methods": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
