"""Attention of sequences to themselves in Triton, beside plain torch in fp64; and an encoder in the GPU's op set."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from quire.models.registry import family
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.attention.self_attention import distance_args, self_attention
from quire.ops.gpu.opset import GpuOps
from quire.ops.reference.attention import disentangled_attention
from quire.ops.reference.attention import self_attention as plain
from quire.runtime.encoder import EncodeInput, EncoderRunner
from quire.weights.checkpoint import open_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative, root of mean squares


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "causal", "window", "reach", "dtype"),
    [
        (3, 3, 32, False, 0, 0, torch.float32),
        (4, 2, 20, False, 0, 0, torch.float16),
        (2, 1, 64, True, 0, 0, torch.float32),
        (2, 2, 16, False, 7, 0, torch.bfloat16),
        (2, 2, 16, True, 7, 0, torch.float32),
        (4, 2, 16, False, 0, 11, torch.float32),
    ],
)
def test_it_is_plain(
    heads: int, kv_heads: int, head_dim: int, causal: bool, window: int, reach: int, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(0)
    starts = [0, 1, 6, 76, 76, 109]
    # q, k and v are columns of one matrix, as a linear layer leaves them
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    whole = torch.randn(109, sum(sizes), generator=make).to(dtype).to(DEVICE)
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in whole.split(sizes, dim=1))
    lengths = torch.tensor(starts).diff().int().to(DEVICE)
    runs = Runs(torch.tensor(starts).int().to(DEVICE), lengths, torch.zeros(5, 1).int().to(DEVICE))
    biases = torch.randn(heads, 2 * reach + 1, generator=make).to(DEVICE) if reach else None
    actual = self_attention(q, k, v, runs, 0.2, causal, window, biases).double()
    truth = plain(
        q.double(), k.double(), v.double(), starts, 0.2, causal, window, None if biases is None else biases.double()
    )
    assert (actual - truth).square().mean().sqrt() / truth.square().mean().sqrt() < BOUNDS[dtype]


@pytest.mark.parametrize(("heads", "head_dim", "count"), [(2, 16, 9), (3, 20, 16)])
def test_scores_that_read_distances_are_plain(heads: int, head_dim: int, count: int) -> None:
    make, starts, most = torch.Generator().manual_seed(1), [0, 1, 30, 30, 70], 40
    q, k, v = torch.randn(3, 70, heads, head_dim, generator=make).to(DEVICE)
    by_query, by_key = torch.randn(2, 70, heads * count, generator=make).to(DEVICE)
    rows = torch.randint(0, count, (2 * most + 1,), generator=make).to(DEVICE)
    lengths = torch.tensor(starts).diff().int().to(DEVICE)
    runs = Runs(torch.tensor(starts).int().to(DEVICE), lengths, torch.zeros(4, 1).int().to(DEVICE))
    distances = distance_args(by_query, by_key, heads, rows.int())
    actual = self_attention(q, k, v, runs, 0.2, False, 0, distances=distances)
    of_query, of_key = (x.unflatten(1, (heads, count)) for x in (by_query, by_key))
    truth = disentangled_attention(q, k, v, of_query, of_key, rows, starts, 0.2)
    torch.testing.assert_close(actual, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("labels", [0, 1])
def test_an_encoder_is_that_of_transformers(labels: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=32, initializer_range=0.2)
    if labels:
        config.num_labels = labels
    model = (BertForSequenceClassification if labels else BertModel)(config).eval()
    model.save_pretrained(tmp_path)
    ids, segments = [5, 9, 33, 2, 17, 8], [0, 0, 1, 1, 1, 1]
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
    expected = (out.logits if labels else out.last_hidden_state[0]).numpy()

    checkpoint = open_checkpoint(tmp_path)
    module = family(checkpoint.config.architecture, "embed", "score")
    ops = GpuOps(DEVICE, dtype="float32", graphs=False)
    loaded = module.load(ops, checkpoint, module.config(checkpoint.config), 32)
    runner = EncoderRunner(ops, loaded, max_tokens=32, max_rows=4, max_model_len=32, kv_dtype="float32")
    texts = [EncodeInput([7, 8]), EncodeInput(ids, segments), EncodeInput([4])]
    rows = runner.run(texts, "first" if labels else "all", np.copy)
    np.testing.assert_allclose(rows[1], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
