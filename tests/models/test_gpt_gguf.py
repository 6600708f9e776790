"""GGUF files of the families with layer norms, against transformers on the same numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from models.checking import Cases, Theirs, check_against_transformers, checkpoints_of, compute, make_ops
from models.gguf_gpt_writing import write_gguf
from models.test_gpt import CASES as ALL_CASES
from quire.core.errors import Unsupported

NAMES = [
    "gpt2", "gpt2-untied", "gptj-heads-3", "gpt-neox", "gpt-neox-in-turn", "mpt-clipped", "bloom-heads-9", "falcon-7b",
    "falcon-40b", "falcon-11b", "starcoder", "starcoder2", "phi", "stablelm", "stablelm-2-12b", "olmo-clipped",
]  # fmt: skip
CASES: Cases = {name: ALL_CASES[name] for name in NAMES}
checkpoints = checkpoints_of(CASES)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in GPTBigCode


@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(
    checkpoints: Callable[[str], Theirs], name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    check_against_transformers("torch", replace(theirs, path=write_gguf(theirs.path, tmp_path / "model.gguf")))


def test_phi_2_with_one_tensor_for_q_k_and_v(checkpoints: Callable[[str], Theirs], tmp_path: Path) -> None:
    theirs = checkpoints("phi")
    path = write_gguf(theirs.path, tmp_path / "model.gguf", fuse_qkv=True)
    check_against_transformers("torch", replace(theirs, path=path))


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("starcoder", "starcoder.attention.head_count_kv", 5, r"starcoder\.attention\.head_count_kv is 5"),
        ("mpt-clipped", "mpt.attention.max_alibi_bias", 0.0, r"attn_config\.alibi_bias_max is 0\.0"),
        ("mpt-clipped", "mpt.attention.head_count_kv", 2, r"attn_config\.kv_n_heads is 2"),
    ],
)
def test_a_value_without_code_is_refused_by_name(
    checkpoints: Callable[[str], Theirs], name: str, key: str, value: float, message: str, tmp_path: Path
) -> None:
    path = write_gguf(checkpoints(name).path, tmp_path / "model.gguf", instead={key: value})
    with pytest.raises(Unsupported, match=message):
        compute(make_ops("torch"), path)
