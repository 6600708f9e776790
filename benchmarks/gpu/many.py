"""One model on several GPUs: how fast 1, 2, 4 and 8 ranks decode, beside what `quire plan --tp` predicts.

    python -m benchmarks.gpu.many [--shape llama-8b] [--degrees 1,2,4,8]
    python -m benchmarks.gpu.many --shape tiny --degrees 1,2 --device cpu     a try of the benchmark itself

Weights are random. Where there are fewer GPUs than ranks, ranks share them, gather through memory of the host and
launch op by op: such a row says what sharing costs, and nothing of several GPUs."""

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.gpu.engine import LLAMA_8B, SHAPES
from benchmarks.gpu.timed_engine import decode_seconds, started

BATCHES = (1, 16, 64)
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def measure(shape: dict[str, Any], device: str, size: int, num_devices: int) -> dict[str, Any]:
    """`num_devices`: that ranks take in turn."""
    began = time.perf_counter()
    cache = 2**33 if device == "cuda" else 2**24
    limits = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": cache}
    with started(shape, device, tensor_parallel_size=size, **limits) as engine:
        start_seconds = time.perf_counter() - began
        rates = {batch: batch / decode_seconds(engine, shape["vocab_size"], batch, num_prompt=16) for batch in BATCHES}
    return {
        "ranks": size,
        "shares_gpus": size > num_devices,
        "tokens_per_second": rates,
        "start_seconds": start_seconds,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="llama-8b")
    parser.add_argument("--degrees", default="1,2,4,8")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    shape, on_gpu = {**SHAPES, "tiny": TINY}[arguments.shape], arguments.device == "cuda"
    num_devices = torch.cuda.device_count() if on_gpu else 1
    name = f"{num_devices} x {torch.cuda.get_device_name()}" if on_gpu else "the CPU"
    print(f"{arguments.shape} on {name}: tokens a second of all sequences")
    print(f"{'ranks':>6}" + "".join(f"{batch:>10}" for batch in BATCHES) + "   sequences")
    rows = []
    for size in map(int, arguments.degrees.split(",")):
        if size > max(num_devices, 2):
            print(f"{size:>6}   left out: there are {num_devices} GPUs")
            continue
        rows.append(measure(shape, arguments.device, size, num_devices))
        rates = "".join(f"{rate:>10.0f}" for rate in rows[-1]["tokens_per_second"].values())
        sharing = f"   {size} ranks share {num_devices} GPU: gathered through host memory, launched op by op"
        print(f"{size:>6}{rates}{sharing if on_gpu and size > num_devices else ''}", flush=True)
    print(json.dumps({"benchmark": "many", "shape": arguments.shape, "gpus": num_devices * on_gpu, "rows": rows}))


if __name__ == "__main__":
    main()
