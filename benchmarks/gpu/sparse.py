"""Sparse attention (DSA) beside dense MLA on a GPU, in the shape of DeepSeek V3.2: one layer, microseconds.

    python -m benchmarks.gpu.sparse [--contexts 8192,32768,131072] [--seqs 1,8,32]

Decoding: every sequence has one token. The last case is a chunk of a prompt."""

import argparse
import json

import torch
from torch import Tensor

from benchmarks.gpu.measuring import seconds_a_call
from quire.ops.gpu.attention.indexer import choose_slots, score_positions
from quire.ops.gpu.attention.mla import mla_decode
from quire.ops.gpu.attention.mla_plan import LatentPlan, plan_latent, plan_sparse
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.attention.top_k import seen_positions, select_slots

HEADS, LATENT, ROPE, BLOCK = 128, 512, 64, 64
INDEX_HEADS, COLUMNS, TOP_K = 64, 128, 2048
SCALE = 192**-0.5
BF16 = torch.bfloat16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def measure(num_seqs: int, context: int, count: int) -> dict[str, float | int]:
    """`count` tokens of each of `num_seqs` sequences, the last of them at the end of its context."""
    width, num_tokens = context // BLOCK, num_seqs * count
    tables = torch.randperm(num_seqs * width, device="cuda").int().view(num_seqs, width)
    starts = torch.arange(0, num_tokens + 1, count, dtype=torch.int32, device="cuda")
    positions = torch.arange(context - count, context, dtype=torch.int32, device="cuda").repeat(num_seqs)
    runs = Runs(starts, torch.full((num_seqs,), context, dtype=torch.int32, device="cuda"), tables)
    page, keys = random(num_seqs * width, BLOCK, LATENT + ROPE), random(num_seqs * width, BLOCK, COLUMNS)
    q, index_q = random(num_tokens, HEADS, LATENT + ROPE), random(num_tokens, INDEX_HEADS * COLUMNS)
    weights, angles = random(num_tokens, INDEX_HEADS), torch.randn(num_tokens, ROPE, device="cuda")
    seen = seen_positions(runs, positions, torch.zeros_like(positions), BLOCK, TOP_K)
    sparse = plan_sparse(seen, num_heads=HEADS, dtype=BF16, batch_invariant=False)
    dense = plan_latent(
        runs,
        positions,
        prefills=count > 1,
        num_heads=HEADS,
        dtype=BF16,
        max_model_len=context,
        batch_invariant=False,
    )
    indexed = index_q, weights, angles, keys, seen
    slots = choose_slots(*indexed)
    some = range(min(num_tokens, 2**27 // (4 * seen.width)))  # scores that are there at once
    scores, share = score_positions(*indexed, some), num_tokens / len(some)

    def attend(plan: LatentPlan, chosen: Tensor | None = None) -> Tensor:
        return mla_decode(q, page, plan.runs, plan.pieces, SCALE, latent=LATENT, launch=plan.launch, chosen=chosen)

    times = {
        "scores": seconds_a_call([lambda: score_positions(*indexed, some)]) * share,
        "top_k": seconds_a_call([lambda: select_slots(scores, seen, some, slots)]) * share,
        "attention": seconds_a_call([lambda: attend(sparse, slots)]),
        "all sparse": seconds_a_call([lambda: attend(sparse, choose_slots(*indexed))]),
        "dense": seconds_a_call([lambda: attend(dense)]),
    }
    found = {name: round(1e6 * seconds, 1) for name, seconds in times.items()}
    key_bytes = num_seqs * context * COLUMNS * 2 * (1 if count == 1 else 0)
    flop = 2 * num_tokens * context * INDEX_HEADS * COLUMNS
    rates = {"scores TB/s": key_bytes / times["scores"] / 1e12, "scores TFLOP/s": flop / times["scores"] / 1e12}
    case = {"seqs": num_seqs, "context": context, "tokens": count}
    return case | found | {name: round(rate, 2) for name, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="8192,32768,131072")
    parser.add_argument("--seqs", default="1,8,32")
    options = parser.parse_args()
    contexts, seqs = ([int(n) for n in given.split(",")] for given in (options.contexts, options.seqs))
    results = []
    with torch.inference_mode():
        for shape in [*((n, context, 1) for context in contexts for n in seqs), (1, 32768, 2048)]:
            results.append(measure(*shape))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
