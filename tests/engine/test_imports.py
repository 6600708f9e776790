"""A model in this process needs neither the web nor messages: GPU machines often have torch and little else."""

import subprocess
import sys
from pathlib import Path

WITHOUT = "zmq msgspec starlette uvicorn uvloop httptools prometheus_client jinja2 huggingface_hub tqdm"

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


def test_a_server_starts_its_engine_before_it_knows_any_model() -> None:
    """Modules that only the engine's process needs would delay both of them, and the first token with them."""
    listed = "import sys; import quire.server.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    heavy = ("numpy", "quire.models", "quire.ops", "quire.runtime", "uvicorn")
    assert not [name for name in done.stdout.split() if name.startswith(heavy)]
