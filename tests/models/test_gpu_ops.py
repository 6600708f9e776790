"""The GPU's op set beside the plain one, on a GPU or in Triton's interpreter: logits, prefilled and decoded."""

import numpy as np
import pytest
import torch
from transformers import (
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.gpu_steps import BLOCK, LENGTH, logits_of, run_steps
from ops.stored_blocks import stored_rows
from quire.models.registry import family
from quire.ops.gpu.opset import GpuOps
from quire.ops.gpu.program import dry_run_batch
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Activation, ProgramSpec, Routing
from quire.ops.reference import TorchOps
from quire.ops.tensors import MXFP4, Q4_F, Q8_0, StoredTensor, stored_floats
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def steps_of(vocab, lengths=(9, 17), chunk=5):
    random = np.random.default_rng(3)

    def ids(n):
        return random.integers(0, vocab, n)

    first, last = lengths
    return [
        [(ids(first), 0), (ids(1), 0), (ids(last), 0)],  # prompts, one of a single token
        [(ids(1), first), (ids(chunk), 1), (ids(1), last)],  # a chunk between decoding sequences
        [(ids(1), first + 1), (ids(1), chunk + 1), (ids(1), last + 1)],  # only decoding
    ]


SHORT = {"lengths": (3, 7), "chunk": 2}  # one of them longer than a window of 5


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Rows of 64 and 128 weights: groups of codes fit."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


@pytest.mark.verifies("safetensors", backend="gpu", architecture="LlamaForCausalLM")
@pytest.mark.parametrize(
    ("dtype", "quantization", "bound"),
    [
        ("float32", None, 1e-5),
        ("float16", None, 5e-3),
        ("float16", "int8", 2e-2),
        ("float16", "int4", 0.3),
        ("float16", "w4a8", 0.3),
        *([("float16", "w8a8", 3e-2)] if DEVICE == "cuda" else []),
    ],
)
def test_logits_are_those_of_plain_torch(model, dtype, quantization, bound):
    steps = steps_of(256, **({} if dtype == "float32" else SHORT))
    plain = logits_of(TorchOps(), model, "float32", steps)
    found = logits_of(GpuOps(DEVICE, dtype=dtype, quantization=quantization), model, "float32", steps)
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < bound


@pytest.mark.parametrize(("kept", "bound"), [("int8", 2e-2), ("fp8", 0.1)])  # three bits, rounded by the interpreter
def test_keys_and_values_may_be_codes(model, kept, bound):
    steps = steps_of(256, **({} if kept == "int8" else SHORT))
    plain = logits_of(TorchOps(), model, kept, steps)
    found = logits_of(GpuOps(DEVICE, dtype="float32"), model, kept, steps)
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < bound


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of what happens to be in memory
def test_a_step_may_be_tried_out_and_written_nowhere(model):
    checkpoint = open_checkpoint(model)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    ops = GpuOps(DEVICE, dtype="float32")
    cache = ops.new_cache(kv_spec(config, BLOCK, "float32"), 4)
    program = ops.compile(kind.load(ops, checkpoint, config, LENGTH).forward, cache, ProgramSpec(64, 4, LENGTH))
    logits = program.run(dry_run_batch([12, 1, 1], BLOCK))
    assert logits.shape == (3, 256)  # of what happens to be in memory: rows that go nowhere are not turned either
    assert not cache.k.any() and not cache.v.any()


@pytest.mark.verifies("safetensors", backend="gpu", architecture="Qwen3ForCausalLM")
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_heads_are_normed(tmp_path, kv_heads):
    torch.manual_seed(2)
    qwen = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 24, "num_key_value_heads": kv_heads}))
    for parameter in qwen.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    qwen.save_pretrained(tmp_path)
    steps = steps_of(256, **SHORT)
    plain = logits_of(TorchOps(), tmp_path, "float32", steps)
    found = logits_of(GpuOps(DEVICE, dtype="float32"), tmp_path, "float32", steps)
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < 1e-5


