"""Conversations with a hybrid: whether late turns are as quick as early ones, and how much of its prompts is cached.

    python -m benchmarks.turns [--turns 20] [--rounds 3] [--only turns|hits]

turns  a hybrid of random weights (9 gated delta nets, 3 attention layers): one conversation, each turn 400 tokens of a
       user and 100 of the model; the time of the last turn over that of the second
hits   prompt tokens that need not be computed, of a hybrid beside the same model with attention in every layer, in the
       same bytes (the layers of Qwen3-Next 80B-A3B; nothing is computed): conversations in turns, and prompts with
       prefixes in common; in memory for a quarter of what the attention model would keep of the trace, for half and for
       all of it

Prints tables and ends in one line of JSON."""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.models.config import ModelConfig
from quire.models.registry import family, read_model_config
from quire.runtime.kv import kv_spec, size_cache
from quire.weights.config import CheckpointConfig

USER_TOKENS, ANSWER_TOKENS = 400, 100  # of a turn
BLOCK_SIZE = 16
COMMON = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
SMALL = COMMON | {  # 0.1 billion weights
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
QWEN3_NEXT = COMMON | {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


# ---- turns


def turn_seconds(folder: str, turns: int, seed: int) -> tuple[list[float], int]:
    """Of each turn, and the cached tokens of the last."""
    options = EngineOptions(load_format="dummy", max_num_seqs=4, device="cpu")
    engine = Engine(new_executor(Path(folder), options), options)
    rng, seconds, cached, prompt = random.Random(seed), [], 0, list[int]()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, temperature=0, seed=0)
    for turn in range(turns):
        prompt += [rng.randrange(100, 30_000) for _ in range(USER_TOKENS)]
        began = perf_counter()
        engine.submit(Request(id=f"turn {turn}", prompt_ids=prompt[:], params=params))
        while engine.has_work:
            for event in engine.step():
                prompt += event.tokens
                cached = event.num_cached
        seconds.append(perf_counter() - began)
    engine.stop()
    return seconds, cached


def turns(count: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        measured = [turn_seconds(folder, count, seed) for seed in range(rounds)]
    by_turn = [median(seconds[turn] for seconds, _ in measured) for turn in range(count)]
    ratio = median(seconds[-1] / seconds[1] for seconds, _ in measured)
    print(f"{'turn':>5} {'context':>8} {'seconds':>8}")
    for turn in sorted({1, 2, 4, 9, count - 1} & {*range(count)}):
        print(f"{turn + 1:>5} {(turn + 1) * (USER_TOKENS + ANSWER_TOKENS):>8} {by_turn[turn]:>8.3f}")
    print(f"turn {count} takes {ratio:.2f} times turn 2; {measured[0][1]} tokens of its prompt were cached")
    return {"seconds": by_turn, "last_over_second": ratio, "cached_of_last": measured[0][1]}


# ---- hits


@dataclass(slots=True)
class Asked:
    prompt: list[int]
    answer: list[int]


def conversations(seed: int = 0, users: int = 24, count: int = 8) -> Iterator[Asked]:
    """Users take turns at random."""
    rng = random.Random(seed)
    histories = [[10 + user] for user in range(users)]
    order = [user for user in range(users) for _ in range(count)]
    rng.shuffle(order)
    for user in order:
        histories[user] += [rng.randrange(1000, 90_000) for _ in range(USER_TOKENS)]
        asked = Asked(histories[user][:], [rng.randrange(1000, 90_000) for _ in range(ANSWER_TOKENS)])
        yield asked
        histories[user] += asked.answer


def common_prefixes(seed: int = 0, prefixes: int = 12, count: int = 240) -> Iterator[Asked]:
    """System prompts of 300 to 3,000 tokens, some more often than others, each with a question of its own."""
    rng = random.Random(seed)
    systems = [[rng.randrange(1000, 90_000) for _ in range(rng.randrange(300, 3000))] for _ in range(prefixes)]
    weights = [1 / (1 + rank) for rank in range(prefixes)]
    for _ in range(count):
        [system] = rng.choices(systems, weights)
        question = [rng.randrange(1000, 90_000) for _ in range(rng.randrange(20, 200))]
        yield Asked(system + question, [rng.randrange(1000, 90_000) for _ in range(40)])


TRACES = {"conversations": conversations, "common prefixes": common_prefixes}


def hit_tokens(config: ModelConfig, num_bytes: int, trace: list[Asked]) -> int:
    """One request after the other: a scheduler plans it, and nothing is computed."""
    spec = kv_spec(config, BLOCK_SIZE, "float16")
    given = {"max_model_len": 16_384, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    size = size_cache(config, spec, **given, cache_bytes=num_bytes, max_bytes=num_bytes)
    limits = SchedulerLimits(**given, block_size=BLOCK_SIZE, has_states=config.has_states)
    scheduler = Scheduler(limits, size.num_blocks, num_slots=size.num_slots)
    for number, asked in enumerate(trace):
        params = SamplingParams(max_tokens=len(asked.answer), ignore_eos=True, seed=0)
        scheduler.add(Request(id=str(number), prompt_ids=asked.prompt, params=params), 0.0)
        answer = iter(asked.answer)
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.update(_sampled(plan, scheduler, answer))
    return scheduler.stats().prefix_hits


def _sampled(plan: StepPlan, scheduler: Scheduler, answer: Iterator[int]) -> StepOutput:
    """The next token of the trace, where a run reaches the last known one."""
    [run] = plan.runs
    ends = run.start + run.count == scheduler.rows[run.row].num_known
    return StepOutput(plan.step, [SampledRow(run.row, [next(answer)])] if ends else [])


def hits() -> dict[str, Any]:
    hybrid, attention = (_config(QWEN3_NEXT | kinds) for kinds in ({}, {"layer_types": ["full_attention"] * 48}))
    token_bytes = kv_spec(attention, BLOCK_SIZE, "float16").block_bytes // BLOCK_SIZE
    results: dict[str, Any] = {}
    print(f"\n{'trace':<16} {'memory':>9} {'prompt tokens':>14} {'attention':>10} {'hybrid':>10} {'ratio':>6}")
    for name, make in TRACES.items():
        trace = list(make())
        whole = _distinct_tokens(trace) * token_bytes
        least = 2 * 16_384 * token_bytes  # for two of the longest sequences
        for num_bytes in sorted({max(int(whole * share), least) for share in (0.25, 0.5, 1.0)}):
            found = [hit_tokens(config, num_bytes, trace) for config in (attention, hybrid)]
            num_tokens, ratio = sum(len(asked.prompt) for asked in trace), found[1] / max(found[0], 1)
            memory = f"{num_bytes / 2**30:.1f} GiB"
            print(f"{name:<16} {memory:>9} {num_tokens:>14} {found[0]:>10} {found[1]:>10} {ratio:>6.3f}")
            results[f"{name}, {memory}"] = {
                "bytes": num_bytes,
                "attention": found[0],
                "hybrid": found[1],
                "ratio": ratio,
            }
    return results


def _config(fields: dict[str, Any]) -> ModelConfig:
    [name] = fields["architectures"]
    return read_model_config(family(name), CheckpointConfig(Path("config.json"), fields))


def _distinct_tokens(trace: list[Asked]) -> int:
    """In blocks that are kept once."""
    blocks = {
        tuple(tokens[: (index + 1) * BLOCK_SIZE])
        for tokens in ([*asked.prompt, *asked.answer] for asked in trace)
        for index in range(len(tokens) // BLOCK_SIZE)
    }
    return len(blocks) * BLOCK_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("turns", "hits"))
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.only != "hits":
        results["turns"] = turns(given.turns, given.rounds)
    if given.only != "turns":
        results["hits"] = hits()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
