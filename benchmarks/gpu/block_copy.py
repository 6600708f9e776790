"""Blocks that move: on the device, out to pinned memory of the host, and back.

    python -m benchmarks.gpu.block_copy [--gib 4]

Pages are those of Llama-3.1-8B in bf16. Times are of the device; "host" is what the call itself takes there."""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.measuring import copy_bandwidth
from quire.ops.gpu.cache import GpuCache
from quire.ops.kv_spec import KVSpec

SPEC = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")  # 2 MiB a block
NUM_BLOCKS = 4096


def seconds(call: Callable[[], object], rounds: int = 7) -> tuple[float, float]:
    """-> medians: on the device, and of the call."""
    call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        started = time.perf_counter()
        call()
        host = time.perf_counter() - started
        end.record()
        torch.cuda.synchronize()
        times.append((begin.elapsed_time(end) / 1e3, host))
    return statistics.median(t for t, _ in times), statistics.median(t for _, t in times)


def plain_copy_rate() -> tuple[float, float]:
    """Bytes a second of one large copy to the host and from it, as the driver does them."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    out, _ = seconds(lambda: host.copy_(device, non_blocking=True))
    back, _ = seconds(lambda: device.copy_(host, non_blocking=True))
    return host.nbytes / out, host.nbytes / back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="of pinned memory")
    args = parser.parse_args()
    num_host = int(args.gib * 2**30) // SPEC.block_bytes
    begin = time.perf_counter()
    cache = GpuCache(SPEC, NUM_BLOCKS, num_host, "cuda")
    torch.cuda.synchronize()
    print(f"{args.gib:g} GiB pinned, beside pages of 8 GiB, in {time.perf_counter() - begin:.2f} s")
    out_rate, back_rate = plain_copy_rate()
    print(f"ceilings: copy {copy_bandwidth() / 1e12:.2f} TB/s, out {out_rate / 1e9:.1f} GB/s, in {back_rate / 1e9:.1f}")
    rng = random.Random(0)
    for count in (1, 8, 64, 512):
        if count > num_host:
            continue
        blocks, host = rng.sample(range(NUM_BLOCKS // 2), count), rng.sample(range(num_host), count)
        others = rng.sample(range(NUM_BLOCKS // 2, NUM_BLOCKS), count)
        moves = {
            "copy": (cache.copy, list(zip(blocks, others, strict=True)), 2),
            "swap out": (cache.swap_out, list(zip(blocks, host, strict=True)), 1),
            "swap in": (cache.swap_in, list(zip(host, blocks, strict=True)), 1),
        }
        for name, (move, pairs, passes) in moves.items():
            device, on_host = seconds(lambda move=move, pairs=pairs: move(pairs))
            rate = passes * count * SPEC.block_bytes / device
            times = f"{1e6 * device:9.1f} us, {rate / 1e9:7.1f} GB/s, host {1e6 * on_host:.0f} us"
            print(f"{name:9} {count:4} blocks: {times}", flush=True)


if __name__ == "__main__":
    main()