def other_ops(ops):
    """A forward pass of all that Llama has no use for: q, k and v apart, some heads partly turned and some normed,
    layer norms of every kind, learned positions, experts, capped numbers."""
    random = np.random.default_rng(9)

    def stored(*shape):
        return stored_floats("t", random.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-1]))

    def matrix(outputs, inputs, bias=False):
        return ops.pack([stored(outputs, inputs)], [stored(outputs)] if bias else None)

    def vector(size):
        return ops.vector(stored(size))

    tokens, positions = ops.table(stored(40, 48)), ops.table(stored(LENGTH, 48))
    norms = [(vector(48), vector(48)), (vector(48), None), (None, None), (None, vector(48))]
    q, k, v, out = matrix(64, 48, True), matrix(32, 48), matrix(32, 48), matrix(48, 64)
    up, down, gate = matrix(80, 48), matrix(48, 80), matrix(1, 48)
    head_norms, slopes = (vector(16), vector(16)), vector(4)
    router, correction = ops.pack([stored(6, 48)], keep=True), vector(6)
    gate_up, back = (ops.pack_experts([[stored(n, m)] for _ in range(6)]) for n, m in ((64, 48), (48, 32)))
    routing = Routing(2, scoring="sigmoid", renormalize=True, num_groups=3, top_groups=2)
    turns, head = ops.frequencies(np.array([1.0, 0.1], np.float32), 1.2), matrix(40, 48)

    def forward(ops, batch):
        angles = ops.rope_angles(batch.positions, turns)
        x = ops.scale(ops.add(ops.embedding(batch.ids, tokens), ops.embedding(batch.positions, positions)), 3.0)
        for layer in range(2):
            h = ops.layer_norm(x, *norms[2 * layer], 1e-5)
            queries, keys, values = ops.linear(h, q), ops.linear(h, k), ops.linear(h, v)
            if layer == 0:
                queries, keys = (ops.rope(heads, angles, 16) for heads in (queries, keys))
                found = attend(ops, batch, queries, keys, values, layer, 5, 0.0, slopes)
            else:
                queries, keys = ops.split(queries, [64])[0], ops.split(keys, [32])[0]
                queries, keys = (ops.rms_norm(x, w, 1e-5) for x, w in zip((queries, keys), head_norms, strict=True))
                found = attend(ops, batch, queries, keys, values, layer, 0, 0.7, None)
            x = ops.add(x, ops.linear(found, out))
            h = ops.layer_norm(x, *norms[2 * layer + 1], 1e-5)
            shared = ops.linear(ops.activate(ops.linear(h, up), Activation.GELU), down)
            mixed = ops.moe(h, ops.linear(h, router), gate_up, back, routing, Activation.GELU_TANH, correction)
            x = ops.add(ops.add(x, mixed), ops.mul_sigmoid(shared, ops.linear(h, gate)))
        return ops.logits(ops.layer_norm(x, None, None, 1e-5, groups=3), head, batch, softcap=2.0)

    return forward


def attend(ops, batch, q, k, v, layer, window, softcap, slopes):
    ops.write_kv(k, v, batch, layer)
    return ops.paged_attention(q, batch, layer, 16, 0.25, window, softcap, slopes)


def test_ops_of_other_families():
    spec, steps = KVSpec(2, 2, 16, BLOCK, "float32"), steps_of(40, **SHORT)
    plain = TorchOps()
    expected = run_steps(plain, other_ops(plain), spec, steps)
    ops = GpuOps(DEVICE, dtype="float32")
    found = run_steps(ops, other_ops(ops), spec, steps)
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 1e-4


@pytest.mark.verifies("safetensors", backend="gpu", architecture="HunYuanDenseV1ForCausalLM")
def test_heads_may_be_normed_after_they_have_turned(tmp_path):
    torch.manual_seed(2)
    HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SHAPE, head_dim=16)).save_pretrained(tmp_path)
    steps = [[(np.arange(3), 0)], [(np.arange(1), 3)]]
    plain = logits_of(TorchOps(), tmp_path, "float32", steps)
    found = logits_of(GpuOps(DEVICE, dtype="float32"), tmp_path, "float32", steps)
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < 1e-5


def codes_of(type):
    """Random ones, others for every array that they are stored in place of."""

    def store(array):
        rows = stored_rows(type, *array.shape, seed=int(array.view(np.uint32)[0, 0]))
        return StoredTensor("", array.shape, type, rows)

    return store


@pytest.mark.parametrize(
    ("store", "quantization", "bound", "bits"),
    [
        (lambda array: stored_floats("t", array), None, 2e-3, 16),
        (codes_of(Q8_0), None, 2e-3, 8.5),
        (codes_of(MXFP4), None, 2e-3, 4.25),
        (codes_of(Q4_F), None, 2e-3, 6),
        (lambda array: stored_floats("t", array), "int8", 2e-2, 8.5),
        (lambda array: stored_floats("t", array), "int4", 0.2, 5),
        (lambda array: stored_floats("t", array), "nf4", 0.2, 5),
        (lambda array: stored_floats("t", array), "fp8", 0.15, 8.5),
    ],
)
def test_experts_keep_their_codes_or_get_some(store, quantization, bound, bits):
    random = np.random.default_rng(4)
    stacks = [random.standard_normal(shape, dtype=np.float32) * 0.1 for shape in ((4, 128, 128), (4, 128, 64))]
    experts = [[[store(w[:32]), store(w[32:])] for w in stack] for stack in stacks]
    biases = [[[stored_floats("b", part)] for part in random.standard_normal((4, 128))] for _ in stacks]
    x, logits = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)), torch.eye(5, 4)
    plain, ops = TorchOps(), GpuOps(DEVICE, dtype="float16", quantization=quantization)
    kind = Activation.CLAMPED_SWIGLU
    truth = plain.moe(x, logits, *map(plain.pack_experts, experts, biases), Routing(2), kind)
    packed = [ops.pack_experts(stack, added) for stack, added in zip(experts, biases, strict=True)]
    assert packed[0].nbytes <= 4 * 128 * 128 * bits / 8
    found = ops.moe(x.to(DEVICE).half(), logits.to(DEVICE).half(), *packed, Routing(2), kind)
    assert (found.float().cpu() - truth).norm() < bound * truth.norm()
