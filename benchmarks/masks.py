"""What answers in a language add to a step: CPU time of masks and of taking in tokens, beside the rest of the step.

    python -m benchmarks.masks                   # 32 users, the default model
    python -m benchmarks.masks --users 8 --tokens 128

CPU time is counted, of all threads, so that others at work on this machine disturb little. Masks are made by one
thread while the others wait: their share of a step's time is their CPU time x threads / the CPU time of the step.

Each language is used by all users twice: what the first answers find out about it, the later ones know.

With fewer --threads than CPUs they are made beside the forward pass, and nobody waits: only the time of a step by the
clock tells what they cost then, beside that of a step without a language."""

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.machine import describe
from quire import LLM, SamplingParams
from quire.client.generate_request import GenerateRequest
from quire.core.structured import Structured
from quire.ops.native.cpus import available_cpus
from quire.runtime.structured_output import StructuredOutputRows

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        "story": {"type": "string", "minLength": 400},
    },
    "required": ["name", "age", "hobbies", "story"],
}
LANGUAGES = {
    "none": None,
    "schema": Structured("json_schema", json.dumps(PERSON)),
    "free JSON": Structured("json_schema", '{"type": "object", "minProperties": 40}'),  # or else it is soon `{}`
    "regex": Structured("regex", "([A-Z][a-z]+ )*"),
    "dates": Structured("regex", r"(\d{4}-\d{2}-\d{2} )*"),
    "mail": Structured("regex", r"([a-z0-9.]+@[a-z0-9]+\.(com|org|net), )*"),
    "list": Structured("regex", r"(- [^\n]+\n)*"),
    "CSV": Structured("regex", r"([^,\n]+(,[^,\n]+){3}\n)*"),
    "grammar": Structured("grammar", 'root ::= word ("," word)*\nword ::= [a-z]+'),
    "200 words": Structured("regex", "([A-Z][a-z]{1,12} ){200}"),  # counting is dear
}


class Meter:
    """Of the thread that asks for masks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        StructuredOutputRows.masks = self._timed(StructuredOutputRows.masks)  # type: ignore[method-assign]
        StructuredOutputRows.advance = self._timed(StructuredOutputRows.advance)  # type: ignore[method-assign]

    def _timed(self, work: Any) -> Any:
        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return work(*args)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def steps(
    llm: LLM, meter: Meter, structured: Structured | None, users: range, tokens: int
) -> list[tuple[float, float, float]]:
    """Of whole steps in which at least half of the users draw: CPU seconds, those of their masks, and seconds by the
    clock; all for all users."""
    params = [
        SamplingParams(temperature=1.0, seed=user, max_tokens=tokens, ignore_eos=True, structured=structured)
        for user in users
    ]
    live = [
        llm._submit(GenerateRequest(id=str(user), prompt=f"Person {user}:", params=wants))
        for user, wants in zip(users, params, strict=True)
    ]
    by_id = {one.request.id: one for one in live}
    found = []
    while not all(one.finished for one in live):
        cpu, masks, clock = time.process_time(), meter.seconds, time.perf_counter()
        llm._step(by_id)
        record = llm.engine.record
        if record and record.num_tokens == record.num_drawn >= len(users) / 2:
            share = len(users) / record.num_drawn
            taken = time.process_time() - cpu, meter.seconds - masks, time.perf_counter() - clock
            found.append((taken[0] * share, taken[1] * share, taken[2] * share))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=512, max_num_seqs=args.users, threads=args.threads)
    meter, result = Meter(), {}
    for structured in LANGUAGES.values():
        steps(llm, meter, structured, range(args.users), 4)  # compiled, and met for the first time
    for name, structured in LANGUAGES.items():
        for which in ("first", "later"):
            users = range(args.users) if which == "first" else range(args.users, 2 * args.users)
            found = steps(llm, meter, structured, users, args.tokens)
            step, masks, clock = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
            share = masks * args.threads / (step + masks * (args.threads - 1))
            result[f"{name}, {which}"] = {
                "step ms": round(step, 1),
                "masks ms": round(masks, 2),
                "clock ms": round(clock, 1),
                "steps": len(found),
                "share": round(share, 4),
            }
            beside = args.threads < available_cpus()
            told = "beside the forward pass" if beside else f"{share:.1%} of its time"
            print(
                f"{name:10} {which}: {step:7.1f} ms of CPU a step, masks {masks:5.2f} ms, {told}; "
                f"{clock:7.1f} ms by the clock",
                flush=True,
            )
    print(json.dumps({"benchmark": "masks", "machine": describe(), **vars(args), "languages": result}))


if __name__ == "__main__":
    main()
