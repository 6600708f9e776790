"""Conversations with a hybrid: whether late turns are as quick as early ones, and how much of its prompts is cached.

    python -m benchmarks.turns [--turns 20] [--rounds 3] [--only turns|hits]
    python -m benchmarks.turns --only turns --state-checkpoint-dtype int8

turns  a hybrid of random weights (9 gated delta nets, 3 attention layers): one conversation, each turn 400 tokens of a
       user and 100 of the model; the time of the last turn over that of the second, of prompts and of answers as well.
       The attention layers read more in each turn: `attention` is what they add to the multiplications of a prompt, and
       to the bytes that are read for a token of an answer
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
from quire.ops.kv_spec import CHECKPOINT_DTYPES
from quire.planning.packed_bytes import NativeFormat
from quire.planning.planned_model import plan_model
from quire.planning.shape_checkpoint import shape_checkpoint
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


@dataclass(slots=True)
class Turn:
    context: int
    prompt: float  # seconds until the first token
    answer: float  # seconds of the others
    num_cached: int

    @property
    def seconds(self) -> float:
        return self.prompt + self.answer


def conversation(folder: str, turns: int, seed: int, dtype: str) -> list[Turn]:
    options = EngineOptions(load_format="dummy", max_num_seqs=4, device="cpu", state_checkpoint_dtype=dtype)
    engine = Engine(new_executor(Path(folder), options), options)
    rng, done, prompt = random.Random(seed), [], list[int]()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, temperature=0, seed=0)
    for turn in range(turns):
        prompt += [rng.randrange(100, 30_000) for _ in range(USER_TOKENS)]
        began = perf_counter()
        engine.submit(Request(id=f"turn {turn}", prompt_ids=prompt[:], params=params))
        first, cached = 0.0, 0
        while engine.has_work:
            for event in engine.step():
                first = first or perf_counter()
                prompt += event.tokens
                cached = event.num_cached
        done.append(Turn(len(prompt), first - began, perf_counter() - first, cached))
    engine.stop()
    return done


def attention_shares(context: int) -> tuple[float, float]:
    """What attention adds to the multiplications of a prompt, and to the bytes that are read for a token of an answer:
    the share of those of the weights."""
    model = plan_model("small", shape_checkpoint(CheckpointConfig(Path("config.json"), SMALL)), NativeFormat())
    config, kv = model.config, model.kv_spec("float16")
    multiplied = model.num_parameters - config.vocab * config.hidden
    pairs = 2 * config.kv_layers * config.heads * config.head_dim * (context - ANSWER_TOKENS - USER_TOKENS / 2)
    return pairs / multiplied, kv.kv_bytes / kv.block_size * context / model.weight_bytes


def turns(count: int, rounds: int, dtype: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        measured = [conversation(folder, count, seed, dtype) for seed in range(rounds)]
    shown = sorted({1, 2, 4, 9, count - 1} & {*range(count)})
    medians = {
        part: [median(getattr(done[turn], part) for done in measured) for turn in range(count)]
        for part in ("seconds", "prompt", "answer")
    }
    ratios = {part: median(getattr(done[-1], part) / getattr(done[1], part) for done in measured) for part in medians}
    print(f"{'turn':>5} {'context':>8} {'seconds':>8} {'prompt':>8} {'answer':>8} {'attention':>12}")
    for turn in shown:
        context = (turn + 1) * (USER_TOKENS + ANSWER_TOKENS)
        parts = " ".join(f"{medians[part][turn]:>8.3f}" for part in medians)
        added = " ".join(f"{share:>+6.0%}" for share in attention_shares(context))
        print(f"{turn + 1:>5} {context:>8} {parts} {added}")
    cached = measured[0][-1].num_cached
    print(
        f"turn {count} takes {ratios['seconds']:.2f} times turn 2 (its prompt {ratios['prompt']:.2f}, its answer "
        f"{ratios['answer']:.2f}); {cached} tokens of its prompt were cached"
    )
    shares = {turn + 1: attention_shares((turn + 1) * (USER_TOKENS + ANSWER_TOKENS)) for turn in shown}
    parts = {"prompt": medians["prompt"], "answer": medians["answer"], "ratios": ratios, "attention": shares}
    return {"seconds": medians["seconds"], "last_over_second": ratios["seconds"], "cached_of_last": cached, **parts}


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


def hit_tokens(config: ModelConfig, num_bytes: int, trace: list[Asked], dtype: str) -> int:
    """One request after the other: a scheduler plans it, and nothing is computed."""
    spec = kv_spec(config, BLOCK_SIZE, "float16", checkpoint_dtype=dtype)
    given = {"max_model_len": 16_384, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    size = size_cache(config, spec, **given, cache_bytes=num_bytes, max_bytes=num_bytes)
    limits = SchedulerLimits(**given, block_size=BLOCK_SIZE, has_states=config.has_states)
    slots = {"num_slots": size.num_slots, "num_checkpoint_slots": size.num_checkpoint_slots}
    scheduler = Scheduler(limits, size.num_blocks, **slots)
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


def hits(dtype: str) -> dict[str, Any]:
    hybrid, attention = (_config(QWEN3_NEXT | kinds) for kinds in ({}, {"layer_types": ["full_attention"] * 48}))
    token_bytes = kv_spec(attention, BLOCK_SIZE, "float16").block_bytes // BLOCK_SIZE
    results: dict[str, Any] = {}
    print(f"\n{'trace':<16} {'memory':>9} {'prompt tokens':>14} {'attention':>10} {'hybrid':>10} {'ratio':>6}")
    for name, make in TRACES.items():
        trace = list(make())
        whole = _distinct_tokens(trace) * token_bytes
        least = 2 * 16_384 * token_bytes  # for two of the longest sequences
        for num_bytes in sorted({max(int(whole * share), least) for share in (0.25, 0.5, 1.0)}):
            found = [hit_tokens(config, num_bytes, trace, dtype) for config in (attention, hybrid)]
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
    parser.add_argument("--state-checkpoint-dtype", choices=CHECKPOINT_DTYPES, default="float32")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.only != "hits":
        results["turns"] = turns(given.turns, given.rounds, given.state_checkpoint_dtype)
    if given.only != "turns":
        results["hits"] = hits(given.state_checkpoint_dtype)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
