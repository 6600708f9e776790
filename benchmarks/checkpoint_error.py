"""How far a prompt that continues from a checkpoint of states is from a cold one, by the dtype of the checkpoint.

    python -m benchmarks.checkpoint_error [--prefix 1024] [--suffix 64] [--prompts 4] [--only mamba2]

Hybrids of random weights (benchmarks/hybrid_files.py), a tiny one and a larger one of each family whose states have
slots. The state after `prefix` tokens is written to a checkpoint and read back; then `suffix` tokens are computed from
it and from the state itself, and their distributions compared at every position.

KL is in nats, of the cold distribution to the resumed one; the error of logits is that of the largest difference over
the deviation of the cold logits; `same` is how often the most likely token is the same. Prints a table and ends in one
line of JSON."""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hybrid_files import VOCAB, write_hybrid
from benchmarks.machine import describe
from benchmarks.processes import interruptible, progress
from quire.models.registry import family, read_model_config
from quire.ops.kv_spec import CHECKPOINT_DTYPES
from quire.ops.native import NativeOps
from quire.ops.opset import ProgramSpec, StepBatch
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

BLOCK = 16
CHUNK = 512  # tokens of a step
FAMILIES = ("qwen3.5", "mamba2")
SIZES: dict[str, dict[str, int]] = {"tiny": {"layers": 4, "hidden": 256}, "larger": {}}
STATE, RESUMED, CHECKPOINT = 0, 1, 2  # slots
Array = np.ndarray[Any, np.dtype[Any]]


class Model:
    def __init__(self, path: Path, dtype: str, length: int, threads: int | None) -> None:
        ops, checkpoint = NativeOps(threads), open_checkpoint(path)
        model_family = family(checkpoint.config.architecture)
        config = read_model_config(model_family, checkpoint.config)
        spec = kv_spec(config, BLOCK, "float16", checkpoint_dtype=dtype)
        assert spec.states is not None
        states = replace(spec.states, num_slots=2, num_checkpoint_slots=1)
        self.checkpoint_bytes, num_blocks = states.checkpoint_bytes, -(-length // BLOCK)
        self.cache = ops.new_cache(replace(spec, states=states), num_blocks)
        forward = model_family.load(ops, checkpoint, config, length).forward
        self._program = ops.compile(forward, self.cache, ProgramSpec(CHUNK, 1, length))
        self._table = np.arange(num_blocks, dtype=np.int32)

    def logits(self, ids: Array, start: int, source: int, target: int) -> Array:
        """Of ids from `start` on: the state before them is in the slot `source`, and that after them in `target`."""
        rows = []
        for first in range(start, len(ids), CHUNK):
            end = min(first + CHUNK, len(ids))
            positions, count = np.arange(first, end, dtype=np.int32), end - first
            batch = StepBatch(
                ids=ids[first:end],
                positions=positions,
                slots=positions,
                seq_starts=np.array([0, count], np.int32),
                context_lens=np.array([end], np.int32),
                block_tables=self._table[None],
                logit_rows=np.arange(count, dtype=np.int32),
                states=np.array([(count, source, target)], np.int32),
            )
            rows.append(np.array(self._program.run(batch)))
            source = target
        return np.concatenate(rows)


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def errors(model: Model, num_prefix: int, num_suffix: int, seed: int) -> dict[str, float]:
    ids = np.random.default_rng(seed).integers(100, VOCAB - 100, num_prefix + num_suffix).astype(np.int32)
    model.logits(ids[:num_prefix], 0, -1, STATE)
    model.cache.copy_states([(STATE, CHECKPOINT)])
    model.cache.copy_states([(CHECKPOINT, RESUMED)])
    cold = model.logits(ids, num_prefix, STATE, STATE)
    resumed = model.logits(ids, num_prefix, RESUMED, RESUMED)
    theirs, ours = log_softmax(cold), log_softmax(resumed)
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "kl_first": float(kl[0]),
        "logit_error": float(np.abs(cold - resumed).max() / cold.std()),
        "same": float((cold.argmax(-1) == resumed.argmax(-1)).mean()),
    }


def measure(path: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    results = {}
    for dtype in CHECKPOINT_DTYPES:
        model = Model(path, dtype, args.prefix + args.suffix, args.threads)
        found = [errors(model, args.prefix, args.suffix, seed) for seed in range(args.prompts)]
        worst = {name: max(one[name] for one in found) for name in ("kl_max", "logit_error")}
        means = {name: sum(one[name] for one in found) / len(found) for name in ("kl_mean", "kl_first", "same")}
        results[dtype] = {"bytes": model.checkpoint_bytes, **means, **worst}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens before the checkpoint (default: 1024)")
    parser.add_argument("--suffix", type=int, default=64, help="tokens behind it (default: 64)")
    parser.add_argument("--prompts", type=int, default=4, help="random prompts (default: 4)")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES, *SIZES], default=[], help="families or sizes")
    args = parser.parse_args()
    interruptible()
    results: dict[str, Any] = {}
    heading = (
        f"{'model':<16} {'checkpoint':<9} {'KiB':>8} {'KL mean':>9} {'first':>9} {'max':>9} {'logits':>8} {'same':>7}"
    )
    print(heading)
    for name in FAMILIES:
        for size, given in SIZES.items():
            if not {*args.only} & {*FAMILIES} <= {name} or not {*args.only} & {*SIZES} <= {size}:
                continue
            progress(f"{name}, {size}")
            with tempfile.TemporaryDirectory() as folder:
                found = measure(write_hybrid(Path(folder), name, **given), args)
            for dtype, row in found.items():
                kl = " ".join(f"{row[part]:9.2e}" for part in ("kl_mean", "kl_first", "kl_max"))
                end = f"{row['logit_error']:8.4f} {row['same']:7.1%}"
                print(f"{f'{name}, {size}':<16} {dtype:<9} {row['bytes'] / 1024:8.0f} {kl} {end}", flush=True)
            results[f"{name}, {size}"] = found
    print(json.dumps({**describe(), "prefix": args.prefix, "suffix": args.suffix, "models": results}))


if __name__ == "__main__":
    main()
