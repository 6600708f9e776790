"""DeepSeek V4 against transformers: compressed attention of all kinds, hyper-connections, experts by token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from models.checking import (
    BACKENDS,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
)
from quire.core.errors import BadCheckpoint
from quire.models.deepseek_v4 import config as read_config
from quire.ops.dequantize import E2M1_VALUES
from quire.weights.config import CheckpointConfig

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SIZES: dict[str, Any] = {
    "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 3, "sliding_window": 6,
    "intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3,
    "layer_types": [SLIDING, SPARSE, HEAVY], "num_hash_layers": 1,
    "compress_rates": {SPARSE: 4, HEAVY: 8},
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
CASES: Cases = {
    "v4": (DeepseekV4Config, {}),
    "v4-odd": (
        DeepseekV4Config,
        {
            "head_dim": 40, "qk_rope_head_dim": 10, "num_attention_heads": 3, "o_groups": 3,
            "compress_rates": {SPARSE: 3, HEAVY: 5}, "index_head_dim": 12, "index_topk": 1, "sliding_window": 2,
            "hc_mult": 3, "hc_sinkhorn_iters": 2,
            "scoring_func": "sigmoid", "swiglu_limit": 1.5, "n_shared_experts": 1,
        },
    ),
    "v4-yarn": (
        DeepseekV4Config,
        {
            "rope_parameters": YARN, "num_attention_heads": 40, "layer_types": [HEAVY, SPARSE, SPARSE],
            "sliding_window": 9,
        },
    ),
}  # fmt: skip

checkpoints = checkpoints_of({name: (kind, SIZES | options) for name, (kind, options) in CASES.items()})


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def test_matrices_in_fp8_and_experts_in_fp4_as_the_authors_publish_them(
    checkpoints: Callable[[str], Theirs], tmp_path: Path
) -> None:
    """Against the same numbers in floats. Scales are powers of two: of 128 x 128 weights, and of 32 neighbours."""
    path, draw = checkpoints("v4").path, torch.Generator().manual_seed(1)
    plain, packed = load_file(path / "model.safetensors"), {}
    for name, tensor in list(plain.items()):
        rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
        if ".experts." in name:
            nibbles = torch.randint(16, (rows, columns), generator=draw, dtype=torch.uint8)
            exponents = torch.randint(122, 126, (rows, columns // 32), generator=draw, dtype=torch.uint8)
            values = torch.from_numpy(E2M1_VALUES)[nibbles.long()] / 2
            plain[name] = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
            packed[name] = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int8)
            packed[name.removesuffix("weight") + "scale"] = exponents.view(torch.float8_e8m0fnu)
        elif ".attn.w" in name and columns:
            exponents = torch.randint(
                124, 128, (-(-rows // 128), -(-columns // 128)), generator=draw, dtype=torch.uint8
            )
            packed[name] = tensor.to(torch.float8_e4m3fn)
            scales = torch.exp2(exponents.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = packed[name].float() * scales[:rows, :columns]
            packed[name.removesuffix("weight") + "scale"] = exponents.view(torch.float8_e8m0fnu)
        else:
            packed[name] = tensor
    folders = tmp_path / "plain", tmp_path / "packed"
    for folder, tensors in zip(folders, (plain, packed), strict=True):
        shutil.copytree(path, folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    (folders[1] / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    expected, logits = (compute(make_ops("torch"), folder)(PROMPT, 0) for folder in folders)
    assert_close(logits, expected)


def test_the_names_of_tensors_are_those_of_the_authors_or_of_transformers(
    checkpoints: Callable[[str], Theirs], tmp_path: Path
) -> None:
    """The authors' files have no `model.`; transformers' own names are those that its classes have."""
    theirs = checkpoints("v4")
    tensors = load_file(theirs.path / "model.safetensors")
    published = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    published = {name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_"): tensor
                 for name, tensor in published.items()}  # fmt: skip
    model = transformers_model(theirs.path)
    for kind, named in (("published", published), ("transformers", model.state_dict())):
        folder = tmp_path / kind
        shutil.copytree(theirs.path, folder)
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
        assert_close(compute(make_ops("torch"), folder)(PROMPT, 0), theirs.prefill)


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def read(**values: Any) -> Any:
    common = {key: value for key, value in (TINY | SIZES).items() if value is not None}
    common |= {"hidden_act": "silu", "moe_intermediate_size": 64, "architectures": ["DeepseekV4ForCausalLM"]}
    return read_config(CheckpointConfig(Path("config.json"), common | values))


def test_layers_are_named_or_have_ratios() -> None:
    by_ratio = read(layer_types=None, compress_rates=None, compress_ratios=[128, 4, 0, 0])  # one of a layer behind
    assert by_ratio.layer_kinds == (HEAVY, SPARSE, SLIDING) and by_ratio.groups == {SPARSE: 4, HEAVY: 128}
    assert [layer.columns for layer in by_ratio.compressed.layers] == [32 * 3, 32 * 5 + 16 * 4, 32]
    assert by_ratio.compressed.reach == 128 and read().compressed.reach == 8
    assert read(layer_types=None).layer_kinds == (HEAVY, HEAVY, HEAVY)  # then in turn
    assert read(mlp_layer_types=["moe", "hash_moe", "moe"]).hashed == (False, True, False)
    for values, message in (
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 layers of full_attention; it needs 3"),
        ({"compress_ratios": [4], "layer_types": None}, "layer_types has 1 layers"),
        ({"o_groups": 3}, "4 heads are in 3 groups"),
        ({"swiglu_limit": 0.5}, "swiglu_limit is 0.5"),
    ):
        with pytest.raises(BadCheckpoint, match=message):
            read(**values)


def test_an_indexer_that_would_choose_all_entries_is_left_out() -> None:
    config = read()
    assert config.at_length(15).index_top_k == 0 and config.at_length(16) == config
    assert config.at_length(15).compressed.layers[1].parts == (32,)
