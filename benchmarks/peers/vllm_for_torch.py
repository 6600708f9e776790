"""The newest vLLM whose wheel was built for a torch, by the wheels' metadata on the package index.

    python benchmarks/peers/vllm_for_torch.py 2.11.0        prints 0.26.0

Reads index pages and metadata files (PEP 503, PEP 658), no wheels; those without a metadata file are passed over."""

import os
import platform
import re
import sys
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import urlopen

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"
WHEEL = re.compile(r'href="([^"#]*/vllm-(\d+)\.(\d+)\.(\d+)[^"#/]*_(x86_64|aarch64)\.whl)')


def read(url: str) -> str:
    with urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def wheels(page: str, machine: str) -> list[tuple[tuple[int, ...], str]]:
    """Versions and addresses, the newest first."""
    named = WHEEL.findall(page)
    return sorted(((tuple(map(int, version)), url) for url, *version, arch in named if arch == machine), reverse=True)


def torch_of(metadata: str) -> str | None:
    named = re.search(r"^Requires-Dist: torch\s*\(?==([^\s;)]+)", metadata, re.MULTILINE)
    return named.group(1) if named else None


def main() -> None:
    wanted = sys.argv[1].split("+")[0]
    for version, url in wheels(read(INDEX), platform.machine()):
        try:
            torch = torch_of(read(urljoin(INDEX, url) + ".metadata"))
        except HTTPError:
            continue
        if torch == wanted:
            print(".".join(map(str, version)))
            return
    sys.exit(f"no wheel of vLLM for {platform.machine()} on {INDEX} says that it was built for torch {wanted}")


if __name__ == "__main__":
    main()
