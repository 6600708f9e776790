"""Check an environment: no torch, and under 200 MB without Python, pip and the model.

.venv/bin/python tools/check_install.py"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

LIMIT = 200_000_000  # bytes
NOT_COUNTED = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}


def installed_bytes(packages: Path) -> dict[str, int]:
    """Bytes on disk, by top-level name."""
    sizes = {}
    for entry in packages.iterdir():
        if entry.name.split("-")[0] in NOT_COUNTED:
            continue
        files = entry.rglob("*") if entry.is_dir() else [entry]
        sizes[entry.name] = sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
    return sizes


if __name__ == "__main__":
    sizes = installed_bytes(Path(sysconfig.get_paths()["purelib"]))
    total = sum(sizes.values())
    largest = sorted(sizes, key=lambda name: -sizes[name])[:6]
    print(f"{total / 1e6:.0f} MB installed: " + ", ".join(f"{name} {sizes[name] / 1e6:.0f}" for name in largest))
    if unwanted := [name for name in ("torch", "triton", "transformers") if importlib.util.find_spec(name)]:
        sys.exit(f"error: the serving environment has {', '.join(unwanted)}")
    if total > LIMIT:
        sys.exit(f"error: the serving environment has {total / 1e6:.0f} MB, and {LIMIT / 1e6:.0f} are promised")
