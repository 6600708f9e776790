"""Which files of a repository a model needs: never code, never a second copy of the weights in another format."""

import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from quire.core.errors import BadRequest
from quire.hub.cache import DownloadFailed

CONFIG_FILE = "config.json"
_SETTINGS = (
    CONFIG_FILE, "generation_config.json", "quantize_config.json", "quant_config.json",
    # tokenizers
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab.json", "merges.txt", "vocab.txt", "target_vocab.json", "*.spm", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "rwkv_vocab_v20230424.txt",
    # how sentence-transformers makes an embedding of hidden states
    "modules.json", "sentence_*_config.json", "config_sentence_transformers.json",
)  # fmt: skip
_CONTAINERS = {"model.safetensors": "*.safetensors", "pytorch_model.bin": "pytorch_model*.bin"}  # -> names of shards
_DUPLICATES = "consolidated*"  # the same weights with the vendor's own tensor names
_MODULE_FOLDER = re.compile(r"[1-9]\d?_\w+/")  # 0_Transformer, in older repositories, is the model itself
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".safetensors", ".npz", ".nemo", ".mlx")
_SPLIT = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


def choose_files(files: list[str], selector: str | None, repo: str) -> list[str]:
    """The files to download: settings, tokenizer and safetensors; or one GGUF model, if there is a selector or no
    safetensors; or PyTorch's weights, if there is nothing else."""
    files = [file for file in files if _is_safe(file)]
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    if selector is not None:
        return _choose_gguf(ggufs, selector, repo)
    weights = _weights(files) if CONFIG_FILE in files else []
    models = [file for file in ggufs if not _is_later_split(file)]
    if weights and (not models or any(file.endswith(".safetensors") for file in weights)):
        others = {*weights, *_module_files(files)}
        return [file for file in files if _is_wanted(file) or file in others]
    if len(models) == 1:
        return _splits_of(models[0], ggufs)
    if models:
        raise BadRequest(
            f"{repo} has {len(models)} GGUF models: {', '.join(models)}",
            f"pick one: `{repo}:{models[0]}`",
            param="model",
        )
    raise _not_readable(files, repo)


def _weights(files: list[str]) -> list[str]:
    """The files of the first container that is there: one file, or an index and its shards."""
    for single, shards in _CONTAINERS.items():
        if f"{single}.index.json" in files:
            named = [file for file in files if fnmatchcase(file, shards) and not fnmatchcase(file, _DUPLICATES)]
            return [f"{single}.index.json", *(file for file in named if "/" not in file)]
        if single in files:
            return [single]
    return []


def _module_files(files: list[str]) -> list[str]:
    """What sentence-transformers keeps in a folder for each step after the model: settings, and the weights of dense
    layers, in one container."""
    if "modules.json" not in files:
        return []
    folders = {file.partition("/")[0] for file in files if _MODULE_FOLDER.match(file)}
    wanted = []
    for folder in folders:
        weights = next((single for single in _CONTAINERS if f"{folder}/{single}" in files), CONFIG_FILE)
        wanted += [file for file in (f"{folder}/{CONFIG_FILE}", f"{folder}/{weights}") if file in files]
    return wanted


def _not_readable(files: list[str], repo: str) -> DownloadFailed:
    if CONFIG_FILE not in files and _weights(files):
        return DownloadFailed(
            f"{repo} has no {CONFIG_FILE}", "it says what the weights are of: pick another repository"
        )
    other = sorted({suffix for file in files if (suffix := PurePosixPath(file).suffix) in _OTHER_WEIGHTS})
    found = f"; it has weights as {', '.join(other)}" if other else ""
    return DownloadFailed(
        f"{repo} has neither {' nor '.join(_CONTAINERS)} nor GGUF files{found}",
        "convert it where it came from: `save_pretrained` of transformers writes model.safetensors",
    )


def _choose_gguf(ggufs: list[str], selector: str, repo: str) -> list[str]:
    if selector in ggufs:
        return _splits_of(selector, ggufs)
    tag = re.compile(rf"(^|[-._/]){re.escape(selector.removesuffix('.gguf'))}([-._/]|$)", re.IGNORECASE)
    models = [file for file in ggufs if not _is_later_split(file) and tag.search(file.removesuffix(".gguf"))]
    if len(models) == 1:
        return _splits_of(models[0], ggufs)
    known = ", ".join(file for file in ggufs if not _is_later_split(file)) or "no GGUF files"
    problem = f"matches {len(models)} files ({', '.join(models)})" if models else "matches no file"
    raise BadRequest(f"`{selector}` {problem} of {repo}", f"it has {known}", param="model")


def _splits_of(model: str, ggufs: list[str]) -> list[str]:
    """All files of a split GGUF model, in order."""
    if not (split := _SPLIT.search(model)):
        return [model]
    stem = model[: split.start()]
    return [file for file in ggufs if (other := _SPLIT.search(file)) and file[: other.start()] == stem]


def _is_later_split(file: str) -> bool:
    split = _SPLIT.search(file)
    return split is not None and int(split[1]) > 1


def _is_wanted(file: str) -> bool:
    """Only files of the top folder: others hold the same model for other runtimes."""
    return "/" not in file and any(fnmatchcase(file, pattern) for pattern in _SETTINGS)


def _is_safe(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in file
