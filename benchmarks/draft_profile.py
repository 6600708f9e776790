"""Where the time of a step with drafts goes on a GPU: kernels, waits of the GPU for the host, and what the host does.

    python -m benchmarks.draft_profile [--sequences 1 8 64 256] [--quantization fp8] [--kernels 14] [--fixed]
    python -m benchmarks.draft_profile --tree-nodes 32 --sequences 1 8

The models and the acceptance of `benchmarks.speculation_gpu`, at one moment of an answer: all sequences decode, and
none ends. First steps are timed as they are, with events around what is queued; then the same engine's steps without
drafts; a few more steps run under torch.profiler. So the ratio here is that of a server whose sequences come and go,
without the end of a batch.

Prints tables and ends in one line of JSON."""

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import describe
from benchmarks.speculation_gpu import PROMPT, synthetic, write_head, write_target
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.runtime.spec.config import read_config

MAX_TOKENS = 1500  # of an answer: none ends
WARM_UP, TIMED, PROFILED = 30, 40, 6  # steps of each sequence
PLAIN_WARM_UP, PLAIN_TIMED = 14, 25  # without drafts: a head leaves a sequence alone after 8
MIN_GAP = 3.0  # microseconds between two kernels that are listed
HOST_PARTS = ("schedule", "submit", "wait", "collect", "update")
MARKER = "spin_kernel"  # of torch.cuda._sleep: what is queued behind it is another part


def new_engine(folder: Path, args: argparse.Namespace) -> Engine:
    most = max(args.sequences)
    config: dict[str, Any] = {
        "method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": args.drafts,
        **({"tree_nodes": args.tree_nodes} if args.tree_nodes else synthetic(args)),
    }  # fmt: skip
    if args.fixed or args.tree_nodes:
        config["num_speculative_tokens_per_batch_size"] = [[1, most, args.tree_nodes or args.drafts]]
    tokens = max(2048, 4 * most, 2 * (1 + args.tree_nodes) * most)
    executor = LocalExecutor(
        folder / "target",
        ExecutorOptions(
            backend="cuda", load_format="dummy", max_model_len=2048, max_num_seqs=most, max_num_batched_tokens=tokens,
            kv_cache_memory_bytes=32 << 30, quantization=args.quantization, speculation=read_config(json.dumps(config)),
        ),
    )  # fmt: skip
    return Engine(
        executor, EngineOptions(max_num_seqs=most, max_num_batched_tokens=tokens, enable_prefix_caching=False)
    )


