"""What drafts give: tokens a second with and without, for texts that repeat what was said and for one that does not.

    python -m benchmarks.speculation                       # the default model, one sequence and eight
    python -m benchmarks.speculation --spec-method suffix
    python -m benchmarks.speculation --spec-method suffix,draft_model --draft-model qwen2.5-0.5b --model qwen2.5-1.5b
    python -m benchmarks.speculation --model ./1.5b.gguf --texts code "open chat" --kv-cache-memory-bytes 268435456 \
        --speculative-config '{"method": "draft_model", "model": "./0.5b.gguf", "num_speculative_tokens": 2, \
        "num_speculative_tokens_per_batch_size": [[1, 8, 2]]}'
    python -m benchmarks.speculation --speculative-config '{"method": "ngram", "num_speculative_tokens": 3, \
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.9}'
    python -m benchmarks.speculation --tokens 96 --rounds 1 --texts story
    python -m benchmarks.speculation --model ./1.5b.gguf --acceptance-only \
        --speculative-config '{"model": "./0.5b.gguf"}'

Both engines are in this process and take turns; a figure is the median of the rounds. Times are those of decoding: from
a request's first token to its last. Answers are compared, too, unless acceptance is synthetic. Every round has prompts
and seeds of its own, and what was answered in the rounds before is what `suffix` may find. With `--acceptance-only`
there is one engine and no speed: what is accepted does not depend on what else the machine does.

Where a model drafts, `planned` is the gain that the planner's formula gives for the acceptance that was measured and as
many drafts in every step, and `best` that with the best number of them (`quire plan --draft-model`). To compare the
first with `times`, let `num_speculative_tokens_per_batch_size` fix the number; else drafts that do not pay are rare."""

import argparse
import json
import statistics
from dataclasses import dataclass

from benchmarks.machine import describe
from quire import LLM, SamplingParams
from quire.cli.planning_flags import THIS, count_model, hardware_called
from quire.core.acceptance import expected_tokens
from quire.core.structured import Structured
from quire.planning.drafting import Draft
from quire.planning.hardware import kv_dtype_on
from quire.planning.memory import EngineLimits, Load
from quire.planning.plan import Setup
from quire.planning.planner import make_plan
from quire.planning.speculation import SpeculationTable

