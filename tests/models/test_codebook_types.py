"""Files whose matrices are codes of tables or grids, from bytes to logits: kernels beside plain torch."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from models.checking import PROMPT, compute, make_ops
from quire.ops.tensors import STORAGE_TYPES
from weights.gguf_files import finish

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, LAYERS = 256, 8, 4, 512, 100, 2

# Where a block's scale is, and about which size makes weights of 0.05.
SCALES = {
    "IQ4_NL": (0, 7e-4), "IQ4_XS": (0, 4e-5), "TQ1_0": (52, 0.06), "TQ2_0": (64, 0.06), "IQ1_S": (0, 0.007),
    "IQ1_M": (48, 0.007), "IQ2_XXS": (0, 1e-3), "IQ2_XS": (0, 1e-3), "IQ2_S": (0, 1e-3), "IQ3_XXS": (0, 4e-4),
    "IQ3_S": (0, 4e-4),
}  # fmt: skip


def random_rows(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row_bytes] with any codes, and scales that make weights of about 0.05."""
    kind = STORAGE_TYPES[name]
    blocks = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(119, 122, blocks.shape[:2])  # 2^-9 to 2^-7
    elif name == "NVFP4":
        blocks[:, :, :4] = rng.integers(0, 12, (*blocks.shape[:2], 4))  # up to 2^-6
    else:
        at, size = SCALES[name]
        scales = rng.normal(0, size, (*blocks.shape[:2], 1)).astype(np.float16)
        if name == "IQ1_M":  # in the top bits of four words
            bits = (scales.view(np.uint16) >> np.array([0, 4, 8, 12]) & 15).astype(np.uint8)
            blocks[:, :, 49::2] = blocks[:, :, 49::2] & 15 | bits << 4
        else:
            blocks[:, :, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_model(path: Path, name: str) -> Path:
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    kv = HIDDEN // HEADS * KV_HEADS
    matrices = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    norms = ["output_norm"]
    for i in range(LAYERS):
        matrices |= {
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
    for tensor, (rows, columns) in matrices.items():
        data = random_rows(name, rows, columns, rng)
        writer.add_tensor(f"{tensor}.weight", data, raw_dtype=gguf.GGMLQuantizationType[name])
    for tensor in norms:
        writer.add_tensor(f"{tensor}.weight", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    return finish(writer, path)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", *SCALES])
def test_a_model_of_codes(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "tiny.gguf", name)
    truth = compute(make_ops("torch"), path)(PROMPT, 0)
    native = compute(make_ops("native"), path)
    logits = native(PROMPT, 0)
    # Activations of 8 bits cost a product about 0.6 %, and the ten products of these layers about as much together.
    assert np.linalg.norm(logits - truth) < 0.03 * np.linalg.norm(truth)
    np.testing.assert_array_equal(native(PROMPT, len(PROMPT) - 1)[0], logits[-1])
