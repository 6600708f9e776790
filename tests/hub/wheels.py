"""A wheel that holds a model, as packages on an index do."""

import hashlib
import zipfile
from pathlib import Path

from quire.hub.aliases import WheelModel

BODY = b"GGUF" + bytes(range(256)) * 64


def write_wheel(folder: Path, body: bytes = BODY, member: str = "quire_tiny_model/tiny.gguf") -> WheelModel:
    """A wheel of the package quire-tiny-model, and its entry for ALIASES."""
    folder.mkdir(exist_ok=True)
    file = folder / "quire_tiny_model-1.0-py3-none-any.whl"
    info = "quire_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, body)
        archive.writestr("../outside.txt", "escaped")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        package="quire-tiny-model==1.0",
        module="quire_tiny_model",
        member="quire_tiny_model/tiny.gguf",
        num_bytes=len(BODY),
        wheel_bytes=file.stat().st_size,
        sha256=hashlib.sha256(BODY).hexdigest(),
    )
