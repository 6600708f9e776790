"""One view of a checkpoint, whatever its format."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint
from weights.gguf_files import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, llama_tensors, write_llama

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return llama_tensors(np.random.default_rng(3))


def write_directory(path: Path, tensors: dict[str, np.ndarray], shards: int = 1, config: dict = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def assert_holds(path: Path, tensors: dict[str, np.ndarray]) -> None:
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.names()) == sorted(tensors)
    assert checkpoint.nbytes == sum(data.nbytes for data in tensors.values())
    for name, data in tensors.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.name, tensor.shape) == (name, data.shape)
        np.testing.assert_array_equal(dequantize(tensor).reshape(data.shape), data.astype(np.float32))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_gguf_file_has_hugging_faces_names_and_rows(tmp_path: Path, tensors: dict, arch: str) -> None:
    assert_holds(write_llama(tmp_path / "a.gguf", tensors, arch), tensors)


def test_rows_are_put_in_order_without_copying(tmp_path: Path, tensors: dict) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "a.gguf", tensors))
    query = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert query.row_order is not None and query.row_order[:3].tolist() == [0, 2, 4]
    assert not query.data.flags.owndata
    assert checkpoint.tensor("model.layers.0.self_attn.v_proj.weight").row_order is None


def test_a_bias_of_interleaved_rows_is_put_in_order(tmp_path: Path, tensors: dict) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    path = write_llama(tmp_path / "a.gguf", tensors)
    assert_holds(path, tensors)
    assert open_checkpoint(path).config.bool("attention_bias") is True


def test_gguf_metadata_reads_like_config_json(tmp_path: Path, tensors: dict) -> None:
    config = open_checkpoint(write_llama(tmp_path / "a.gguf", tensors)).config
    assert config.architecture == "LlamaForCausalLM"
    expected = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": 128,
    }  # fmt: skip
    assert {key: config.int(key) for key in expected} == expected
    assert config.float("rms_norm_eps") == pytest.approx(1e-5)
    assert config.float("rope_theta") == 10000.0
    assert config.bool("tie_word_embeddings") is False
    assert config.bool("attention_bias") is False
    assert config.get("rope_scaling") is None


def test_gguf_without_output_is_tied(tmp_path: Path) -> None:
    tensors = llama_tensors(np.random.default_rng(0), tied=True)
    assert open_checkpoint(write_llama(tmp_path / "a.gguf", tensors)).config.bool("tie_word_embeddings") is True


def test_gguf_rope_scaling(tmp_path: Path, tensors: dict) -> None:
    scale = "llama.rope.scaling."
    linear = {scale + "type": "linear", scale + "factor": 4.0}
    config = open_checkpoint(write_llama(tmp_path / "a.gguf", tensors, extra=linear)).config
    assert config.dict("rope_scaling") == {"rope_type": "linear", "factor": 4.0}
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 1.0}
    yarn = {scale + key: value for key, value in yarn.items()}
    config = open_checkpoint(write_llama(tmp_path / "b.gguf", tensors, extra=yarn)).config
    assert config.dict("rope_scaling") == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": pytest.approx(1 + 0.1 * np.log(4)),
    }


def test_gguf_rope_frequencies_are_a_tensor(tmp_path: Path, tensors: dict) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = open_checkpoint(write_llama(tmp_path / "a.gguf", tensors | {"rope_freqs.weight": factors}))
    np.testing.assert_array_equal(dequantize(checkpoint.tensor("rope_freqs"))[0], factors)


def test_gguf_of_another_kind_is_unsupported(tmp_path: Path, tensors: dict) -> None:
    with pytest.raises(Unsupported, match="architecture 'rwkv6'"):
        open_checkpoint(write_llama(tmp_path / "a.gguf", tensors, arch="rwkv6"))
    with pytest.raises(Unsupported, match=r"qwen2\.expert_count is 8"):
        open_checkpoint(write_llama(tmp_path / "b.gguf", tensors, "qwen2", {"qwen2.expert_count": 8}))
    with pytest.raises(Unsupported, match=r"'blk\.0\.attn_sinks\.weight' is not one that LlamaForCausalLM has"):
        open_checkpoint(write_llama(tmp_path / "c.gguf", tensors | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))


def test_gguf_in_splits(tmp_path: Path, tensors: dict) -> None:
    """As gguf-split and the converter write them."""
    write_llama(tmp_path / "m.gguf", tensors, tensors_a_part=5)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) > 2 and files[0].name == f"m-00001-of-{len(files):05}.gguf"
    for path in (files[0], files[1], tmp_path):  # any of them stands for all
        assert_holds(path, tensors)
    last = files[-1].read_bytes()
    files[-1].unlink()
    with pytest.raises(BadCheckpoint, match=f"one of {len(files)} splits, and there is no {files[-1].name}"):
        open_checkpoint(files[0])
    files[-1].write_bytes(files[1].read_bytes())
    with pytest.raises(BadCheckpoint, match=r"split\.tensors\.count is|tensor .* is in m-00002"):
        open_checkpoint(files[0])
    files[-1].write_bytes(last)
    with pytest.raises(BadCheckpoint, match="is one of"):
        open_checkpoint(files[0].rename(tmp_path / "alone.gguf"))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_of_safetensors(tmp_path: Path, tensors: dict, shards: int) -> None:
    half = {name: data.astype(np.float16) for name, data in tensors.items()}
    assert_holds(write_directory(tmp_path / "full", tensors, shards), tensors)
    assert_holds(write_directory(tmp_path / "half", half, shards), half)


def test_tying_follows_from_the_tensors_unless_it_is_said(tmp_path: Path) -> None:
    tensors = llama_tensors(np.random.default_rng(0), tied=True)
    assert open_checkpoint(write_directory(tmp_path / "a", tensors)).config.bool("tie_word_embeddings") is True
    said = CONFIG | {"tie_word_embeddings": False}
    untied = open_checkpoint(write_directory(tmp_path / "b", tensors, config=said))
    assert untied.config.bool("tie_word_embeddings") is False


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path, tensors: dict) -> None:
    path = write_llama(tmp_path / "a.gguf", tensors)
    assert open_checkpoint(tmp_path).path == path
    write_llama(tmp_path / "b.gguf", tensors)
    with pytest.raises(BadCheckpoint, match=r"2 \.gguf files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path, tensors: dict) -> None:
    with pytest.raises(BadCheckpoint, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(BadCheckpoint, match=r"neither config\.json nor a \.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match="no tensor 'x'"):
        open_checkpoint(write_directory(tmp_path / "a", tensors)).tensor("x")
    with pytest.raises(BadCheckpoint, match="no tensor 'x'"):
        open_checkpoint(write_llama(tmp_path / "b.gguf", tensors)).tensor("x")


def test_broken_shards_are_named(tmp_path: Path, tensors: dict) -> None:
    path = write_directory(tmp_path / "a", tensors, shards=2)
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "model-1.safetensors"}}))
    with pytest.raises(BadCheckpoint, match=r"model-1\.safetensors has no tensor 'ghost'"):
        open_checkpoint(path)
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "../secret"}}))
    with pytest.raises(BadCheckpoint, match=r"'\.\./secret', which is not a file beside it"):
        open_checkpoint(path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (path / "model-1.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"shard 'model-1\.safetensors'.*missing"):
        open_checkpoint(path)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        open_checkpoint(tmp_path)
