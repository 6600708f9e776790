"""Refuses a model that is not supported by what is known before its weights are downloaded.

What reads checkpoints is imported when it is needed: a model that is here already takes none of it."""

from pathlib import Path
from typing import get_args

from quire.core.errors import Unsupported


def check_config(directory: Path) -> None:
    """`directory` holds config.json, and what sentence-transformers adds to it."""
    from quire.models.registry import Purpose, decoder_of, family, read_model_config
    from quire.weights.formats import check_method
    from quire.weights.huggingface import read_config
    from quire.weights.sentence_modules import read_sentence_modules

    config = read_config(directory)
    if (decoder := decoder_of(config.architecture)) is not None:
        config = config.with_values({"architectures": [decoder]})
    read_model_config(family(config.architecture, *get_args(Purpose)), config)
    check_method(config)
    read_sentence_modules(directory)


def check_gguf(file: str, first_bytes: bytes) -> None:
    """Refuse a model by the keys that are among the first bytes of its GGUF file."""
    from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS
    from quire.weights.config import CheckpointConfig
    from quire.weights.gguf.container import first_keys
    from quire.weights.gguf.names import find_architecture

    metadata = CheckpointConfig(Path(file), first_keys(file, first_bytes))
    if "general.architecture" in metadata:
        find_architecture(metadata)
    words = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and words is not None and words not in PRE_TOKENIZERS:
        raise Unsupported(f"{file}: tokenizer.ggml.pre is {words!r}", f"supported: {', '.join(PRE_TOKENIZERS)}")
