"""Say what is missing before a build starts: Python 3.11, its headers, pip and venv, a C++17 compiler."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


def problems() -> list[tuple[str, str]]:
    """Pairs of (what is missing, what to do)."""
    missing = []
    if sys.version_info < (3, 11):  # noqa: UP036  this runs before anything is installed
        missing.append((f"Python is {sys.version.split()[0]}, and 3.11 is needed", "run make PYTHON=python3.11 ..."))
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        missing.append(
            (
                "there is no C++ compiler",
                "install one: apt-get install g++, dnf install gcc-c++, xcode-select --install",
            )
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append(
            (
                "the headers of Python are missing",
                "install them: apt-get install python3-dev, dnf install python3-devel",
            )
        )
    for module, package in (("ensurepip", "python3-venv"), ("venv", "python3-venv")):
        if importlib.util.find_spec(module) is None:
            missing.append((f"Python's module {module} is missing", f"install it: apt-get install {package}"))
    return missing


if __name__ == "__main__":
    for problem, hint in problems():
        print(f"error: {problem}\nhint: {hint}", file=sys.stderr)
    sys.exit(2 if problems() else 0)
