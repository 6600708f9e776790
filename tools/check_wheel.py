"""Install a wheel into a bare environment without a compiler, and answer one prompt with the default model.

.venv-build/bin/python tools/check_wheel.py dist/quire-*.whl"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

LIMIT = 12_000_000  # bytes of the wheel
PROMPT, EXPECTED = "The capital of France is", "Paris"
LIBRARIES = """
import quire._native
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}, sep="\\n")
"""


def install(wheel: Path, folder: Path) -> Path:
    """-> the environment's bin. Every dependency comes as a wheel too."""
    venv.create(folder, with_pip=False, symlinks=True)
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin/python"]
    subprocess.run([*command, "install", "--no-compile", "--only-binary", ":all:", wheel], check=True)
    return folder / "bin"


def run(binaries: Path, *words: str) -> str:
    """What the program prints, with no other program on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": str(binaries)}
    done = subprocess.run([binaries / words[0], *words[1:]], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def check(wheel: Path) -> None:
    if wheel.stat().st_size > LIMIT:
        sys.exit(f"error: {wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB, and {LIMIT / 1e6:.0f} are promised")
    if "linux" in wheel.name and "manylinux" not in wheel.name:
        sys.exit(f"error: {wheel.name} is for this machine only\nhint: repair it with auditwheel, as make wheel does")
    with tempfile.TemporaryDirectory() as folder:
        binaries = install(wheel, Path(folder))
        answer = run(binaries, "quire", "run", "--raw", PROMPT, "--max-tokens", "4", "--temperature", "0")
        if EXPECTED not in answer:
            sys.exit(f"error: after `{PROMPT}` the installed wheel says `{answer}`")
        libraries = run(binaries, "python", "-c", LIBRARIES).splitlines() if sys.platform == "linux" else []
        if outside := [path for path in libraries if not path.startswith(folder)]:
            sys.exit(f"error: the module is linked with {', '.join(outside)}, which other machines may lack")
    print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB: {PROMPT} {answer}")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        check(Path(path))
