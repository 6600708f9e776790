"""What a step with drafts takes of the host: the GPU's op set and the engine above it, with the device's work left out.

    python -m benchmarks.draft_host [--sequences 1 8 64 256] [--steps 100] [--tree-nodes 32] [--profile]

A tiny model with an EAGLE-3 head; acceptance is synthetic (2.9 tokens a step of 3 drafts). Forward passes, kernels of
the sampler and graphs return arrays of zeros at once. What CUDA's own calls take is not counted. Of each part the
median is told: `collect` is from the arrival of the tokens until drafts are queued, `update` and `schedule` are the
scheduler's, `submit` is until the target's step is queued.

Prints a table and ends in one line of JSON."""

import argparse
import cProfile
import gc
import json
import pstats
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.machine import describe
from quire.core.params import SamplingParams
from quire.core.plan import StepOutput
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.ops.gpu.opset import GpuOps
from quire.ops.gpu.program import GpuProgram
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.runtime.spec.config import read_config

HIDDEN, VOCAB, PROMPT, DRAFTS = 64, 512, 128, 3
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
PARTS = ("collect", "update", "schedule", "submit")


def write_models(folder: Path) -> None:
    for name in ("target", "head"):
        (folder / name).mkdir()
    (folder / "target/config.json").write_text(json.dumps(TARGET))
    square = (HIDDEN, HIDDEN)
    attention = {f"midlayer.self_attn.{one}_proj": (HIDDEN, 2 * HIDDEN) for one in "qkv"}
    mlp = {f"midlayer.mlp.{one}_proj": square for one in ("gate", "up", "down")}
    matrices = {"fc": (HIDDEN, 3 * HIDDEN), **attention, "midlayer.self_attn.o_proj": square, **mlp}
    matrices["lm_head"] = (VOCAB, HIDDEN)
    norms = ["norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in matrices.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(tensors, folder / "head/model.safetensors")
    layer = {**TARGET, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "head/config.json").write_text(json.dumps({**layer, "draft_vocab_size": VOCAB}))


class NoDevice(LocalExecutor):
    """The GPU's op set, on the CPU."""

    def _new_ops(self, options: Any, config: Any) -> Any:
        return GpuOps("cpu", "float32", graphs=False)


def leave_out_the_device(tree_nodes: int) -> None:
    logits = torch.zeros(8192, VOCAB)
    kept = torch.zeros(8192, HIDDEN)

    def run(self: Any, batch: Any) -> torch.Tensor:
        self.kept = kept
        return logits[: len(batch.logit_rows)]

    def launch(self: Any, key: Any, inputs: Any, launch: Any) -> torch.Tensor:
        if len(key) > 3:  # tokens of lines, and what is accepted
            return torch.zeros(key[3] + (key[4] if len(key) > 5 else 0), dtype=torch.int32)
        return _tree(key[1], tree_nodes) if isinstance(key[0], tuple) else logits

    GpuProgram._run = run  # type: ignore[method-assign]
    LaunchGraphs.run = launch  # type: ignore[method-assign]


def _tree(num_seqs: int, num_nodes: int) -> torch.Tensor:
    """Each node has two children."""
    numbers = torch.arange(num_nodes, dtype=torch.int32)
    bits = torch.full((num_nodes,), 0.5).view(torch.int32)
    return torch.stack([numbers, (numbers - 2) // 2, bits]).expand(num_seqs, -1, -1)


class Timer:
    """The seconds of calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            begin = thread_time()
            result = call(*args)
            self.seconds[name].append(thread_time() - begin)
            return result

        return measured


def new_engine(folder: Path, sequences: int, tree_nodes: int, fixed: bool) -> Engine:
    config: dict[str, Any] = {
        "method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": DRAFTS,
    }  # fmt: skip
    if tree_nodes:
        config |= {"tree_nodes": tree_nodes}
    else:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.9}
    if fixed or tree_nodes:
        config |= {"num_speculative_tokens_per_batch_size": [[1, sequences, tree_nodes or DRAFTS]]}
    batched = max(2048, sequences * (1 + max(tree_nodes, DRAFTS)) * 2)
    executor = NoDevice(
        folder / "target",
        ExecutorOptions(
            backend="cuda", load_format="dummy", dtype="float32", max_model_len=2048, max_num_seqs=sequences,
            max_num_batched_tokens=batched, kv_cache_memory_bytes=max(sequences, 8) << 21,
            speculation=read_config(json.dumps(config)),
        ),
    )  # fmt: skip
    return Engine(executor, EngineOptions(max_num_seqs=sequences, max_num_batched_tokens=batched))


def measure(folder: Path, sequences: int, args: argparse.Namespace) -> dict[str, float]:
    engine = new_engine(folder, sequences, args.tree_nodes, args.fixed)
    scheduler, timer = engine._scheduler, Timer()
    assert scheduler.speculation is not None
    record, drafting = scheduler.record_step, scheduler.speculation.record_drafting

    def record_drafting(output: StepOutput) -> None:
        output.device_seconds, output.draft_seconds = 0.0, 1e-3
        drafting(output)

    # A device's step, to learn from: 4 ms and 20 us a token, and 1 ms for drafts.
    scheduler.record_step = lambda plan, seconds, gap: record(plan, 5e-3 + 2e-5 * plan.num_tokens)  # type: ignore[method-assign]
    scheduler.speculation.record_drafting = record_drafting  # type: ignore[method-assign]
    for number in range(sequences):
        prompt = [(7 * number + 3 * place) % VOCAB for place in range(PROMPT)]
        params = SamplingParams(max_tokens=1800, temperature=0.0, seed=0, ignore_eos=True)
        engine.submit(Request(id=str(number), prompt_ids=prompt, params=params))
    while scheduler.stats().drafts < 20 * sequences:
        engine.step()
    executor: Any = engine.executor
    executor.submit, executor.collect = (timer.timed(name, getattr(executor, name)) for name in ("submit", "collect"))
    scheduler.schedule = timer.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = timer.timed("update", scheduler.update)  # type: ignore[method-assign]
    gc.collect()
    profile = cProfile.Profile()
    first, begin = scheduler.num_planned, thread_time()
    if args.profile:
        profile.enable()
    while scheduler.num_planned < first + args.steps:
        engine.step()
    profile.disable()
    seconds = (thread_time() - begin) / args.steps
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    found = {part: 1e6 * median(timer.seconds[part]) for part in PARTS}
    return {**found, "step": 1e6 * seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tree-nodes", type=int, default=0, help="trees of so many drafts instead of chains")
    parser.add_argument("--fixed", action="store_true", help="drafts at all sizes, without asking whether they pay")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    leave_out_the_device(args.tree_nodes)
    result = {}
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name))
        for sequences in args.sequences:
            result[sequences] = measure(Path(name), sequences, args)
    print(f"{'sequences':>9}" + "".join(f"{part:>10}" for part in (*PARTS, "step")) + "   microseconds")
    for sequences, parts in result.items():
        print(f"{sequences:9}" + "".join(f"{parts[part]:10.0f}" for part in (*PARTS, "step")))
    print(json.dumps({"benchmark": "draft_host", "machine": describe(), **vars(args), "microseconds": result}))


if __name__ == "__main__":
    main()
