"""How much of public JSON schemas can be followed, how exactly, and what it takes.

    python -m benchmarks.structured                          # Quire, the default model's vocabulary
    python -m benchmarks.structured --library xgrammar       # where that is installed
    python -m benchmarks.structured --tokenizer FOLDER --walks 0
    git clone https://github.com/guidance-ai/jsonschemabench && \\
    python -m benchmarks.structured --jsonschemabench jsonschemabench --sets jsonschemabench --walks 0

For every schema that is supported, answers are drawn at random under the masks, without a model: that goes into more
corners than a model does. Each that ends is validated with `jsonschema`. Where a set has instances, it is also looked
up which of them the grammar accepts: a schema is fully right if it is supported, takes every valid instance, and takes
no invalid one. A schema is handled in a process of its own. Times are of the CPU."""

import argparse
import json
import os
import re
import select
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np

from benchmarks.machine import describe
from benchmarks.processes import progress
from benchmarks.schemas import Case, json_schema_bench, schemastore, test_suite
from quire.core.errors import QuireError
from quire.core.structured import Structured
from quire.hub import resolve_model
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer

SECONDS = 60  # for one schema, by the clock
TOKENS = 400  # of a walk at most


class Refused(Exception):
    """This schema is not supported."""


class Follower(Protocol):
    """Where an answer stands."""

    def mask(self) -> bytes: ...

    def advance(self, token: int) -> bool: ...


class Library(Protocol):
    def compile(self, schema: Any) -> Any:
        """Raises Refused."""

    def follow(self, compiled: Any) -> Follower: ...


class Quire:
    def __init__(self, tokenizer: Tokenizer, vocab: int, closed: bool = False) -> None:
        self._closed = closed
        self._grammars = GrammarCompiler(lambda: tokenizer, vocab)
        self._grammars.compile(Structured("json"))

    def compile(self, schema: Any) -> Structured:
        try:
            text = json.dumps(schema)
            structured = Structured("json_schema", text, disable_additional_properties=self._closed)
            self._grammars.compile(structured)
        except QuireError as error:
            raise Refused(error.message.partition(": ")[2] or error.message) from None
        return structured

    def follow(self, compiled: Structured) -> Follower:
        return _QuireFollower(self._grammars, compiled)


class _QuireFollower:
    def __init__(self, grammars: GrammarCompiler, structured: Structured) -> None:
        self._matcher = grammars.matcher(structured)

    def mask(self) -> bytes:
        return b"" if self._matcher.error else self._matcher.mask()

    def advance(self, token: int) -> bool:
        return self._matcher.advance([token])