PASSAGE = (
    "A quire is a gathering of sheets folded once and laid one inside the other, so that they can be sewn through the "
    "fold. Four sheets make eight leaves, and eight leaves make sixteen pages. Scribes ruled them before they wrote "
    "and numbered the quires so that the binder could put them in order."
)
CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def sub(self, other):
        return Point(self.x - other.x, self.y - other.y)

    def mul(self, other):
        return Point(self.x * other.x, self.y * other.y)

    def"""
PROMPT_TOKENS = 128  # about as many as the prompts have
QUESTIONS = [
    "How do I keep bread fresh for longer?",
    "What should I see in Lisbon in two days?",
    "Explain how a bicycle stays upright.",
    "Write a short letter to a neighbour about a broken fence.",
    "What are good habits for learning a language?",
    "Why is the sky red in the evening?",
    "How can a small shop find more customers?",
    "What is the difference between a virus and a bacterium?",
    "Give me a plan for a week of simple dinners.",
    "How does a refrigerator work?",
    "What did people trade along the Silk Road?",
    "How do I ask my manager for a day off?",
]
PEOPLE = {
    "type": "array",
    "minItems": 12,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "city": {"type": "string", "maxLength": 12},
        },
        "required": ["name", "age", "city"],
    },
}

CALLS = {
    "type": "array",
    "minItems": 8,
    "items": {
        "type": "object",
        "properties": {
            "tool": {"enum": ["search_files", "read_file", "run_command"]},
            "arguments": {
                "type": "object",
                "properties": {
                    "path": {"enum": ["src/main.py", "src/parser.py", "tests/test_parser.py", "README.md"]},
                    "max_results": {"type": "integer", "minimum": 1, "maximum": 9},
                    "case_sensitive": {"type": "boolean"},
                },
                "required": ["path", "max_results", "case_sensitive"],
                "additionalProperties": False,
            },
        },
        "required": ["tool", "arguments"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Text:
    prompt: str
    temperature: float = 0.0
    structured: Structured | None = None

    def numbered(self, number: int, user: int) -> str:
        """The prompt of that user in that round: no two are the same."""
        question = QUESTIONS[(number + 5 * user) % len(QUESTIONS)]
        return f"{number}.{user + 1} {self.prompt}".replace("{question}", question)


TEXTS = {
    "copied text": Text(f"{PASSAGE}\n\n{PASSAGE}\n\n"),
    "code": Text(CODE),
    "JSON in a schema": Text(
        "People, as JSON with name, age and city:\n", 0.7, Structured("json_schema", json.dumps(PEOPLE))
    ),
    "agent turns": Text(
        "The calls of the next turn, as JSON with tool and arguments:\n",
        0.7,
        Structured("json_schema", json.dumps(CALLS)),
    ),
    "open chat": Text("\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"),
    "story": Text("Once upon a time, in a village by the sea, there lived an old man who", 0.8),
}


SPEEDS = {"without": "8.1f", "with": "8.1f", "times": "6.2f"}  # columns


@dataclass
class Round:
    rate: float  # tokens a second, of all sequences
    answers: list[list[int]]
    verifications: int
    drafts: int
    accepted: int


def run(llm: LLM, text: Text, users: int, tokens: int, number: int) -> Round:
    before = llm.engine.stats()
    params = [
        SamplingParams(
            temperature=text.temperature,
            seed=100 * number + user,
            max_tokens=tokens,
            ignore_eos=True,
            structured=text.structured,
        )
        for user in range(users)
    ]
    outputs = llm.generate([text.numbered(number, user) for user in range(users)], params)
    records = [output.metrics for output in outputs]
    firsts = [record.first_token for record in records if record and record.first_token is not None]
    lasts = [record.last_token for record in records if record and record.last_token is not None]
    answers = [output.outputs[0].token_ids for output in outputs]
    after = llm.engine.stats()
    return Round(
        (sum(map(len, answers)) - users) / (max(lasts) - min(firsts)),
        answers,
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def compare(
    engines: tuple[LLM, LLM], text: Text, users: int, tokens: int, rounds: int, exact: bool
) -> dict[str, float]:
    for llm in engines:
        run(llm, text, users, tokens, 0)  # languages are compiled, and something was answered
    found: list[tuple[Round, Round]] = []
    for number in range(1, rounds + 1):
        order = engines if number % 2 == 0 else engines[::-1]
        one, other = (run(llm, text, users, tokens, number) for llm in order)
        found.append((one, other) if number % 2 == 0 else (other, one))
    same = all(plain.answers == drafted.answers for plain, drafted in found)
    assert same or not exact, "drafts have changed an answer"
    plain, drafted = (statistics.median(each.rate for each in column) for column in zip(*found, strict=True))
    speeds = {"without": round(plain, 1), "with": round(drafted, 1), "times": round(drafted / plain, 3)}
    return speeds | acceptance([each for _, each in found])


def acceptance(found: list[Round]) -> dict[str, float]:
    verifications, drafts, accepted = (
        sum(getattr(each, name) for each in found) for name in ("verifications", "drafts", "accepted")
    )
    num_tokens = sum(len(answer) for each in found for answer in each.answers)
    return {
        "drafts a token": round(drafts / num_tokens, 3),
        "accepted": round(accepted / drafts, 3) if drafts else 0.0,
        "tokens of drafts": round(accepted / num_tokens, 3),
        "length": round(1 + accepted / verifications, 3) if drafts else 1.0,
        "drafts a step": round(drafts / verifications, 2) if drafts else 0.0,
    }


def acceptance_of(length: float, num_drafts: float) -> float:
    """The rate at which each of so many drafts is accepted, where those before it are, for steps of this length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, num_drafts) < length else (low, middle)
    return low


