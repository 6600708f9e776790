"""The op set in torch against formulas written out with loops."""

import math
from dataclasses import replace

import numpy as np
import torch

from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Activation, ProgramSpec, Routing, StepBatch
from quire.ops.reference import TorchOps
from quire.ops.reference.routing import choose_experts
from quire.ops.tensors import F32, StoredTensor

ops = TorchOps()
rng = np.random.default_rng(1)


def random(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def stored(array: np.ndarray) -> StoredTensor:
    rows = np.ascontiguousarray(array).reshape(-1, array.shape[-1])
    return StoredTensor("t", array.shape, F32, rows.view(np.uint8))


def assert_close(ours: torch.Tensor, formula: np.ndarray) -> None:
    np.testing.assert_allclose(ours.numpy(), formula, rtol=2e-5, atol=1e-5)


def test_embedding_gathers_rows() -> None:
    table = random(7, 5)
    assert_close(ops.embedding(torch.tensor([3, 0, 3]), ops.table(stored(table))), table[[3, 0, 3]])


def test_rms_norm() -> None:
    x, weight = random(3, 8), random(8)
    formula = np.array([row / math.sqrt(sum(v * v for v in row) / 8 + 0.1) * weight for row in x])
    assert_close(ops.rms_norm(torch.tensor(x), ops.vector(stored(weight)), 0.1), formula)


def test_linear_stacks_parts_and_biases() -> None:
    x, a, b, bias_a, bias_b = random(3, 8), random(2, 8), random(4, 8), random(2), random(4)
    w = ops.pack([stored(a), stored(b)], [stored(bias_a), stored(bias_b)])
    assert (w.num_outputs, w.num_inputs) == (6, 8)
    formula = np.concatenate([x @ a.T + bias_a, x @ b.T + bias_b], axis=1)
    assert_close(ops.linear(torch.tensor(x), w), formula)
    first, second = ops.split(ops.linear(torch.tensor(x), w), (2, 4))
    assert_close(first, formula[:, :2])
    assert_close(second, formula[:, 2:])


def test_rope_turns_pairs_and_leaves_the_rest() -> None:
    inv_freq, head_dim = np.array([1.0, 0.25], np.float32), 6  # 4 of 6 columns are rotated
    positions, x = [0, 3, 11], random(3, 2 * head_dim)
    angles = ops.rope_angles(torch.tensor(positions), ops.frequencies(inv_freq, 1.5))
    assert angles.shape == (3, 4)
    formula = x.copy().reshape(3, 2, head_dim)
    for t, position in enumerate(positions):
        for head in range(2):
            for i, frequency in enumerate(inv_freq):
                a, b = x.reshape(3, 2, head_dim)[t, head, [i, i + 2]]
                cos, sin = 1.5 * math.cos(position * frequency), 1.5 * math.sin(position * frequency)
                formula[t, head, [i, i + 2]] = a * cos - b * sin, a * sin + b * cos
    assert_close(ops.rope(torch.tensor(x), angles, head_dim), formula.reshape(3, -1))


def test_rms_norm_of_heads() -> None:
    x, weight = random(3, 8), random(4)
    heads = [ops.rms_norm(torch.tensor(x[:, i : i + 4]), torch.tensor(weight), 0.1) for i in (0, 4)]
    assert_close(ops.rms_norm(torch.tensor(x), torch.tensor(weight), 0.1), torch.cat(heads, dim=1).numpy())


def test_layer_norm() -> None:
    x, weight, bias = random(3, 8), random(8), random(8)
    w, b = torch.tensor(weight), torch.tensor(bias)
    plain = np.array([(row - row.mean()) / math.sqrt(((row - row.mean()) ** 2).mean() + 0.1) for row in x])
    assert_close(ops.layer_norm(torch.tensor(x), None, None, 0.1), plain)
    assert_close(ops.layer_norm(torch.tensor(x), w, None, 0.1), plain * weight)
    assert_close(ops.layer_norm(torch.tensor(x), w, b, 0.1), plain * weight + bias)
    halves = [ops.layer_norm(torch.tensor(x[:, i : i + 4]), w[i : i + 4], b[:4], 0.1) for i in (0, 4)]
    assert_close(ops.layer_norm(torch.tensor(x), w, b[:4], 0.1, groups=2), torch.cat(halves, dim=1).numpy())


def test_activations() -> None:
    x = random(3, 8)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    formulas = {
        Activation.SILU: x * sigmoid(x),
        Activation.GELU: np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x),
        Activation.GELU_TANH: 0.5 * x * (1 + np.tanh(cubic)),
        Activation.RELU: np.maximum(x, 0),
        Activation.RELU_SQUARED: np.maximum(x, 0) ** 2,
        Activation.QUICK_GELU: x * sigmoid(1.702 * x),
        Activation.TANH: np.tanh(x),
        Activation.SIGMOID: sigmoid(x),
        Activation.ELU: np.where(x > 0, x, np.expm1(x)),
        Activation.SOFTPLUS: np.log1p(np.exp(x)),
        Activation.CLAMPED_SWIGLU: np.minimum(x, 7) * sigmoid(1.702 * np.minimum(x, 7)),
    }
    assert formulas.keys() == set(Activation)
    for kind, formula in formulas.items():
        assert_close(ops.activate(torch.tensor(x), kind), formula)
        factor = np.clip(x[:, 4:], -7, 7) + 1 if kind is Activation.CLAMPED_SWIGLU else x[:, 4:]
        assert_close(ops.activate_and_mul(torch.tensor(x), kind), formula[:, :4] * factor)


