"""A model that is larger than what a GPU may hold: offloaded weights, and layers on the CPU, beside weights that stay.

    python -m benchmarks.gpu.larger [--shape llama-8b] [--offload 2,6,10] [--cpu-layers 2,4] [--folder /nvme]

Weights are random. Beside the time of a step stands how fast offloaded weights came, and what a plain copy of pinned
memory to the GPU reaches. What is not begun within `--max-seconds` is left out."""

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.gpu.engine import SHAPES
from benchmarks.gpu.timed_engine import decode_seconds, started
from quire.executors.offload import OffloadExecutor

BATCHES = (1, 64)
# Few sizes of steps, since each is captured and timed, and a step waits for the link: prompts of all sequences are one.
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 2**31}
NUM_PROMPT, NUM_NEW = 4, 12  # tokens
GB = 1e9


def link_speed(num_bytes: int = 2**30) -> float:
    """Bytes a second from pinned memory to the GPU."""
    host, device = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), torch.empty(num_bytes, dtype=torch.uint8)
    device = device.to("cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 5 * num_bytes / (time.perf_counter() - begin)


def measure(shape: dict[str, Any], name: str, link: float, **options: Any) -> dict[str, Any]:
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    with started(shape, **LIMITS, **options) as engine:
        held, start_seconds = torch.cuda.memory_allocated() - before, time.perf_counter() - began
        vocab = shape["vocab_size"]
        seconds = {batch: decode_seconds(engine, vocab, batch, NUM_PROMPT, NUM_NEW) for batch in BATCHES}
        executor = engine.executor
        moved = executor._store.num_bytes if isinstance(executor, OffloadExecutor) else 0
    shares = {batch: moved / second / link for batch, second in seconds.items()}
    text = "".join(f"{1e3 * second:>12.1f}" for second in seconds.values())
    came = f"{moved / GB:>8.1f} GB a step, {shares[BATCHES[0]]:.0%} of the link" if moved else ""
    print(f"{name:<26}{held / GB:>8.1f}{text}   {came}", flush=True)
    return {
        "name": name,
        "gpu_bytes": held,
        "seconds": seconds,
        "offloaded_bytes": moved,
        "link_share": shares,
        "start_seconds": start_seconds,
        "all_seconds": time.perf_counter() - began,
    }


def cases(offload: str, cpu_layers: str) -> dict[str, dict[str, Any]]:
    """Options by name."""
    made: dict[str, dict[str, Any]] = {"all weights stay": {}}
    for gib in map(float, filter(None, offload.split(","))):
        made[f"{gib:g} GiB offloaded"] = {"offload_weights": gib}
    for layers in map(int, filter(None, cpu_layers.split(","))):
        made[f"{layers} layers on the CPU"] = {"cpu_layers": layers}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--offload", default="2,6,10", help="GiB")
    parser.add_argument("--cpu-layers", default="2,4")
    parser.add_argument("--folder", help="all offloaded weights beyond 1 GiB are on disk, here")
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    shape, link = SHAPES[arguments.shape], link_speed()
    print(f"{arguments.shape} on {torch.cuda.get_device_name()}; pinned memory to the GPU: {link / GB:.1f} GB/s")
    print(f"{'':<26}{'GB held':>8}" + "".join(f"{f'{batch} seqs, ms':>12}" for batch in BATCHES))
    rows, left_out, began = [], [], time.perf_counter()
    for name, options in cases(arguments.offload, arguments.cpu_layers).items():
        if time.perf_counter() - began > arguments.max_seconds:
            left_out.append(name)
            print(f"{name:<26}   left out: {arguments.max_seconds:g} s are over")
            continue
        rows.append(measure(shape, name, link, **options))
    if arguments.folder:
        from quire.executors import offload

        offload.available_memory = lambda: int(2**30 / offload.HOST_SHARE)  # type: ignore[attr-defined]
        rows.append(measure(shape, "4 GiB offloaded, disk", link, offload_weights=4.0, offload_folder=arguments.folder))
    found = {"benchmark": "larger", "shape": arguments.shape, "link": link, "rows": rows, "left_out": left_out}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
