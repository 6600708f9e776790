"""The first layers of a model, with its embeddings and head: for trying a benchmark in minutes."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from benchmarks.processes import ROOT


def cut_to_layers(model: Path, out: Path, num_layers: int) -> Path:
    """In fp16, in Hugging Face's layout."""
    command = [sys.executable, "-m", "quire.cli.main", "quantize", str(model), str(out), "--method", "F16"]
    subprocess.run([*command, "--report-tokens", "0", "-q"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    config_file = out / "config.json"
    config = json.loads(config_file.read_text())
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    config_file.write_text(json.dumps(config, indent=2))
    files = sorted(out.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in [*files, *out.glob("*.safetensors.index.json")]:
        file.unlink()
    kept = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < num_layers}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _layer_of(name: str) -> int:
    """-1: of no layer."""
    _, found, rest = name.partition(".layers.")
    return int(rest.split(".")[0]) if found else -1
