"""Kernels are what Triton's compiler takes, on a machine without a GPU: the interpreter takes more."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU kernels are compiled"),
]

ROOT = Path(__file__).parents[2]
ATTENTION = ["triton_attention", "triton_latent", "triton_self_attention", "triton_step", "draft_trees", "block_copy"]
LINEAR = ["triton_linear", "triton_grouped", "triton_scaled", "triton_experts", "triton_eight_bits"]
OTHERS = [*LINEAR, "triton_elementwise", "triton_low_rank", "triton_routing"]
STATES = ["triton_states", "triton_state_ops"]
WRONG = """
import torch, triton, triton.language as tl

@triton.jit
def early(x, shift):
    if shift is None:
        return x
    return x + tl.load(shift)

@triton.jit
def wrong(x, shift):
    tl.store(x, early(tl.load(x), shift))

def test_it():
    wrong[(1,)](torch.zeros(1), None)
"""


def translate(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "compile_only", "-p", "no:cacheprovider", "--tb=no"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    output = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)
    return dict(json.loads(output.stdout.splitlines()[-1]))


def test_a_kernel_that_the_interpreter_takes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(WRONG)
    found = translate(str(tmp_path / "test_wrong.py"), "-c", os.devnull, "--rootdir", str(tmp_path))
    assert list(found["refused"]) == ["test_wrong.wrong"] and "tl.load(shift)" in found["refused"]["test_wrong.wrong"]


@pytest.mark.parametrize(("names", "least"), [(ATTENTION, 10), (OTHERS, 18), (STATES, 10)])
def test_all_kernels_are_taken(names: list[str], least: int) -> None:
    found = translate(*(f"tests/ops/test_{name}.py" for name in names))
    assert found["refused"] == {}
    assert len(found["translated"]) >= least


def test_the_kernels_of_quantize_are_taken() -> None:
    found = translate("tests/quantize/test_gpu_kernels.py")
    assert found["refused"] == {} and len(found["translated"]) == 1
