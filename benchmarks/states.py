"""Ops that read and leave states: microseconds of each, and the share of the memory's bandwidth, on a CPU or a GPU.

    python -m benchmarks.states                      # on the CPU: one sequence that decodes, 64, and a prompt of 8,192
    python -m benchmarks.states --device cuda
    python -m benchmarks.states --device cuda --batch-invariant --only "delta rule" mamba2
    python -m benchmarks.gpu.engine --shape qwen3-next-half     # whole steps
    python -m benchmarks.states --peer               # whole models beside llama.cpp, on the same files
    python -m benchmarks.states --peer --only lfm2 --layers 4 --rounds 1    # a quick look

Shapes are those of published models. The time of an op is that of a program with several of them, less that of one
without, divided by their number. Bytes are those of the states that are read and written, and of inputs and outputs.

With --peer, hybrids of random weights (benchmarks/hybrid_files.py) are written as GGUF files, and Quire and llama.cpp
take turns on each: the prompt's and the decode's tokens a second."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CASES as CASES_OF_SPEED
from benchmarks.machine import describe
from benchmarks.processes import ROOT
from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.opset import Activation, Mamba2Weights, MambaWeights, OpSet, ProgramSpec, StepBatch
from quire.ops.tensors import stored_floats

PEERS = ["quire", "llama.cpp"]
LLAMA_PYTHON = ROOT / ".venv-llama/bin/python"
PEER_CASES = [case for case in CASES_OF_SPEED if case.counts != "whole"]
BLOCK = 16
DECODES = (1, 64)
ROWS_OF_TABLE = 64  # tokens are rows of a random table
Op = Callable[[Any, Any, Any, int], Any]  # (ops, columns, batch, layer)


@dataclass(frozen=True, slots=True)
class StateCase:
    sizes: tuple[int, ...]  # columns of the inputs
    outputs: int
    spec: StateSpec
    load: Callable[[OpSet, "StateCase"], Op]

    def bytes_of(self, num_seqs: int, num_tokens: int, width: int) -> int:
        """Of one layer; `width`: bytes of an activation."""
        state = 4 * (self.spec.numbers + self.spec.conv_numbers)
        return 2 * num_seqs * state + num_tokens * width * (sum(self.sizes) + self.outputs)


def vector(ops: OpSet, size: int, seed: int, scale: float = 1.0) -> Any:
    values = np.abs(np.random.default_rng(seed).normal(size=size)) * scale
    return ops.vector(stored_floats("v", values.astype(np.float32)))


def load_conv(ops: OpSet, case: StateCase) -> Op:
    weight = np.random.default_rng(0).normal(size=(case.outputs, case.spec.conv_taps)).astype(np.float32)
    packed = ops.conv_weight(stored_floats("conv", weight))

    def run(ops: Any, columns: Any, batch: Any, layer: int) -> Any:
        return ops.activate(ops.causal_conv(columns[0], packed, None, batch, layer), Activation.SILU)

    return run


def load_delta(ops: OpSet, case: StateCase) -> Op:
    bias, rate = vector(ops, case.sizes[3], 1), vector(ops, case.sizes[3], 2, 0.1)

    def run(ops: Any, columns: Any, batch: Any, layer: int) -> Any:
        q, k, v, decay, beta = columns
        return ops.delta_rule(q, k, v, ops.decay(decay, bias, rate), beta, batch, layer, case.spec.shape[1])

    return run


def load_lightning(ops: OpSet, case: StateCase) -> Op:
    decay = ops.vector(stored_floats("decay", np.linspace(0.5, 0.999, case.spec.shape[0], dtype=np.float32)))

    def run(ops: Any, columns: Any, batch: Any, layer: int) -> Any:
        return ops.linear_attention(*columns, decay, batch, layer, case.spec.shape[1])

    return run


def load_mamba2(ops: OpSet, case: StateCase) -> Op:
    heads = case.spec.shape[0]
    a = ops.vector(stored_floats("a", -np.linspace(0.1, 4, heads, dtype=np.float32)))
    groups = case.sizes[2] // case.spec.shape[1]
    weights = Mamba2Weights(a, vector(ops, heads, 1), vector(ops, heads, 2), groups)
    return lambda ops, columns, batch, layer: ops.mamba2_scan(*columns, weights, batch, layer)


def load_mamba(ops: OpSet, case: StateCase) -> Op:
    rates = -np.abs(np.random.default_rng(3).normal(size=case.spec.shape)).astype(np.float32)
    weights = MambaWeights(ops.biases(rates), vector(ops, case.outputs, 2))
    return lambda ops, columns, batch, layer: ops.mamba_scan(*columns, weights, batch, layer)


def linear_case(key_heads: int, heads: int, size: int, *gates: int, load: Any) -> StateCase:
    keys, values = key_heads * size, heads * size
    return StateCase((keys, keys, values, *gates), values, StateSpec(1, (heads, size, size)), load)


CASES = {
    "convolution, Qwen3-Next": StateCase((8192,), 8192, StateSpec(1, (1,), 8192, 4), load_conv),
    "delta rule, Qwen3-Next": linear_case(16, 32, 128, 32, 32, load=load_delta),
    "Kimi delta attention": linear_case(32, 32, 128, 32 * 128, 32, load=load_delta),
    "lightning attention, MiniMax": linear_case(64, 64, 128, load=load_lightning),
    "mamba2, Nemotron-H 8B": StateCase((8192, 128, 1024, 1024), 8192, StateSpec(1, (128, 128, 64)), load_mamba2),
    "mamba, Falcon-Mamba": StateCase((8192, 8192, 16, 16), 8192, StateSpec(1, (16, 8192)), load_mamba),
}


def step(num_seqs: int, num_tokens: int) -> StepBatch:
    """`num_tokens` tokens of each sequence, behind one that is known."""
    starts = np.arange(num_seqs + 1, dtype=np.int32) * num_tokens
    total = num_seqs * num_tokens
    seqs = np.arange(num_seqs, dtype=np.int32)
    ids = np.random.default_rng(0).integers(0, ROWS_OF_TABLE, total).astype(np.int32)
    positions = np.tile(np.arange(1, num_tokens + 1, dtype=np.int32), num_seqs)
    tables = np.zeros((num_seqs, num_tokens // BLOCK + 1), np.int32)
    states = np.stack([starts[1:], seqs, seqs], axis=1)
    contexts = np.full(num_seqs, num_tokens + 1, np.int32)
    slots = np.zeros(total, np.int32)
    return StepBatch(ids, positions, slots, starts, contexts, tables, starts[1:] - 1, states=states)


class OnCpu:
    width = 4

    def __init__(self, threads: int | None) -> None:
        from benchmarks.ceilings import measure_ceilings
        from quire.ops.native import NativeOps
        from quire.ops.native.cpus import compute_threads

        self.ops: Any = NativeOps(threads)
        ceilings = measure_ceilings(threads or compute_threads())
        self.bandwidth = 1e9 * ceilings.gigabytes if ceilings else float("nan")

    def seconds(self, program: Any, batch: StepBatch) -> float:
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            program.run(batch)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


class OnGpu:
    width = 2

    def __init__(self, batch_invariant: bool) -> None:
        from benchmarks.gpu.measuring import copy_bandwidth
        from quire.ops.gpu.opset import GpuOps

        self.ops: Any = GpuOps(graphs=False, batch_invariant=batch_invariant)
        self.bandwidth = copy_bandwidth()

    def seconds(self, program: Any, batch: StepBatch) -> float:
        import torch

        from benchmarks.gpu.measuring import seconds_a_call

        with torch.inference_mode():
            on_device = program._on_device(batch)
            return seconds_a_call([lambda: program._forward(on_device)])


def measure(device: OnCpu | OnGpu, case: StateCase, num_seqs: int, num_tokens: int, layers: int) -> float:
    """Seconds of one op."""
    ops, batch = device.ops, step(num_seqs, num_tokens)
    table = np.random.default_rng(1).normal(size=(ROWS_OF_TABLE, sum(case.sizes))).astype(np.float32)
    packed, op = ops.table(stored_floats("table", table)), case.load(ops, case)

    def forward(count: int, ops: Any, batch: Any) -> Any:
        x = ops.embedding(batch.ids, packed)
        columns = ops.split(x, case.sizes)
        for layer in range(count):
            x = op(ops, columns, batch, layer)
        return ops.rows(x, batch)

    spec = case.spec
    states = StateSpec(layers, spec.shape, spec.conv_channels, spec.conv_taps, num_seqs)
    cache = ops.new_cache(KVSpec(1, 1, 16, BLOCK, "float16", states=states), 1)
    times = []
    for count in (layers, 0):
        program = ops.compile(partial(forward, count), cache, ProgramSpec(batch.num_tokens, num_seqs, num_tokens + 1))
        times.append(device.seconds(program, batch))
    return (times[0] - times[1]) / layers


def beside_llama_cpp(args: argparse.Namespace) -> None:
    from benchmarks import engines as known
    from benchmarks.hybrid_files import HYBRIDS, write_hybrid
    from benchmarks.processes import interruptible, progress
    from benchmarks.report import Report
    from benchmarks.speed import measure_speed

    interruptible()
    found = known.find(
        argparse.Namespace(
            **{**vars(args), "engines": PEERS, "llama_server": Path(), "vllm_python": Path()}, vllm_dtype=""
        ),
        needs=["speed"],
    )
    sizes = {"layers": args.layers} if args.layers else {}
    report = Report(Path("hybrids of random weights"), found, None, args.json)
    with tempfile.TemporaryDirectory() as folder:
        for name in HYBRIDS:
            if any(part in name for part in args.only):
                progress(f"{name} is written")
                path = write_hybrid(Path(folder), name, **sizes)
                report.add(measure_speed(found, path, args.rounds, None, cases=PEER_CASES))
                path.unlink()
    report.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of ops, or of hybrids")
    peer = parser.add_argument_group("with --peer")
    peer.add_argument("--peer", action="store_true", help="whole models beside llama.cpp")
    peer.add_argument("--rounds", type=int, default=3, help="how often each is measured (default: 3)")
    peer.add_argument("--layers", type=int, help="of every hybrid (default: those of its shape)")
    peer.add_argument("--json", type=Path, metavar="FILE", help="keep the result there too")
    peer.add_argument("--llama-python", type=Path, default=LLAMA_PYTHON, metavar="PATH", help="llama.cpp's interpreter")
    args = parser.parse_args()
    if args.peer:
        beside_llama_cpp(args)
        return
    device = OnGpu(args.batch_invariant) if args.device == "cuda" else OnCpu(args.threads)
    print(f"memory: {device.bandwidth / 1e9:.0f} GB/s")
    rows = []
    for name, case in CASES.items():
        if not any(part in name for part in args.only):
            continue
        for num_seqs, num_tokens in (*((n, 1) for n in DECODES), (1, args.prompt)):
            layers = 2 if num_tokens > 1 else 8 if num_seqs > 1 else 48  # more than a cache holds
            seconds = measure(device, case, num_seqs, num_tokens, layers)
            rate = case.bytes_of(num_seqs, num_seqs * num_tokens, device.width) / seconds
            what = f"prompt of {num_tokens}" if num_tokens > 1 else f"decode {num_seqs}"
            share = rate / device.bandwidth
            print(f"{name:30} {what:16} {1e6 * seconds:11.1f} us {rate / 1e9:8.1f} GB/s {share:5.0%}", flush=True)
            rows.append({"op": name, "step": what, "us": 1e6 * seconds, "share": share})
    print(json.dumps({**describe(), "device": args.device, "batch_invariant": args.batch_invariant, "ops": rows}))


if __name__ == "__main__":
    main()
