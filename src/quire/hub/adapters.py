"""From the name of a LoRA adapter to its files: a directory saved by PEFT, a GGUF file, or a repository of the Hugging
Face Hub."""

from importlib import import_module
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def resolve_adapter(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    from quire.hub.huggingface import is_repo_id

    if not is_repo_id(name) or path.exists():
        raise BadRequest(
            f"{path} is not a directory",
            "an adapter is a directory saved by PEFT, a .gguf file, or a repository of the hub (owner/name)",
            param="lora_path",
        )
    library: Any = import_module("huggingface_hub")
    try:
        return Path(library.snapshot_download(name, allow_patterns=list(ADAPTER_FILES)))
    except Exception as failure:  # the library raises the errors of its HTTP client
        raise BadRequest(
            f"{path} is not a directory, and {name} could not be downloaded from the hub: "
            f"{(str(failure).strip() or type(failure).__name__).splitlines()[0]}",
            "check the spelling; for a private repository run `hf auth login` or set HF_TOKEN",
            param="lora_path",
        ) from failure
