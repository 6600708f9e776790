"""What routing by KV events costs: the index of a large fleet, one pick, one batch of events, one tokenized prompt.

    python -m benchmarks.gateway_kv_index                                64 workers of 100,000 blocks (about 2 GB)
    python -m benchmarks.gateway_kv_index --workers 8 --blocks 10000

Workers hold conversations of many lengths behind some shared instructions, as their events have said. A pick is that of
the policy `cache_aware` for a prompt of --tokens whose first three quarters one worker holds, of which the last is new
each time. Told as median and 99th percentile, in microseconds."""

import argparse
import asyncio
import gc
import json
import random
import resource
import time
from collections.abc import Callable

from benchmarks.machine import describe
from benchmarks.processes import progress
from quire.core.kv_events import block_hashes, root_hash
from quire.gateway.config import CacheAware, Faults, WorkerEntry
from quire.gateway.kv_batches import BlockRemoved, BlockStored
from quire.gateway.kv_index import KVIndex
from quire.gateway.policies import CacheAwarePolicy, PickContext
from quire.gateway.worker import Worker

SIZE = 16
AIM = 20.0  # microseconds of a pick
NUM_PICKS = 2000
CONVERSATION = 128  # blocks
SHARED = 16  # of them: one of a few instructions


def fill(index: KVIndex, num_workers: int, num_blocks: int, rng: random.Random) -> list[list[list[int]]]:
    """-> by worker: tokens of its conversations"""
    instructions = [[rng.randrange(50_000) for _ in range(SHARED * SIZE)] for _ in range(4)]
    held: list[list[list[int]]] = []
    for worker in range(num_workers):
        index.follow(worker)
        held.append([])
        while index.num_blocks(worker) < num_blocks:
            own = [rng.randrange(50_000) for _ in range((CONVERSATION - SHARED) * SIZE)]
            tokens = instructions[rng.randrange(4)] + own
            names: list[int | bytes] = list(block_hashes(root_hash([]), tokens, SIZE))
            index.apply(worker, [BlockStored(names, None, tokens, SIZE, [[] for _ in names])])
            if len(held[-1]) < 64:
                held[-1].append(tokens)
        progress(f"{worker + 1} of {num_workers} workers")
    return held


def timed(count: int, work: Callable[[int], object]) -> dict[str, float]:
    """Microseconds of one."""
    seconds = []
    for number in range(count):
        begin = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - begin)
    seconds.sort()
    return {"p50": round(seconds[count // 2] * 1e6, 2), "p99": round(seconds[count * 99 // 100] * 1e6, 2)}


def pick_times(index: KVIndex, workers: list[Worker], held: list[list[list[int]]], num_tokens: int) -> dict[str, float]:
    rng = random.Random(3)
    policy = CacheAwarePolicy(CacheAware(), index)
    contexts = []
    for _ in range(NUM_PICKS):
        known = rng.choice(rng.choice(held))[: num_tokens * 3 // 4]
        tokens = known + [rng.randrange(50_000) for _ in range(num_tokens - len(known))]
        contexts.append(PickContext("t", blocks=block_hashes(root_hash([]), tokens, SIZE)))
    times = timed(NUM_PICKS, lambda number: policy.pick(workers, contexts[number]))
    hit = sum(context.predicted_hit for context in contexts) / NUM_PICKS
    return times | {"predicted_hit": round(hit, 3)}


def event_times(index: KVIndex) -> dict[str, float]:
    """A batch of four new blocks, and their removal."""
    rng = random.Random(4)
    tokens = [[rng.randrange(50_000) for _ in range(4 * SIZE)] for _ in range(1000)]
    named = [list[int | bytes](block_hashes(root_hash([]), each, SIZE)) for each in tokens]

    def batch(number: int) -> None:
        index.apply(0, [BlockStored(named[number], None, tokens[number], SIZE, [[], [], [], []])])
        index.apply(0, [BlockRemoved(named[number])])

    return timed(1000, batch)


def prompt_times(model: str, num_tokens: int) -> dict[str, float]:
    """From the body of a chat to the blocks of its prompt."""
    from quire.server.prompt_reader import PromptReader

    reader = PromptReader.load(model)
    words = [
        "The",
        "lighthouse",
        "keeper",
        "counted",
        "the",
        "ships",
        "that",
        "passed",
        "in",
        "the",
        "night",
        "and",
        "wrote",
        "them",
        "into",
        "a",
        "book.",
    ]
    rng = random.Random(5)
    bodies = []
    for _ in range(200):
        text = " ".join(rng.choice(words) for _ in range(num_tokens * 3 // 4))
        messages = [{"role": "user", "content": text}]
        bodies.append(json.dumps({"model": "m", "messages": messages}).encode())
    return timed(200, lambda number: block_hashes(0, reader.ids("/v1/chat/completions", bodies[number]), SIZE))


def make_workers(count: int) -> list[Worker]:
    async def made() -> list[Worker]:
        entries = [WorkerEntry(url=f"http://h{number}:1", models=["m"]) for number in range(count)]
        return [Worker(entry, Faults(), bit) for bit, entry in enumerate(entries)]

    return asyncio.run(made())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=100_000, help="of one worker")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    args = parser.parse_args()
    index = KVIndex(args.blocks + CONVERSATION)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = fill(index, args.workers, args.blocks, random.Random(2))
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    gc.collect()
    gc.freeze()
    workers = make_workers(args.workers)
    pick = pick_times(index, workers, held, args.tokens)
    events = event_times(index)
    prompt = prompt_times(args.model, args.tokens)
    num_blocks = sum(index.num_blocks(worker) for worker in range(args.workers))
    print(f"{args.workers} workers, {num_blocks:,} blocks, {len(index.holders):,} different, {megabytes:,.0f} MB")
    print(f"a pick                      {pick['p50']:8.1f} us  (p99 {pick['p99']:.1f}; {AIM:.0f} is the aim)")
    print(f"four blocks come and go     {events['p50']:8.1f} us  (p99 {events['p99']:.1f})")
    print(f"tokens of {args.tokens:5d}-token prompt {prompt['p50']:8.1f} us  (p99 {prompt['p99']:.1f})")
    figures = {"pick": pick, "events": events, "prompt": prompt, "megabytes": round(megabytes), "blocks": num_blocks}
    print(json.dumps({"benchmark": "gateway_kv_index", "machine": describe(), **vars(args), **figures}))


if __name__ == "__main__":
    main()
