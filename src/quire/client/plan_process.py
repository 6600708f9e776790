"""Makes plans in a process of its own: Python that counts for a second must not hold up the streams of a server.

Started as `python -m quire.client.plan_process`. It reads a `PlanRequest` as a line of JSON, and prints a line of
JSON: the plan, or {"error": [message, hint, field]}. It ends with its standard input."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from quire.client.plan_request import PlanRequest
from quire.client.this_gpu import this_gpu
from quire.core.errors import BadRequest, QuireError
from quire.hub import cache_dir
from quire.ops.kv_spec import GPU_KV_DTYPES, KVSpec
from quire.planning.explain import explain
from quire.planning.formats import FORMATS, find_format
from quire.planning.hardware import HARDWARE, PRICE_SOURCE, Hardware, find_hardware, kv_dtype_on
from quire.planning.memory import EngineLimits, Load
from quire.planning.packed_bytes import packing_of
from quire.planning.plan import Plan, Setup
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.planner import make_plan
from quire.planning.report import as_json
from quire.planning.shape_checkpoint import published_checkpoint
from quire.planning.shapes import QUANTIZED, SHAPES
from quire.planning.this_machine import machine_as_kept
from quire.weights.checkpoint import Checkpoint, open_checkpoint

PLAN_NICENESS = 5  # added to the process's: where no core is to spare, the engine comes first
MAX_MODELS = 4  # counted models that are remembered: sliders ask for the same again and again
MACHINE_FILE = "machine.json"
NOT_MEASURED = "This machine is not measured yet, so only memory is planned: `quire plan` measures it in a few seconds"
_SPEED = ("prefill", "decode", "ttft_seconds", "tpot_seconds", "tokens_per_second", "cost")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    os.nice(PLAN_NICENESS)
    decoder = msgspec.json.Decoder(PlanRequest)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(_reply(decoder.decode(line))) + b"\n")  # infinity becomes null
        sys.stdout.buffer.flush()


def _reply(request: PlanRequest) -> dict[str, Any]:
    try:
        return plan_reply(request)
    except QuireError as error:
        return {"error": [error.message, error.hint, error.param]}
    except Exception as error:  # a model that can be served and not be counted: it must not end the process
        what = request.shape or request.name
        return {"error": [f"`{what}` cannot be planned: {type(error).__name__}: {error}", "", "model"]}


def plan_reply(request: PlanRequest) -> dict[str, Any]:
    """The plan as `quire plan --json` has it, with its formulas, what it does not know, and the names it knows."""
    hardware, note = _hardware(request)
    if request.tp > 1 and not hardware.link:
        raise BadRequest(f"`{hardware.name}` has no links to others", "use tp 1, or other hardware", param="tp")
    model = _model(request, hardware.is_gpu)
    with _field("kv_cache_dtype"):
        kv = model.kv_spec(kv_dtype_on(hardware, request.kv_cache_dtype), request.block_size)
    plan = _plan(request, model, kv, hardware)
    reply = {**as_json(plan), "explain": explain(plan).splitlines(), "note": note}
    reply["kv"]["attention"] = _attention(model)
    if reply["cost"] is not None:
        reply["cost"]["source"] = PRICE_SOURCE if request.price is None and hardware.price else None
    return {**(_memory_only(reply) if note else reply), "known": _known(request)}


def _plan(request: PlanRequest, model: PlannedModel, kv: KVSpec, hardware: Hardware) -> Plan:
    """The same plan that `quire plan` makes."""
    load = Load(users=request.users, context=request.context, prompt=request.prompt, output=request.output)
    limits = EngineLimits(num_loras=request.loras, lora_rank=request.rank, threads=hardware.threads)
    setup = Setup(hardware=hardware, tp=request.tp, limits=limits, price=request.price, eight_bit=not hardware.is_gpu)
    return make_plan(model, kv, load, setup)


def _hardware(request: PlanRequest) -> tuple[Hardware, str | None]:
    """-> a row, and what is not known of it."""
    if request.hardware is not None:
        return find_hardware(request.hardware), None
    if request.on_gpu:
        return this_gpu(), None
    row, note = machine_as_kept(cache_dir() / MACHINE_FILE), None
    if row is None:
        row, note = Hardware("this machine", 0, 1.0, 1.0, 1.0, 0, is_gpu=False), NOT_MEASURED
    return replace(row, memory=request.machine_memory), note


def _memory_only(reply: dict[str, Any]) -> dict[str, Any]:
    """Without what follows from rates."""
    needed = [advice for advice in reply["advice"] if advice["gain"] == float("inf")]
    formulas = [line for line in reply["explain"] if line.startswith("KV")]
    return {**reply, **dict.fromkeys(_SPEED), "advice": needed, "explain": formulas}


def _model(request: PlanRequest, on_gpu: bool) -> PlannedModel:
    if request.shape is not None:
        with _field("format"):
            find_format(request.format or "bfloat16")
        return _counted(request.shape, request.shape, request.format, None, on_gpu)
    if not request.path:
        raise BadRequest(f"the files of `{request.name}` are not known", "give a shape", param="model")
    if request.format is not None:
        raise BadRequest("format is given for a model with files", "its files say how it is stored", param="format")
    return _counted(request.name, None, request.path, request.quantization, on_gpu)


@lru_cache(MAX_MODELS)
def _counted(name: str, shape: str | None, stored: str | None, quantization: str | None, on_gpu: bool) -> PlannedModel:
    """`stored`: the format of a shape, or the path of a model's files."""
    checkpoint: Checkpoint = published_checkpoint(shape, stored) if shape else open_checkpoint(Path(stored or ""))
    return plan_model(name, checkpoint, packing_of(checkpoint.config, on_gpu=on_gpu), quantization)


def _attention(model: PlannedModel) -> str:
    """Which of MHA, GQA, MQA and MLA the model has."""
    config = model.config
    if config.latent:
        return "MLA"
    return "MHA" if config.kv_heads == config.heads else "MQA" if config.kv_heads == 1 else "GQA"


def _known(request: PlanRequest) -> dict[str, Any]:
    """`on_gpu`: of this machine. `published`: how shapes are stored that are not published in floats."""
    return {
        "on_gpu": request.on_gpu,
        "shapes": list(SHAPES),
        "published": {name: quantization["quant_method"] for name, quantization in QUANTIZED.items()},
        "formats": list(FORMATS),
        "kv_cache_dtypes": ["auto", *GPU_KV_DTYPES],
        "hardware": [
            {"name": row.name, "memory_bytes": row.memory, "is_gpu": row.is_gpu, "links": row.link > 0}
            for row in HARDWARE.values()
        ],
    }


@contextmanager
def _field(name: str) -> Iterator[None]:
    """An error within is about that field."""
    try:
        yield
    except QuireError as error:
        raise BadRequest(error.message, error.hint, param=error.param or name) from None


if __name__ == "__main__":
    main()
