"""One model on several GPUs: how fast 1, 2, 4 and 8 ranks decode, beside what `quire plan --tp` predicts.

    python -m benchmarks.gpu.many [--shape llama-8b] [--degrees 1,2,4,8]

Weights are random. Where there are fewer GPUs than ranks, ranks share them and gather through memory of the host."""

import argparse
import json

import torch

from benchmarks.gpu.engine import SHAPES
from benchmarks.gpu.timed_engine import decode_seconds, started

BATCHES = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--degrees", default="1,2,4,8")
    arguments = parser.parse_args()
    shape, num_gpus, rows = SHAPES[arguments.shape], torch.cuda.device_count(), []
    print(f"{arguments.shape} on {num_gpus} x {torch.cuda.get_device_name()}: tokens a second of all sequences")
    print(f"{'ranks':>6}" + "".join(f"{batch:>10}" for batch in BATCHES) + "   sequences")
    for size in map(int, arguments.degrees.split(",")):
        if size > max(num_gpus, 2):
            print(f"{size:>6}   left out: there are {num_gpus} GPUs")
            continue
        with started(shape, tensor_parallel_size=size, kv_cache_memory_bytes=2**33) as engine:
            rates = {batch: batch / decode_seconds(engine, shape["vocab_size"], batch) for batch in BATCHES}
        rows.append({"ranks": size, "shares_gpus": size > num_gpus, "tokens_per_second": rates})
        print(f"{size:>6}" + "".join(f"{rate:>10.0f}" for rate in rates.values()))
    print(json.dumps({"benchmark": "many", "shape": arguments.shape, "gpus": num_gpus, "rows": rows}))


if __name__ == "__main__":
    main()
