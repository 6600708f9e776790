"""MLA on a GPU: prefill, GEMMs of heads, writes to the latent cache; DeepSeek's shapes.

    python -m benchmarks.gpu.latent [--sweep]

Decoding alone is in benchmarks.gpu.attention; a whole engine is `benchmarks.gpu.engine --shape deepseek-v2-lite`."""

import argparse
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measuring import Calls, Ceilings, check, copies, print_fastest, seconds_a_call
from quire.ops.gpu.attention.mla import MLALaunch, mla_decode
from quire.ops.gpu.attention.mla_plan import LatentPlan, plan_latent
from quire.ops.gpu.attention.mla_write import latent_write
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.linear.heads import linear_heads

LATENT, TURNING, STILL, VALUE, BLOCK = 512, 64, 128, 128, 64
MAX_LEN = 16384
SCALE = (STILL + TURNING) ** -0.5
BF16 = torch.bfloat16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


class Step:
    """Sequences of (context, queries) on shuffled pages."""

    def __init__(self, lengths: list[tuple[int, int]], heads: int, batch_invariant: bool = False) -> None:
        self.lengths, self.heads = lengths, heads
        width = max(-(-context // BLOCK) for context, _ in lengths)
        self.page = random(len(lengths) * width, BLOCK, LATENT + TURNING)
        tables = torch.randperm(len(self.page), device="cuda").int().view(len(lengths), width)
        starts = np.cumsum([0, *(count for _, count in lengths)]).astype(np.int32)
        positions = np.concatenate([np.arange(context - count, context) for context, count in lengths])
        self.q = random(int(starts[-1]), heads, LATENT + TURNING)
        self.runs = Runs(_int32(starts), _int32([context for context, _ in lengths]), tables)
        self.plan: LatentPlan = plan_latent(
            self.runs,
            _int32(positions),
            prefills=bool((np.diff(starts) > 1).any()),
            num_heads=heads,
            dtype=BF16,
            max_model_len=MAX_LEN,
            batch_invariant=batch_invariant,
        )

    def run(self, launch: MLALaunch | None = None) -> Tensor:
        plan = self.plan
        return mla_decode(self.q, self.page, plan.runs, plan.pieces, SCALE, launch=launch or plan.launch)

    def plain(self) -> Tensor:
        timings = []
        for seq, (context, count) in enumerate(self.lengths):
            kept = self.page[self.runs.block_tables[seq].long()].flatten(0, 1)[:context].float()
            first = int(self.runs.seq_starts[seq])
            scores = torch.einsum("nhd,md->hnm", self.q[first : first + count].float(), kept) * SCALE
            hidden = torch.ones(count, context, device="cuda").triu(context - count + 1).bool()
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            timings.append(torch.einsum("hnm,md->nhd", weights, kept[:, :LATENT]))
        return torch.cat(timings)

    @property
    def operations(self) -> int:
        pairs = sum(count * context - count * (count - 1) // 2 for context, count in self.lengths)
        return 2 * pairs * self.heads * (2 * LATENT + TURNING)


def _int32(values: object) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")


def check_all() -> None:
    odd = [(1, 1), (777, 1), (130, 130), (1500, 77), (64, 64), (513, 2)]
    for heads in (16, 128, 20):
        for batch_invariant in (False, True):
            step = Step(odd, heads, batch_invariant)
            check(f"prompts and tokens, {heads} heads, {batch_invariant=}", step.run(), step.plain(), 1e-2)
            alone = Step([odd[1]], heads, batch_invariant)
            alone.page, alone.q = step.page, step.q[1:2]
            alone.plan = replace(alone.plan, runs=replace(alone.plan.runs, block_tables=step.runs.block_tables[1:2]))
            if batch_invariant and not torch.equal(alone.run()[0], step.run()[1]):
                print(f"WRONG a token alone has other bits, {heads} heads")
    for tokens, heads, inputs, outputs in ((1, 16, 128, 512), (70, 128, 512, 128), (33, 20, 100, 72)):
        x, w = random(tokens, heads, inputs), random(heads, outputs, inputs)
        for batch_invariant in (False, True):
            out = torch.empty(tokens, heads, outputs, device="cuda", dtype=BF16)
            linear_heads(x, w, out, batch_invariant=batch_invariant)
            check(f"GEMMs of {heads} heads", out, torch.einsum("thi,hoi->tho", x.float(), w.float()), 1e-2)


def time_prompts(ceilings: Ceilings) -> None:
    for heads in (16, 128):
        for lengths in ([(2048, 2048)], [(8192, 2048)], [(8192, 64)], [(512, 512)] * 4 + [(2048, 1)] * 32):
            step = Step(lengths, heads)
            nbytes = sum(context for context, _ in lengths) * (LATENT + TURNING) * 2 + 2 * step.q.nbytes
            name = f"{heads} heads, {len(lengths)} runs, {len(step.q)} tokens of {lengths[0][0]}"
            print(ceilings.line(name, seconds_a_call([step.run] * 2), nbytes, step.operations))


def time_products(ceilings: Ceilings) -> None:
    for heads in (16, 128):
        for tokens in (1, 8, 64, 2048):
            for inputs, outputs in ((STILL, LATENT), (LATENT, VALUE)):
                weights = [random(heads, outputs, inputs) for _ in range(copies(heads * outputs * inputs * 2))]
                x = random(tokens, heads, inputs)
                out = torch.empty(tokens, heads, outputs, device="cuda", dtype=BF16)
                for way, invariant in (("cuBLAS", False), ("tiles", True)):
                    calls: Calls = [partial(linear_heads, x, w, out, batch_invariant=invariant) for w in weights]
                    name = f"{heads} heads, {tokens} rows, {inputs} -> {outputs}, {way}"
                    operations = 2 * tokens * heads * inputs * outputs
                    nbytes = weights[0].nbytes + x.nbytes + out.nbytes
                    print(ceilings.line(name, seconds_a_call(calls), nbytes, operations))


def time_writes(ceilings: Ceilings) -> None:
    for heads in (16, 128):
        for tokens in (1, 64, 2048):
            latent, k_rope, q_rope = (
                random(tokens, LATENT),
                random(tokens, TURNING),
                random(tokens, heads * TURNING),
            )
            page, q = random(64, BLOCK, LATENT + TURNING), random(tokens, heads, LATENT + TURNING)
            angles, slots = torch.randn(tokens, TURNING, device="cuda"), torch.arange(tokens, device="cuda").int()
            given = (latent, k_rope, q_rope, angles, slots, page, q)
            seconds = seconds_a_call([partial(latent_write, *given)] * 8)
            nbytes = 2 * (latent.nbytes + k_rope.nbytes + q_rope.nbytes)
            print(ceilings.line(f"writing {tokens} rows, {heads} heads", seconds, nbytes, 0))


def sweep() -> None:
    for heads in (16, 128):
        step = Step([(4096, 2048)], heads)
        tried = [
            MLALaunch(64, block_n, warps, stages, per)
            for block_n in (16, 32, 64)
            for warps in (4, 8)
            for stages in (2, 3, 4)
            for per in (1, 2)
        ]
        calls: dict[str, Calls] = {str(launch): [partial(step.run, launch)] for launch in tried}
        print_fastest(f"prompt of {heads} heads ({step.operations / 1e12:.2f} TFLOP)", step.page.nbytes, calls)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    check_all()
    ceilings = Ceilings()
    time_prompts(ceilings)
    time_products(ceilings)
    time_writes(ceilings)
    if arguments.sweep:
        sweep()


if __name__ == "__main__":
    main()