def test_add_scale_clamp_and_mul_sigmoid() -> None:
    x, gate = random(3, 8), random(3, 1)
    assert_close(ops.add(torch.tensor(x), torch.tensor(x)), 2 * x)
    assert_close(ops.scale(torch.tensor(x), 0.25), 0.25 * x)
    assert_close(ops.clamp(torch.tensor(x), 0.5), np.minimum(np.maximum(x, -0.5), 0.5))
    places = np.array([4, 12, 35])
    grown = ops.scale_by_position(torch.tensor(x), torch.tensor(places, dtype=torch.int32), 0.3, 12)
    assert_close(grown, x * (1 + 0.3 * np.log([1, 2, 3]))[:, None])
    assert_close(ops.mul_sigmoid(torch.tensor(x), torch.tensor(gate)), x / (1 + np.exp(-gate)))


def choose(logits: list[float], routing: Routing, correction: list[float] | None = None) -> dict[int, float]:
    """-> weight by expert, in the order of choice"""
    ids, weights = choose_experts(torch.tensor([logits]), routing, torch.tensor(correction) if correction else None)
    return dict(zip(ids[0].tolist(), [round(w, 4) for w in weights[0].tolist()], strict=True))


def test_the_best_experts_are_chosen() -> None:
    logits = [math.log(p) for p in (0.1, 0.3, 0.2, 0.3, 0.1)]
    assert choose(logits, Routing(2)) == {1: 0.3, 3: 0.3}  # ties in the order of experts
    assert list(choose(logits, Routing(5))) == [1, 3, 2, 0, 4]
    assert choose(logits, Routing(3, renormalize=True, scale=2.0)) == {1: 0.75, 3: 0.75, 2: 0.5}
    odds = [math.log(p / (1 - p)) for p in (0.9, 0.6, 0.2)]
    assert choose(odds, Routing(2, scoring="sigmoid")) == {0: 0.9, 1: 0.6}
    corrected = choose(odds, Routing(2, scoring="sigmoid", renormalize=True), [-0.8, 0.0, 0.1])
    assert corrected == {1: 0.75, 2: 0.25}  # chosen by 0.1, 0.6, 0.3, weighed by 0.6, 0.2


def test_experts_are_chosen_from_the_best_groups() -> None:
    odds = [math.log(p / (1 - p)) for p in (0.9, 0.1, 0.6, 0.5, 0.7, 0.3)]
    by_best = Routing(3, scoring="sigmoid", num_groups=3, top_groups=2)
    assert choose(odds, by_best) == {0: 0.9, 4: 0.7, 5: 0.3}  # groups of 0.9, 0.6 and 0.7
    by_two = replace(by_best, group_score="best two")
    assert choose(odds, by_two) == {0: 0.9, 2: 0.6, 3: 0.5}  # of 1.0, 1.1 and 1.0


