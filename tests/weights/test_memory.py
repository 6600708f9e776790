"""Loading holds the packed model and beside it no more than a matrix, in its own memory and in that of mapped files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN, INNER, LAYERS, VOCAB = 1024, 4096, 6, 512
MATRICES = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
MATRICES |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
NUM_WEIGHTS = LAYERS * sum(outputs * inputs for outputs, inputs in MATRICES.values())
LARGEST = 2 * INNER * HIDDEN  # weights: gate and up become one matrix
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
SLACK = 32 << 20  # the interpreter's heap, and stacks of threads

# In a process of its own: what it holds beyond what it began with, at most and in the end; and the packed model.
LOAD = """
import sys, threading, time
from quire.models.registry import family
from quire.ops.native import NativeOps
from quire.weights.checkpoint import open_checkpoint

def held():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

checkpoint = open_checkpoint(sys.argv[1])
module = family("LlamaForCausalLM")
config = module.config(checkpoint.config)
before, most, done = held(), 0, False

def watch():
    global most
    while not done:
        most = max(most, held())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = module.load(NativeOps(1), checkpoint, config, 64)
done = True
watcher.join()
print(most - before, held() - before, model.weight_bytes)
"""


def stored(quantized: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> type and shape"""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"model.norm.weight": ("BF16", (HIDDEN,))}
    tensors |= {f"{name}.weight": ("BF16", (VOCAB, HIDDEN)) for name in ("model.embed_tokens", "lm_head")}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = ("BF16", (HIDDEN,))
        for name, (outputs, inputs) in MATRICES.items():
            if quantized:
                tensors[f"{prefix}{name}.qweight"] = ("I32", (inputs // 8, outputs))
                tensors[f"{prefix}{name}.qzeros"] = ("I32", (inputs // 128, outputs // 8))
                tensors[f"{prefix}{name}.scales"] = ("F16", (inputs // 128, outputs))
            else:
                tensors[f"{prefix}{name}.weight"] = ("BF16", (outputs, inputs))
    return tensors


def write_zeros(path: Path, quantized: bool) -> None:
    """A checkpoint of zeros: a file that is one hole takes no disk, and is read as any other."""
    header, at = {}, 0
    for name, (dtype, shape) in stored(quantized).items():
        end = at + (4 if dtype == "I32" else 2) * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (path / "config.json").write_text(json.dumps(CONFIG | ({"quantization_config": GPTQ} if quantized else {})))


@pytest.mark.parametrize(("quantized", "bits"), [(False, 16), (True, 5)])  # a zero point of 0 is asymmetric
def test_the_most_memory_is_the_packed_model_and_a_matrix(tmp_path: Path, quantized: bool, bits: float) -> None:
    write_zeros(tmp_path, quantized)
    said = subprocess.run([sys.executable, "-c", LOAD, tmp_path], check=True, capture_output=True, text=True).stdout
    most, after, packed = map(int, said.split())
    assert packed < NUM_WEIGHTS * bits / 8 + 2 * HIDDEN * VOCAB + (1 << 20)  # the head has 16 bits either way
    assert after < packed + SLACK
    assert most < packed + 2 * LARGEST * bits / 8 + SLACK  # as it is stored, and parts one below the other
