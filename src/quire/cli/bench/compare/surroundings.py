"""The model and the machine of a comparison, as values and in words."""

import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli import machine
from quire.cli.bench.compare.comparisons import FIXED
from quire.cli.bench.compare.lab import Lab

GIB = 1 << 30


def surroundings(lab: Lab) -> dict[str, Any]:
    options, config = lab.options, lab.model
    changed = {field.name: getattr(options, field.name) for field in fields(options)}
    figures: dict[str, Any] = {
        "quire": __version__,
        "model": {
            "name": options.model,
            "architecture": config.architecture,
            "layers": config.layers,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "vocab": config.vocab,
            "max_length": config.max_length,
        },
        "options": {
            field.name: changed[field.name] for field in fields(options) if changed[field.name] != field.default
        },
        "machine": {
            "cpu": machine.cpu_model(machine.read(Path("/proc/cpuinfo"))),
            "cores": machine.cores().usable,
            "memory": machine.memory().total,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
    }
    if lab.on_gpu:
        from quire.ops.gpu.device import describe

        figures["machine"]["gpu"] = describe()
    return figures


def in_words(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values for a person."""
    host, model = figures["machine"], figures["model"]
    rows = [
        ("model", f"{model['name']} ({model['architecture']})"),
        (
            "shape",
            f"{model['layers']} layers, {model['heads']} query heads and {model['kv_heads']} KV heads of "
            f"{model['head_dim']}, vocabulary {model['vocab']:,}, context {model['max_length']:,}",
        ),
    ]
    if gpu := host.get("gpu"):
        rows.append(("GPU", f"{gpu['name']}, {gpu['memory'] / GIB:.0f} GiB, torch {gpu['torch']}"))
    rows.append(("CPU", f"{host['cpu']}, {host['cores']} cores, {host['memory'] / GIB:.0f} GiB"))
    rows.append(("software", f"quire {figures['quire']}, Python {host['python']}, {host['system']}"))
    given = [_flag(name, value) for name, value in figures["options"].items() if name not in ("model", "seed", *FIXED)]
    return [*rows, ("flags", " ".join(given) or "defaults")]


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