def test_a_mixture_of_experts_is_the_sum_of_its_experts() -> None:
    x, logits, gate_up, down = random(7, 8), random(7, 5), random(5, 12, 8), random(5, 8, 6)
    routing = Routing(2, renormalize=True)
    packed = [ops.pack_experts([[stored(w[:4]), stored(w[4:])] for w in stack]) for stack in (gate_up, down)]
    assert (packed[0].num_experts, packed[0].num_outputs, packed[0].num_inputs) == (5, 12, 8)
    formula = np.zeros_like(x)
    for row, line in enumerate(logits):
        for expert, weight in choose(line.tolist(), routing).items():
            h = gate_up[expert] @ x[row]
            formula[row] += weight * (down[expert] @ (np.maximum(h[:6], 0) * h[6:]))
    found = ops.moe(torch.tensor(x), torch.tensor(logits), *packed, routing, Activation.RELU)
    np.testing.assert_allclose(found.numpy(), formula, rtol=1e-3, atol=1e-3)  # weights were rounded


def test_logits_of_the_rows_wanted() -> None:
    x, head = random(4, 8), random(10, 8)
    batch = step_batch([(0, 4)], np.array([[0]]), block_size=4, logit_rows=[3, 1])
    w = ops.pack([stored(head)])
    program = ops.compile(lambda o, b: o.logits(torch.tensor(x), w, b), ops.new_cache(SPEC, 1), ProgramSpec(4))
    assert_close(program.run(batch), x[[3, 1]] @ head.T)
    capped = ops.compile(
        lambda o, b: o.logits(torch.tensor(x), w, b, softcap=0.5), ops.new_cache(SPEC, 1), ProgramSpec(4)
    )
    assert_close(capped.run(batch), 0.5 * np.tanh(x[[3, 1]] @ head.T / 0.5))


SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


