"""A model in this process needs neither the web nor messages: GPU machines often have torch and little else."""

import subprocess
import sys
from pathlib import Path

WITHOUT = "msgspec starlette uvicorn uvloop httptools prometheus_client jinja2 huggingface_hub tqdm xxhash"

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from quire import LLM, SamplingParams
import quire.cli.main
llm = LLM(sys.argv[1], device="cpu")
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
assert [len(output.outputs[0].token_ids) for output in llm.generate(["A quire", "is"], params)] == [3, 3]
"""


def test_an_engine_runs_without_web_and_messaging_libraries(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model), WITHOUT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def imported_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_a_server_starts_its_engine_before_it_imports_what_it_serves_with() -> None:
    """Both take a while, and the first token comes when both have done it."""
    heavy = {"asyncio", "msgspec", "starlette", "tokenizers", "huggingface_hub", "numpy"}
    assert not imported_by("import quire.cli.serve; import quire.client.engine_process") & heavy


def test_a_server_knows_nothing_of_models() -> None:
    """Modules that only the engine's process needs would delay the first token."""
    heavy = ("numpy", "quire.models", "quire.ops.", "quire.runtime", "uvicorn")
    names = imported_by("import quire.server.launch") - {"quire.ops.compiled"}  # reads vocabularies
    assert not [name for name in names if name.startswith(heavy)]
