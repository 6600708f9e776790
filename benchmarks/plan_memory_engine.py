"""One engine under its heaviest load, and the memory that it took: a process of `benchmarks.plan_memory`."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import quire.engine.process  # noqa: F401  (as an engine process has it)
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.ops.native.cpus import compute_threads

MIN_OUTPUT = 4  # tokens
REPEATED = 16  # tokens at the end of a prompt that is to have draft tokens


def run(given: dict[str, Any]) -> dict[str, Any]:
    case, on_gpu = given["case"], given["device"] == "gpu"
    options = EngineOptions(
        max_num_seqs=case["users"],
        max_model_len=case["context"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        kv_cache_dtype=case["kv_cache_dtype"],
        quantization=case["quantization"],
        load_format="dummy" if Path(given["path"]).is_dir() else "auto",
        enable_lora=case["num_loras"] > 0,
        max_loras=max(case["num_loras"], 1),
        max_lora_rank=max(case["rank"], 1),
        spec_method="ngram" if case["num_drafts"] else None,
        spec_tokens=case["num_drafts"] or None,
        device="cuda" if on_gpu else "cpu",
    )
    before = _device_memory() if on_gpu else None
    engine = Engine(new_executor(Path(given["path"]), options), options)
    started = _resident() if not on_gpu else _device_memory()
    adapters = [f"adapter-{index}" for index in range(case["num_loras"])]
    for key in adapters:
        engine.executor.add_adapter(key, engine.executor.load_adapter(Path(given["adapter"])))
        engine.adapters.add(key)
    _serve(engine, case, adapters)
    after = _device_memory() if on_gpu else _resident()
    return {"threads": compute_threads(), "before": before, "started": started, **after}


def _serve(engine: Engine, case: dict[str, Any], adapters: list[str]) -> None:
    """Every user at once: the first goes on until the last has its prompt computed. Ids are spread over the
    vocabulary, so that all of an embedding table is read."""
    output = MIN_OUTPUT + case["users"] * case["context"] // case["max_num_batched_tokens"]
    output += 2 * REPEATED if case["num_drafts"] else 0
    vocab, length = engine.capacity.vocab_size, case["context"] - output
    stride = max(1, vocab // (length * case["users"]))
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0, seed=0)
    for user in range(case["users"]):
        first = user * length * stride + random.Random(user).randrange(stride)
        prompt = [(first + stride * position) % vocab for position in range(length)]
        if case["num_drafts"]:  # what repeats is proposed again
            prompt[-REPEATED:] = [prompt[0]] * REPEATED
        adapter = adapters[user % len(adapters)] if adapters else ""
        engine.submit(Request(id=str(user), prompt_ids=prompt, params=params, adapter=adapter))
    while engine.has_work:
        engine.step()


def _resident() -> dict[str, Any]:
    """Bytes, as Linux counts them."""
    names = {"VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "files", "RssShmem": "shared"}
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {names[name]: 1024 * int(value.split()[0]) for name, value in lines if name in names}


def _device_memory() -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    beside = total - free - reserved
    return {
        "peak": torch.cuda.max_memory_reserved() + beside,
        "name": torch.cuda.get_device_name(),
        "beside_torch": beside,
        "reserved": reserved,
        "allocated": torch.cuda.memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