class Probe:
    """What is noted of the steps of an engine, between `clear` and a look at it."""

    def __init__(self, engine: Engine) -> None:
        executor: Any = engine.executor
        runner, scheduler = executor.runner, engine._scheduler
        ((_, self.method),) = runner.proposer._methods
        self.marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # in the order of the stream
        self.host: dict[str, list[float]] = defaultdict(list)
        self.graphs: Counter[str] = Counter()
        self.drafts: Counter[int] = Counter()  # verified drafts of a sequence, by how many
        self.queued: list[str] = []  # parts, where they are marked in the stream
        self.is_profiled = False
        runner.program.run = self._on_device("target", runner.program.run)
        runner.sampler.verify = self._on_device("verify", runner.sampler.verify)
        runner.sampler.begin = self._on_device("sample", runner.sampler.begin)
        head = self.method._program
        head.chain.run = self._on_device("chain", head.chain.run)
        head.chain.grow = self._on_device("grow", head.chain.grow)
        head.chain.grow_behind = self._on_device("tree", head.chain.grow_behind)
        head.run = self._on_device("head", head.run)
        for name, program in (("target", runner.program), ("head", head)):
            program._graph_for = self._noting_graph(name, program._graph_for)
        LaunchGraphs.run = self._noting_launch(LaunchGraphs.run)  # type: ignore[method-assign]
        executor.submit, executor.collect = (
            self._timed("submit", self._noting_drafts(executor.submit)), self._timed("collect", executor.collect)
        )  # fmt: skip
        scheduler.schedule = self._timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update = self._timed("update", scheduler.update)  # type: ignore[method-assign]
        event: Any = torch.cuda.Event
        event.synchronize = self._timed("wait", event.synchronize)

    def clear(self) -> None:
        torch.cuda.synchronize()
        self.marks.clear()
        self.host.clear()
        self.graphs.clear()
        self.drafts.clear()
        self.queued.clear()

    def _on_device(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*given: Any) -> Any:
            if self.is_profiled:
                self.queued.append(name)
                torch.cuda._sleep(1)
                return call(*given)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = call(*given)
            end.record()
            self.marks.append((name, start, end))
            return result

        return marked

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            begin = time.perf_counter()
            result = call(*given)
            self.host[name].append(time.perf_counter() - begin)
            return result

        return timed

    def _noting_graph(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(batch: Any) -> Any:
            graph = call(batch)
            size = "op by op" if graph is None else f"graph of {graph.inputs.num_tokens}"
            self.graphs[f"{name}: {batch.num_tokens} tokens, {size}"] += 1
            return graph

        return noted

    def _noting_launch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(graphs: LaunchGraphs, key: Any, inputs: Any, launch: Any) -> Any:
            name = "chain" if graphs is self.method._program.chain._graphs else "sampler"
            self.graphs[f"{name}: {'replayed' if graphs.is_captured(key) else 'launched or captured'}"] += 1
            return call(graphs, key, inputs, launch)

        return noted

    def _noting_drafts(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def noted(plan: Any) -> None:
            for run in plan.runs:
                self.drafts[len(run.drafts)] += 1
            submit(plan)

        return noted

    def device_parts(self) -> dict[str, float]:
        """Milliseconds of each part, and of what lies between two, summed over all marks."""
        torch.cuda.synchronize()
        parts: dict[str, float] = defaultdict(float)
        last: tuple[str, torch.cuda.Event] | None = None
        for name, start, end in self.marks:
            parts[name] += start.elapsed_time(end)
            if last is not None:
                parts[f"{last[0]} -> {name}"] += max(last[1].elapsed_time(start), 0.0)
            last = name, end
        return dict(parts)


def run_steps(engine: Engine, count: int) -> tuple[float, int, int]:
    """-> seconds, steps and tokens until `count` steps with runs have ended"""
    torch.cuda.synchronize()
    begin, steps, tokens = time.perf_counter(), 0, 0
    while steps < count:
        engine.step()
        if engine.record is not None and engine.record.num_tokens:
            steps += 1
            tokens += engine.record.num_drawn
    torch.cuda.synchronize()
    return time.perf_counter() - begin, steps, tokens


@contextmanager
def answers(engine: Engine, sequences: int, name: str) -> Iterator[None]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
    ids = [f"{name}-{sequences}-{number}" for number in range(sequences)]
    for number, request in enumerate(ids):
        prompt = [100 + (7 * number + 3 * place) % 20_000 for place in range(PROMPT)]
        engine.submit(Request(id=request, prompt_ids=prompt, params=params))
    begun: set[str] = set()
    while len(begun) < sequences:
        begun |= {event.request_id for event in engine.step() if event.tokens}
    yield
    for request in ids:
        engine.cancel(request)
    while engine.has_work:
        engine.step()


def kernels_of(probe: Probe, engine: Engine) -> tuple[dict[str, Any], int]:
    """A few steps under the profiler. -> by part of the step, kernels with microseconds and calls of a step; gaps"""
    probe.clear()
    probe.is_profiled = True
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        _, steps, _ = run_steps(engine, PROFILED)
    probe.is_profiled = False
    kernels = sorted(
        ((one.time_range.start, one.time_range.end, one.name) for one in traced.events()
         if one.device_type == DeviceType.CUDA),
    )  # fmt: skip
    parts = iter(probe.queued)
    part, last_end, last_name = "before", 0.0, ""
    busy: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    gaps: dict[str, list[float]] = defaultdict(list)
    for start, end, name in kernels:
        if MARKER in name:
            part = next(parts, "?")
        else:
            busy[part][short(name)].append(end - start)
        if last_end and start - last_end >= MIN_GAP:
            gaps[f"{part}: {short(last_name)} -> {short(name)}"].append(start - last_end)
        last_end, last_name = max(end, last_end), name
    return {"busy": busy, "gaps": gaps}, steps


def short(name: str) -> str:
    name = name.replace("void ", "").split("<")[0].split("(")[0]
    return name.rsplit("::", 1)[-1][:44] or name[:44]


def print_kernels(found: dict[str, Any], steps: int, count: int) -> dict[str, float]:
    totals = {part: sum(map(sum, names.values())) / steps for part, names in found["busy"].items()}
    for part, names in found["busy"].items():
        calls = sum(map(len, names.values())) / steps
        print(f"    {part}: {totals[part]:.0f} us of kernels a step in {calls:.0f}")
        longest = sorted(names.items(), key=lambda one: -sum(one[1]))[:count]
        for name, times in longest:
            print(f"        {sum(times) / steps:9.1f} us {len(times) / steps:7.1f} x {median(times):8.2f}  {name}")
    all_gaps = sum(map(sum, found["gaps"].values())) / steps
    print(f"    gaps of {MIN_GAP:.0f} us and more: {all_gaps:.0f} us a step")
    for name, times in sorted(found["gaps"].items(), key=lambda one: -sum(one[1]))[:count]:
        print(f"        {sum(times) / steps:9.1f} us {len(times) / steps:7.1f} x {median(times):8.2f}  {name}")
    return {**totals, "gaps": all_gaps}


def look(engine: Engine, probe: Probe, sequences: int, args: argparse.Namespace) -> dict[str, Any]:
    scheduler = engine._scheduler
    speculation = scheduler.speculation
    assert speculation is not None
    with answers(engine, sequences, "with"):
        run_steps(engine, WARM_UP)
        probe.clear()
        seconds, steps, tokens = run_steps(engine, TIMED)
        device, host = probe.device_parts(), {part: sum(probe.host[part]) / steps for part in HOST_PARTS}
        graphs, drafts = dict(probe.graphs), dict(sorted(probe.drafts.items()))
        model = speculation.budget.step_cost
        costs = {size: 1e3 * model.seconds(size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)}
        traced, traced_steps = kernels_of(probe, engine)
    quotas, speculation._quotas = speculation._quotas, []
    with answers(engine, sequences, "without"):
        run_steps(engine, PLAIN_WARM_UP)
        probe.clear()
        plain_seconds, plain_steps, plain_tokens = run_steps(engine, PLAIN_TIMED)
        plain_device = probe.device_parts()
    speculation._quotas = quotas
    rates = plain_tokens / plain_seconds, tokens / seconds
    print(
        f"\n{sequences} sequences: {rates[0]:.0f} -> {rates[1]:.0f} tokens/s, {rates[1] / rates[0]:.2f} times; "
        f"{1e3 * plain_seconds / plain_steps:.2f} -> {1e3 * seconds / steps:.2f} ms a step, "
        f"{tokens / steps / sequences:.2f} tokens of a sequence in a step"
    )
    print("    runs by verified drafts:", ", ".join(f"{count}: {runs}" for count, runs in drafts.items()))
    print("    on the device, ms a step:", ", ".join(f"{name} {ms / steps:.3f}" for name, ms in device.items()))
    print("    the same without drafts: ", ", ".join(f"{k} {v / plain_steps:.3f}" for k, v in plain_device.items()))
    print("    of the host, ms a step:  ", ", ".join(f"{name} {1e3 * value:.3f}" for name, value in host.items()))
    print("    believed costs of steps: ", ", ".join(f"{size}: {ms:.2f}" for size, ms in costs.items()))
    for name, uses in sorted(graphs.items()):
        print(f"        {uses:4} x {name}")
    totals = print_kernels(traced, traced_steps, args.kernels)
    return {
        "rates": rates, "ms": [1e3 * plain_seconds / plain_steps, 1e3 * seconds / steps], "drafts": drafts,
        "device": {name: ms / steps for name, ms in device.items()}, "host": host, "graphs": graphs, "kernels": totals,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--length", type=float, default=2.9, help="tokens of a step, on average")
    parser.add_argument("--rates", type=float, nargs="+", help="instead: that all drafts up to each are accepted")
    parser.add_argument("--fixed", action="store_true", help="drafts at all sizes, whether they pay or not")
    parser.add_argument("--tree-nodes", type=int, default=0, help="instead of chains, trees of so many drafts")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--kernels", type=int, default=14, help="how many are listed of each part")
    args = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_head(folder / "head", write_target(folder / "target"))
        engine = new_engine(folder, args)
        print(f"started in {time.perf_counter() - begin:.1f} s", flush=True)
        probe = Probe(engine)
        found = {}
        for sequences in args.sequences:
            found[sequences] = look(engine, probe, sequences, args)
            print(f"    {time.perf_counter() - begin:.1f} s so far", flush=True)
        engine.stop()
    print(json.dumps({"benchmark": "draft_profile", "machine": describe(), **vars(args), "found": found}))


if __name__ == "__main__":
    main()