class XGrammar:
    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        import xgrammar

        self._xgrammar, self.vocab = xgrammar, vocab
        spellings = [tokenizer.token_bytes(token) for token in range(vocab)]
        info = xgrammar.TokenizerInfo(
            spellings, xgrammar.VocabType.RAW, vocab_size=vocab, stop_token_ids=list(tokenizer.eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any) -> Any:
        try:
            return self._compiler.compile_json_schema(json.dumps(schema))
        except RuntimeError as error:
            raise Refused(str(error).strip().splitlines()[-1]) from None

    def follow(self, compiled: Any) -> Follower:
        return _XGrammarFollower(self._xgrammar, compiled, self.vocab)


class _XGrammarFollower:
    def __init__(self, xgrammar: Any, compiled: Any, vocab: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab)

    def mask(self) -> bytes:
        if not self._matcher.fill_next_token_bitmask(self._bits):
            self._bits.fill_(-1)  # everything may follow
        return bytes(self._bits.numpy())

    def advance(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


LIBRARIES: dict[str, Any] = {"quire": Quire, "xgrammar": XGrammar}


class Walker:
    """Draws answers: every token may come, but JSON's own signs come more often, and after a while those that end."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokenizer, self.vocab = tokenizer, vocab
        self.ends = sorted(tokenizer.eos_ids)
        spellings = [tokenizer.token_bytes(token) for token in range(vocab)]

        def those(*texts: bytes) -> Any:
            return np.array([spelling in texts for spelling in spellings], float)

        blank = np.array([not spelling.strip() for spelling in spellings])
        free = np.where(blank, 0.01, [4.0 if len(spelling) < 4 else 1.0 for spelling in spellings])
        ends = np.zeros(vocab)
        ends[self.ends] = 1.0
        signs = those(*(bytes([byte]) for byte in b'"{}[],:01-.e\\'))
        quote, closing = those(b'"'), those(b"}", b"]")
        self._early = free / free.sum() + 0.02 * signs + 0.2 * quote + 0.05 * closing + 0.1 * ends
        self._late = self._early + 5 * quote + 20 * closing + 50 * ends

    def bits(self, mask: bytes) -> Any:
        return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self.vocab]

    def walk(self, follower: Follower, chance: np.random.Generator, times: list[float]) -> tuple[str, str]:
        """-> the answer, and why it is over: done, long, or stuck."""
        tokens: list[int] = []
        for step in range(TOKENS):
            begin = time.thread_time()
            mask = follower.mask()
            times.append(time.thread_time() - begin)
            sums = np.cumsum((self._early if step < TOKENS * 0.3 else self._late) * self.bits(mask)) if mask else [0]
            if not sums[-1]:
                return self.tokenizer.decode(tokens), "stuck"
            token = int(np.searchsorted(sums, chance.random() * sums[-1], side="right"))
            if token in self.ends:
                return self.tokenizer.decode(tokens), "done"
            tokens.append(token)
            if not follower.advance(token):
                return self.tokenizer.decode(tokens), "stuck"
        return self.tokenizer.decode(tokens), "long"

    def accepts(self, follower: Follower, text: str) -> bool:
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            mask = follower.mask()
            if not mask or not self.bits(mask)[token] or not follower.advance(token):
                return False
        mask = follower.mask()
        return bool(mask and self.bits(mask)[self.ends].any())


def examine(library: Library, walker: Walker, case: Case, walks: int) -> dict[str, Any]:
    begin = time.process_time()
    try:
        compiled = library.compile(case.schema)
    except Refused as refusal:
        return {"refused": str(refusal)}
    found: dict[str, Any] = {"compile": time.process_time() - begin, "walks": Counter(), "wrong": []}
    times: list[float] = []
    kind = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)
    validator = kind(case.schema)
    for number in range(walks):
        text, end = walker.walk(library.follow(compiled), np.random.default_rng(number), times)
        found["walks"][end] += 1
        if end == "done" and (problem := _problem(validator, text)):
            found["wrong"].append(problem)
    for instance, valid in case.instances:
        accepted = walker.accepts(library.follow(compiled), json.dumps(instance))
        found.setdefault("instances", Counter())[
            f"{'valid' if valid else 'invalid'}, {'in' if accepted else 'out'}"
        ] += 1
    found["masks"] = times
    return found


def _problem(validator: Any, text: str) -> str | None:
    try:
        validator.validate(json.loads(text))
    except jsonschema.ValidationError as error:
        return f"{error.validator}: {error.message[:100]}"
    except ValueError as error:
        return f"not JSON: {error}"
    except Exception:  # a reference that leads nowhere: jsonschema cannot tell
        return None
    return None


def examine_apart(library: Library, walker: Walker, case: Case, walks: int) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            try:
                pipe.write(json.dumps(examine(library, walker, case, walks)))
            except RecursionError:
                pipe.write(json.dumps({"refused": "nested too deeply"}))
        os._exit(0)
    os.close(writer)
    text, deadline = b"", time.monotonic() + SECONDS
    while select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]:
        if not (part := os.read(reader, 1 << 20)):
            break
        text += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.waitpid(child, 0)
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except ValueError:
        return {"died": True}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    supported = [result for result in results if "compile" in result]
    reasons = Counter(_reason(result["refused"]) for result in results if "refused" in result)
    ends: Counter[str] = Counter()
    instances: Counter[str] = Counter()
    for result in supported:
        ends.update(result["walks"])
        instances.update(result.get("instances", {}))
    exact = [result for result in supported if not result["wrong"]]
    return {
        "schemas": len(results),
        "supported": len(supported),
        "died": sum("died" in result for result in results),
        "only valid answers": len(exact),
        "fully right": sum(map(_fully_right, supported)),
        "share of supported": round(len(exact) / max(len(supported), 1), 4),
        "walks": dict(ends),
        "instances": dict(instances),
        "compile ms": _spread([result["compile"] * 1e3 for result in supported]),
        "mask us": _spread([seconds * 1e6 for result in supported for seconds in result["masks"]]),
        "refused for": dict(reasons.most_common(12)),
        "wrong": Counter(result["wrong"][0].partition(":")[0] for result in supported if result["wrong"]),
    }


def _fully_right(result: dict[str, Any]) -> bool:
    return not result["wrong"] and not {"valid, out", "invalid, in"} & result.get("instances", {}).keys()


def _reason(text: str) -> str:
    """Without the names in it."""
    return re.sub(r" at `#.*?`|'[^']*'|https?://\S+|json-schema:\S+|/\S+/|\d+", "…", text)[:70]


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(max(values), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, default="quire")
    parser.add_argument(
        "--tokenizer", type=Path, help="a checkpoint, or a folder with tokenizer.json (default: smollm2)"
    )
    parser.add_argument("--vocab", type=int, help="tokens of the model (default: of the tokenizer)")
    parser.add_argument("--walks", type=int, default=4, help="answers drawn for each schema (default: 4)")
    parser.add_argument("--sets", nargs="+", choices=("schemastore", "test suite", "jsonschemabench"))
    parser.add_argument("--jsonschemabench", type=Path, help="a clone of guidance-ai/jsonschemabench")
    parser.add_argument("--count", type=int, default=600, help="schemas of JSONSchemaBench (default: 600)")
    parser.add_argument("--closed", action="store_true", help="Quire's objects have only the properties that are named")
    parser.add_argument("--details", type=Path, help="a file for a line of JSON a schema")
    parser.add_argument("--json", type=Path, help="a file for the result")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer or resolve_model("smollm2").path)
    vocab = args.vocab or tokenizer.vocab_size
    library = LIBRARIES[args.library](tokenizer, vocab, *([True] if args.closed else []))
    walker = Walker(tokenizer, vocab)
    result: dict[str, Any] = {"benchmark": "structured", "library": args.library, "vocab": vocab, "walks": args.walks}
    result["closed"] = args.closed
    result["machine"] = describe()
    sets: dict[str, Callable[[], list[Case]]] = {"schemastore": schemastore, "test suite": test_suite}
    if args.jsonschemabench:
        sets["jsonschemabench"] = lambda: json_schema_bench(args.jsonschemabench, args.count)
    for name in args.sets or sets:
        cases = sets[name]()
        progress(f"{name}: {len(cases)} schemas")
        results = [examine_apart(library, walker, case, args.walks) for case in cases]
        result[name] = summary(results)
        print(f"{name}\n" + "\n".join(f"  {key:20} {value}" for key, value in result[name].items()), flush=True)
        if args.details:
            with args.details.open("a") as file:
                for case, found in zip(cases, results, strict=True):
                    file.write(json.dumps({"set": name, "name": case.name, **found, "masks": None}) + "\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
