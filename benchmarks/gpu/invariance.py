"""What `batch_invariant` costs: the GEMMs and the attention of a layer, with it and without.

    python -m benchmarks.gpu.invariance [--sweep]

The shapes are Llama-3.1-8B's in bf16. --sweep tries tiles for attention: one kind has to serve prompts and decoding."""

import argparse
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.attention import Step, decode_launches, layers_for, prefill_launches
from benchmarks.gpu.measuring import Calls, copies, rows, seconds_a_call
from benchmarks.gpu.shapes import SHAPES
from quire.ops.gpu.attention.prefill import PrefillLaunch, invariant_launch
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.split_k import new_tickets

NUM_ROWS = (1, 8, 64, 256, 2048, 8192)
STEPS = {  # name: (context, queries) of each sequence
    "1 x 1k": [(1024, 1)],
    "1 x 16k": [(16384, 1)],
    "32 x 1k": [(1024, 1)] * 32,
    "32 x 16k": [(16384, 1)] * 32,
    "256 x 1k": [(1024, 1)] * 256,
    "prompt of 2k": [(2048, 2048)],
    "prompt of 8k": [(8192, 8192)],
}
BF16 = torch.bfloat16
POSITION_BYTES = 4096  # of K and V in a layer
WIDE = PrefillLaunch(rows=64, block_n=64, num_warps=4, num_stages=3, uniform=True)
TRIED = [
    WIDE,
    replace(WIDE, rows=128, num_warps=8),
    replace(WIDE, rows=16, num_warps=4),
    replace(WIDE, rows=32),
    replace(WIDE, num_stages=2),
    replace(WIDE, block_n=128, num_stages=2),
    replace(WIDE, block_n=32, num_stages=4),
    replace(WIDE, num_warps=8),
]


def gemms() -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        weights = [torch.randn(N, K, device="cuda", dtype=BF16) for _ in range(copies(2 * N * K))]
        for M in NUM_ROWS:
            if name == "head" and M > 256:
                continue  # logits are wanted of few rows
            x, times = rows(M, K), []
            for invariant in (False, True):
                calls: Calls = [partial(linear, x, w, batch_invariant=invariant, tickets=tickets) for w in weights]
                times.append(seconds_a_call(calls, rounds=3))
            tell(f"{name} {N} x {K}, {M} rows", *times)


def attention(sweep: bool) -> None:
    for name, lengths in STEPS.items():
        step = Step(lengths, BF16, 16, layers_for(lengths, POSITION_BYTES))
        quick = prefill_launches(step) if lengths[0][1] > 1 else decode_launches(step)
        before = seconds_a_call(quick, rounds=3)
        launches = TRIED if sweep else [invariant_launch(step.head_dim, step.heads, step.kv_heads, BF16)]
        for launch in launches:
            try:
                after = seconds_a_call(prefill_launches(step, launch=launch), rounds=3)
            except Exception as error:  # a tile too large: the others are still to be tried
                print(f"    failed: {launch}: {str(error).splitlines()[0][:100]}")
                continue
            tell(f"attention {name}", before, after, str(launch) if sweep else "")


def tell(name: str, before: float, after: float, note: str = "") -> None:
    print(
        f"{name:34} {1e6 * before:9.1f} us, invariant {1e6 * after:9.1f} us, {after / before:5.2f} x {note}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    attention(args.sweep)
    gemms()


if __name__ == "__main__":
    main()