def step_batch(
    spans: list[tuple[int, int]], tables: np.ndarray, block_size: int, logit_rows: list[int] | None = None
) -> StepBatch:
    """For each sequence (start, end): the positions computed now."""
    positions = np.concatenate([np.arange(*span) for span in spans]).astype(np.int32)
    lengths = [end - start for start, end in spans]
    blocks = np.repeat(np.arange(len(spans)), lengths)
    return StepBatch(
        ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=(tables[blocks, positions // block_size] * block_size + positions % block_size).astype(np.int32),
        seq_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array([end for _, end in spans], np.int32),
        block_tables=tables.astype(np.int32),
        logit_rows=np.array(logit_rows or [], np.int32),
    )


def naive_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int, softcap: float = 0.0, slopes: np.ndarray | None = None
) -> np.ndarray:
    """q [m, 4, 4] at every position, k and v [m, 2, 4]: one query, one head at a time, in fp64."""
    out = np.zeros_like(q)
    for i in range(len(q)):
        first = max(0, i - window + 1) if window else 0
        for head in range(4):
            scores = np.array([q[i, head] @ k[j, head // 2] * 0.5 for j in range(first, i + 1)], np.float64)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if slopes is not None:
                scores -= slopes[head] * np.arange(i - first, -1, -1)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[first : i + 1, head // 2] / weights.sum()
    return out


def test_paged_attention_over_scattered_pages_and_chunks() -> None:
    lengths, tables = [11, 6], np.array([[5, 0, 3], [1, 4, -1]])  # -1 is never read
    q, k, v = ([random(n, heads, 4) for n in lengths] for heads in (4, 2, 2))
    slopes = np.array([0.5, 0.25, 0.125, 2.0], np.float32)
    for window, softcap, alibi in ((0, 0.0, None), (3, 0.0, None), (0, 0.7, None), (5, 0.0, slopes), (0, 1.5, slopes)):
        cache = ops.new_cache(SPEC, 6)
        out = [np.zeros_like(x) for x in q]
        for spans in ([(0, 5), (0, 6)], [(5, 10)], [(10, 11)]):  # a batch of two, then the first goes on
            batch = step_batch(spans, tables[: len(spans)], 4)
            now = [torch.tensor(np.concatenate([x[s][a:b] for s, (a, b) in enumerate(spans)])) for x in (q, k, v)]
            now = [x.flatten(1) for x in now]

            vector = None if alibi is None else ops.vector(stored(alibi))

            def forward(o, b, now=now, scoring=(window, softcap, vector)):  # type: ignore[no-untyped-def]
                o.write_kv(now[1], now[2], b, 1)
                return o.paged_attention(now[0], b, 1, 4, 0.5, *scoring)

            result = ops.compile(forward, cache, ProgramSpec(16)).run(batch).numpy().reshape(-1, 4, 4)
            for s, (a, b) in enumerate(spans):
                out[s][a:b] = result[batch.seq_starts[s] : batch.seq_starts[s + 1]]
        for s in range(2):
            formula = naive_attention(q[s], k[s], v[s], window, softcap, alibi)
            np.testing.assert_allclose(out[s], formula, rtol=1e-4, atol=1e-5)
        assert not cache.k[0].any(), "layer 0 was never written"


def test_cache_copies_and_swaps_blocks() -> None:
    cache = ops.new_cache(SPEC, 3, num_host_blocks=2)
    cache.k[:, 0], cache.v[:, 0] = 7.0, 8.0
    cache.copy([(0, 1), (1, 2)])
    assert (cache.k[:, 2] == 7).all() and (cache.v[:, 2] == 8).all()
    cache.swap_out([(2, 1)])
    cache.k[:, 2] = cache.v[:, 2] = 0.0
    cache.swap_in([(1, 2)])
    assert (cache.k[:, 2] == 7).all() and (cache.v[:, 2] == 8).all()
    assert not cache.host_pages[0][:, 0].any()
    assert cache.k.nbytes + cache.v.nbytes == 3 * SPEC.block_bytes


def test_linear_of_heads() -> None:
    x, weights = random(3, 2 * 4), random(2, 5, 4)
    w = ops.pack_heads([stored(head) for head in weights])
    assert (w.num_heads, w.num_outputs, w.num_inputs) == (2, 5, 4)
    formula = [np.concatenate([weights[0] @ row[:4], weights[1] @ row[4:]]) for row in x]
    assert_close(ops.linear_heads(torch.tensor(x), w), np.array(formula))


def test_mla_attention_is_that_of_expanded_keys_and_values() -> None:
    """Three heads over latents of 4 and 2 turned columns: a head's key is (up_k . latent, turned), its value up_v .
    latent. In two chunks over scattered pages."""
    length, tables = 7, np.array([[2, 0]])
    q, q_turned = random(length, 3, 5), random(length, 3, 2)
    latent, turned, up_k, up_v = random(length, 4), random(length, 2), random(3, 5, 4), random(3, 6, 4)
    cache = ops.new_cache(KVSpec(2, 1, 6, 4, "float32", latent=4), 3, num_host_blocks=1)
    assert sum(page.nbytes for page in cache.pages) == 3 * cache.spec.block_bytes
    absorb = ops.pack_heads([stored(np.ascontiguousarray(head.T)) for head in up_k])
    expand = ops.pack_heads([stored(head) for head in up_v])
    found = []
    for span in ((0, 5), (5, 7)):
        now = [torch.tensor(x[slice(*span)]).flatten(1) for x in (q, q_turned, latent, turned)]

        def forward(o, b, now=now):  # type: ignore[no-untyped-def]
            o.write_latent(now[2], now[3], b, 1)
            return o.linear_heads(o.mla_attention(o.linear_heads(now[0], absorb), now[1], b, 1, 0.3), expand)

        found.append(ops.compile(forward, cache, ProgramSpec(8)).run(step_batch([span], tables, 4)))
        cache.swap_out([(2, 0)])  # to the host and back, as preempted sequences go
        cache.k[:, 2] = 0.0
        cache.swap_in([(0, 2)])
    formula = np.zeros((length, 3, 6), np.float32)
    for i in range(length):
        for head in range(3):
            keys = np.concatenate([latent @ up_k[head].T, turned], axis=1)[: i + 1]
            scores = keys @ np.concatenate([q[i, head], q_turned[i, head]]) * 0.3
            weights = np.exp(scores - scores.max())
            formula[i, head] = weights @ (latent[: i + 1] @ up_v[head].T) / weights.sum()
    np.testing.assert_allclose(torch.cat(found).numpy(), formula.reshape(length, -1), rtol=1e-4, atol=1e-5)
    assert not cache.k[0].any(), "layer 0 was never written"
