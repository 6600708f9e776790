"""The tiny model with tokens that mark reasoning."""

import json
import shutil
from pathlib import Path


def with_markers(tiny_model: Path, folder: Path, template: str, markers: dict[str, bool]) -> Path:
    """A copy of the tiny model with the tokens of some bytes renamed to markers. True: a special token."""
    shutil.copytree(tiny_model, folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    for letter, (marker, special) in zip("Āāă", markers.items(), strict=False):  # byte-level tokenizers' 0, 1 and 3
        token = vocab[marker] = vocab.pop(letter)
        shape = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        stored["added_tokens"].append({"id": token, "content": marker, "special": special, **shape})
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    (folder / "chat_template.jinja").write_text(template)
    return folder
