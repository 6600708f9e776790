"""The Python of docs/clients.md."""

import gc
import re
from pathlib import Path

from clients.served import served

APART = ("litellm", "instructor")  # who is installed in .venv-clients only

_PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
_ALL = dict(re.findall(r"^## ([^\n]*)\n```python\n(.*?)```", _PAGE, re.MULTILINE | re.DOTALL))
HERE = [title for title in _ALL if title.lower() not in APART]
THERE = [title for title in _ALL if title.lower() in APART]


def run(title: str) -> None:
    source = _ALL[title].replace("http://127.0.0.1:8000", served())
    names = {"__name__": "__main__"}
    exec(compile(source, f"docs/clients.md: {title}", "exec"), names)
    names.clear()
    gc.collect()  # examples leave their connections open: that is told here, not in a later test
