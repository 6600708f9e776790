"""Kernels are what Triton's compiler takes, on a machine without a GPU: the interpreter takes more."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the process takes a minute of a CPU, of which a busy machine gives a tenth
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU kernels are compiled"),
]

ROOT = Path(__file__).parents[2]
ATTENTION = ["triton_attention", "triton_latent", "triton_self_attention", "triton_step", "draft_trees", "block_copy"]
DRAFTS = ["accepted_drafts", "tree_steps", "kept_trees"]
PAGES = ["gpu_window_pages", "triton_sparse"]
LINEAR = ["triton_linear", "triton_grouped", "triton_scaled", "triton_experts", "triton_eight_bits"]
WIDE = ["wide_tiles", "few_rows", "few_experts", "quantized_tiles", "w4a8_wide", "wide_prefill"]
OTHERS = [*LINEAR, *WIDE, "triton_elementwise", "triton_low_rank", "triton_routing"]
STATES = ["triton_states", "triton_tiles", "triton_state_ops"]
OF_TREES = ["a_node_has", "so_it_has", "nodes_of_later_steps", "moved_tokens", "native_cache"]
WITHOUT_KERNELS = " or ".join([*OF_TREES, "the_instructions"])
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By one process for all: to import torch and Triton takes as long as to translate a dozen kernels."""
    wrong = tmp_path_factory.mktemp("wrong") / "test_wrong.py"
    wrong.write_text(WRONG)
    files = [f"tests/ops/test_{name}.py" for name in (*ATTENTION, *DRAFTS, *PAGES, *OTHERS, *STATES)]
    return translate(*files, "tests/quantize/test_gpu_kernels.py", str(wrong), "-k", f"not ({WITHOUT_KERNELS})")


def test_a_kernel_that_the_interpreter_takes_is_refused(found: dict[str, Any]) -> None:
    [message] = [message for name, message in found["refused"].items() if name.endswith("test_wrong.wrong")]
    assert "tl.load(shift)" in message


def test_all_kernels_are_taken(found: dict[str, Any]) -> None:
    assert [name for name in found["refused"] if not name.endswith("test_wrong.wrong")] == []
    modules = Counter(name.rpartition(".")[0] for name in found["translated"])
    assert sum(count for name, count in modules.items() if name.startswith("quire.ops.gpu.")) >= 42
    assert sum(count for name, count in modules.items() if name.startswith("quire.quantize.gpu.")) == 1
