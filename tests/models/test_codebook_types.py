"""A file whose matrices are codes of a table, from bytes to logits: kernels beside plain torch on the same weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from models.checking import PROMPT, compute, make_ops
from quire.ops.tensors import STORAGE_TYPES
from weights.gguf_files import finish

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, LAYERS = 256, 8, 4, 512, 100, 2


def random_rows(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row_bytes] with any codes, and scales that make weights of about 0.05."""
    kind = STORAGE_TYPES[name]
    blocks = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(119, 122, blocks.shape[:2])  # 2^-9 to 2^-7
    else:
        size = {"IQ4_NL": 0.0007, "IQ4_XS": 0.00004}[name]
        scales = rng.normal(0, size, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
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


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS", "MXFP4"])
def test_a_model_of_codes(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "tiny.gguf", name)
    truth = compute(make_ops("torch"), path)(PROMPT, 0)
    native = compute(make_ops("native"), path)
    logits = native(PROMPT, 0)
    # Activations of 8 bits cost a product about 0.6 %, and the ten products of these layers about as much together.
    assert np.linalg.norm(logits - truth) < 0.03 * np.linalg.norm(truth)
    np.testing.assert_array_equal(native(PROMPT, len(PROMPT) - 1)[0], logits[-1])