def planned(model: str, draft: str, num_tokens: int, users: int, tokens: int) -> SpeculationTable:
    """What drafts of a model gain, as the planner has it for this machine."""
    hardware = hardware_called(THIS)
    target, small = (count_model(name, hardware) for name in (model, draft))
    kv, small_kv = (one.kv_spec(kv_dtype_on(hardware, "auto")) for one in (target, small))
    load = Load(users=users, context=PROMPT_TOKENS + tokens, prompt=PROMPT_TOKENS, output=tokens)
    limits = EngineLimits(threads=hardware.threads, num_drafts=num_tokens)
    setup = Setup(hardware=hardware, limits=limits, eight_bit=not hardware.is_gpu)
    return make_plan(target, kv, load, setup, Draft(small, small_kv, num_tokens)).speculation


def beside_the_plan(found: dict[str, float], table: SpeculationTable) -> dict[str, float]:
    """The planner's gains for the acceptance that was measured: with as many drafts, and with the best number."""
    if not found["drafts a step"]:
        return {}
    rate = acceptance_of(found["length"], found["drafts a step"])
    as_many = min(table.verify_costs, key=lambda k: abs(k - found["drafts a step"]))
    num_drafts, best = table.best(rate)
    return {
        "acceptance": round(rate, 3),
        "planned": round(table.speedup(rate, as_many), 3),
        "best planned": round(best, 3),
        "best drafts": num_drafts,
    }


def config_of(args: argparse.Namespace) -> dict[str, object]:
    given = {"method": args.spec_method, "num_speculative_tokens": args.spec_tokens, "model": args.draft_model}
    return {key: value for key, value in given.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--spec-method", default="ngram")
    parser.add_argument("--spec-tokens", type=int)
    parser.add_argument("--draft-model", help="of the method draft_model")
    parser.add_argument("--speculative-config", type=json.loads, metavar="JSON", help="instead of these")
    parser.add_argument("--acceptance-only", action="store_true", help="with drafts only, and no speed")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="of each engine; as the machine has room")
    args = parser.parse_args()
    common = {"max_model_len": 2048, "max_num_seqs": max(args.users), "threads": args.threads}
    common["kv_cache_memory_bytes"] = args.kv_cache_memory_bytes
    drafting = LLM(args.model, **common, speculative_config=args.speculative_config or config_of(args))
    speculation = drafting.options.speculation
    assert speculation is not None
    exact = not speculation.synthetic_rates
    plain = None if args.acceptance_only else LLM(args.model, **common)
    result: dict[str, dict[str, dict[str, float]]] = {}
    plans: dict[int, SpeculationTable] = {}
    if "draft_model" in speculation.method:
        given = args.model, speculation.model, speculation.num_tokens
        plans = {users: planned(*given, users, args.tokens) for users in args.users}
    head = f"{'text':18} {'sequences':>9} {'without':>8} {'with':>8} {'times':>6} {'accepted':>9} {'of tokens':>10}"
    print(head + (f" {'planned':>8} {'best':>6}" if plans else ""))
    for name in args.texts:
        for users in args.users:
            if plain is None:
                rounds = range(1, args.rounds + 1)
                found = acceptance([run(drafting, TEXTS[name], users, args.tokens, number) for number in rounds])
            else:
                found = compare((plain, drafting), TEXTS[name], users, args.tokens, args.rounds, exact)
            result.setdefault(name, {})[str(users)] = found
            speeds = "".join(
                f" {found[key]:{width}}" if key in found else f" {'-':>{width[0]}}" for key, width in SPEEDS.items()
            )
            line = f"{name:18} {users:9}{speeds} {found['accepted']:9.0%} {found['tokens of drafts']:10.0%}"
            if users in plans and (plan := beside_the_plan(found, plans[users])):
                found |= plan
                line += f" {plan['planned']:8.2f} {plan['best planned']:6.2f} with {plan['best drafts']}"
            print(line, flush=True)
    print(json.dumps({"benchmark": "speculation", "machine": describe(), **vars(args), "texts": result}))


if __name__ == "__main__":
    main()
