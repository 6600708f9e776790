"""Kernels around a latent cache beside their plain twins, on a GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch

from quire.ops.gpu.attention.mla import mla_decode
from quire.ops.gpu.attention.mla_plan import plan_latent
from quire.ops.gpu.attention.mla_write import latent_write
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.linear.heads import linear_heads
from quire.ops.kv_spec import KVSpec
from quire.ops.reference.cache import TorchCache
from quire.ops.reference.opset import TorchOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ops = TorchOps(DEVICE)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "latent", "rope_dim"), [(5, 32, 8), (16, 64, 16), (3, 24, 6)])
def test_latents_are_stored_and_queries_rotated(dtype, heads, latent, rope_dim):
    spec = KVSpec(2, 1, latent + rope_dim, 8, dtype, latent)
    caches = [TorchCache(spec, 3, 0, DEVICE) for _ in range(2)]
    slots, angles = [17, 3, -1, 8], random(4, rope_dim, seed=1)
    rows = random(4, latent + rope_dim + heads * rope_dim) * 100
    x, k, q = rows.split([latent, rope_dim, heads * rope_dim], dim=1)
    out = torch.full((4, heads, latent + rope_dim), 7.0, device=DEVICE)
    latent_write(x, k, q, angles, int32(slots), caches[0].k[1, :, :, 0], out)
    kept = [0, 1, 3]
    vector = torch.cat([x, ops.rope(k, angles, rope_dim)], dim=1)[kept]
    caches[1].write(1, torch.tensor(slots)[kept].to(DEVICE), vector[:, None])
    stored, twin = (cache.k.float() for cache in caches)
    apart = 2**-7 if dtype == "bfloat16" and DEVICE == "cpu" else 0.0  # the interpreter cuts off where others round
    torch.testing.assert_close(stored, twin, rtol=apart, atol=apart / 10)
    rotated = ops.rope(q, angles, rope_dim).unflatten(1, (heads, rope_dim))
    torch.testing.assert_close(out[kept, :, latent:], rotated[kept], rtol=0, atol=0)
    assert (out[..., :latent] == 7).all() and (out[2] == 7).all()


def test_latents_in_fp8_saturate():
    page = torch.zeros(1, 8, 40, device=DEVICE).to(torch.float8_e4m3fn)
    x, k, angles = random(1, 32) * 100, random(1, 8, seed=1) * 100, random(1, 8, seed=2)
    x[0, :3], x[0, 3] = torch.tensor([1e4, -1e4, 500.0]), 0.0
    latent_write(x, k, k, angles, int32([5]), page, torch.empty(1, 1, 40, device=DEVICE))
    vector = torch.cat([x, ops.rope(k, angles, 8)], dim=1)[0].clamp(-448, 448)
    stored = page.float()[0, 5]
    near = (stored - vector).abs() <= vector.abs() / 16 + 2**-10
    assert near.float().mean() > 0.9  # Triton's interpreter loses the carry into the next power of two
    assert stored[:4].tolist() == [448, -448, 448, 0]
    assert not page.float()[0, :5].any()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "inputs", "outputs"), [(1, 4, 16, 48), (70, 3, 100, 72), (0, 2, 16, 16)])
def test_linear_heads(batch_invariant, tokens, heads, inputs, outputs):
    x, w = random(tokens, heads * inputs + 3)[:, 3:].unflatten(1, (heads, -1)), random(heads, outputs, inputs, seed=1)
    out = torch.full((tokens, heads, outputs + 5), 7.0, device=DEVICE)
    linear_heads(x, w, out[..., :outputs], batch_invariant=batch_invariant)
    truth = torch.einsum("thi,hoi->tho", x.double(), w.double())
    torch.testing.assert_close(out[..., :outputs].double(), truth, rtol=1e-4, atol=1e-4)
    assert (out[..., outputs:] == 7).all()
    if batch_invariant and tokens:
        alone = torch.empty_like(out[:1, :, :outputs])
        linear_heads(x[-1:], w, alone, batch_invariant=True)
        assert torch.equal(alone, out[-1:, :, :outputs])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [5, 20])
@pytest.mark.parametrize("padding", [0, 9])
def test_prompts_are_cut_into_runs_of_a_few_tokens(batch_invariant, heads, padding):
    """Three sequences: a chunk of a prompt, a token, a whole prompt. Each token finds what it finds alone; behind them
    there may be tokens and sequences that fill a step up."""
    latent, rope_dim, size = 16, 4, 8
    counts, contexts = [7, 1, 5], [36, 14, 5]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    page = random(20, size, latent + rope_dim)
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(2))[:15].view(3, 5).int().to(DEVICE)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)])
    q = random(starts[-1], heads, latent + rope_dim, seed=3)

    def find(q, starts, contexts, tables, positions):
        runs = Runs(int32(starts), int32(contexts), tables)
        more = (np.diff(starts) > 1).any()
        plan = plan_latent(
            runs,
            int32(positions),
            prefills=bool(more),
            num_heads=heads,
            dtype=q.dtype,
            max_model_len=64,
            batch_invariant=batch_invariant,
        )
        return mla_decode(q, page, plan.runs, plan.pieces, 0.3, latent=latent, launch=plan.launch)

    extra = 2 if padding else 0
    actual = find(
        torch.cat([q, q.new_full((padding, *q.shape[1:]), float("nan"))]),
        [*starts.tolist(), *[int(starts[-1])] * extra],
        [*contexts, *[0] * extra],
        torch.cat([tables, tables.new_zeros(extra, tables.shape[1])]),
        [*positions.tolist(), *[0] * padding],
    )
    for token, position in enumerate(positions):
        seq = int(np.searchsorted(starts, token, side="right")) - 1
        kept = page[tables[seq].long()].flatten(0, 1)[: position + 1]
        truth = (q[token] @ kept.T * 0.3).softmax(dim=-1) @ kept[:, :latent]
        torch.testing.assert_close(actual[token], truth, rtol=1e-4, atol=1e-5)
    for token in (0, 6, 7, 10):
        seq, position = int(np.searchsorted(starts, token, side="right")) - 1, int(positions[token])
        alone = find(q[token : token + 1], [0, 1], [position + 1], tables[seq : seq + 1], [position])
        near = 0.0 if batch_invariant else 1e-5
        torch.testing.assert_close(alone[0], actual[token], rtol=near, atol=near)
