"""`quire doctor`: what this machine has, which kernels it will run, and what fits on it."""

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli import machine
from quire.cli.fit import BITS, CONTEXT, Fit, fits
from quire.cli.parser import Parser
from quire.hub import cache_dir, cached_models

EXAMPLES = """\
  quire doctor
  quire doctor --json | jq .cores
"""

_GIB = 1 << 30


def run(argv: Sequence[str]) -> int:
    parser = Parser("doctor", "Show what this machine has, which kernels will run, and what fits.", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="one JSON object, for a bug report or a script")
    arguments = parser.parse(argv)
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else describe(report))
    return 0


def examine() -> dict[str, Any]:
    cpuinfo = machine.read(Path("/proc/cpuinfo"))
    cores, memory, devices = machine.cores(), machine.memory(), machine.devices()
    return {
        "quire": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cpu": machine.cpu_model(cpuinfo),
        "vector_units": machine.vector_units(cpuinfo),
        "kernels": _kernels(),
        "cores": {
            "installed": cores.installed,
            "allowed": cores.allowed,
            "quota": cores.quota,
            "usable": cores.usable,
        },
        "devices": {
            "sockets": devices.sockets,
            "numa_nodes": [{"cpus": node.cpus, "memory": node.memory} for node in devices.nodes],
            "gpus": devices.gpus,
            "tensor_parallel_size": devices.tensor_parallel_size,
            "pipeline_parallel_size": devices.pipeline_parallel_size,
            "advice": devices.advice,
        },
        "memory": {"total": memory.total, "available": memory.available, "limit": memory.limit},
        "cache": str(cache_dir()),
        "models": [{"name": model.name, "bytes": model.num_bytes} for model in cached_models()],
        "fits": [_fit_row(fit) for fit in fits(memory.available)],
    }


def describe(report: dict[str, Any]) -> str:
    cores, memory, kernels = report["cores"], report["memory"], report["kernels"]
    limits = f", {cores['allowed']} allowed" if cores["allowed"] != cores["installed"] else ""
    limits += f", {cores['quota']:g} by the container's quota" if cores["quota"] is not None else ""
    container = f", {memory['limit'] / _GIB:.1f} GiB by the container's limit" if memory["limit"] is not None else ""
    lines = [
        f"quire     {report['quire']}",
        f"python    {report['python']['version']} ({report['python']['executable']})",
        f"platform  {report['platform']}",
        f"cpu       {report['cpu']}",
        f"vectors   {' '.join(report['vector_units']) or 'unknown'}",
        f"kernels   {_describe_kernels(kernels)}",
        f"cores     {cores['usable']} usable ({cores['installed']} installed{limits})",
        f"devices   {_describe_devices(report['devices'])}",
        f"memory    {memory['available'] / _GIB:.1f} GiB free of {memory['total'] / _GIB:.1f} GiB{container}",
        f"cache     {report['cache']}",
    ]
    lines += [f"  {model['bytes'] / 1e9:6.2f} GB  {model['name']}" for model in report["models"]]
    lines += ["", f"what fits (weights and a context of {CONTEXT} tokens, in GiB)", *_table(report["fits"])]
    return "\n".join(lines)


def _kernels() -> dict[str, Any]:
    """The ISA of the kernels that are used, and those available; or why there are none."""
    try:
        from quire import _native
    except ImportError as failure:
        return {"chosen": None, "available": [], "problem": str(failure)}
    available = [str(name) for name in _native.available_isas()]
    return {"chosen": str(_native.isa()), "available": available, "problem": None}


def _describe_devices(devices: dict[str, Any]) -> str:
    """With what to do with them."""
    nodes, gpus = devices["numa_nodes"], devices["gpus"]
    text = f"{devices['sockets']} socket{'s' if devices['sockets'] > 1 else ''}"
    if len(nodes) > 1:
        each = ", ".join(f"{node['cpus']} CPUs with {node['memory'] / _GIB:.0f} GiB" for node in nodes)
        text += f", {len(nodes)} NUMA nodes ({each})"
    named = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({', '.join(dict.fromkeys(gpus))})" if gpus else "no GPU"
    return f"{text}, {named}; {devices['advice']}"


def _describe_kernels(kernels: dict[str, Any]) -> str:
    if kernels["problem"] is not None:
        return f"none: {kernels['problem']}"
    return f"{kernels['chosen']} (of {', '.join(kernels['available'])})"


def _fit_row(fit: Fit) -> dict[str, Any]:
    return {"model": fit.shape.name, "weights": fit.bits, "bytes": fit.needed, "fits": fit.fits}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"  {'':<28}" + "".join(f"{bits:>12}" for bits in BITS)]
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = [f"{row['bytes'] / _GIB:.1f} {'yes' if row['fits'] else 'no '}" for row in rows if row["model"] == name]
        lines.append(f"  {name:<28}" + "".join(f"{cell:>12}" for cell in cells))
    return lines
