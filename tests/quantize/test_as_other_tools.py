"""What users of llama-quantize, convert_hf_to_gguf.py, llama-imatrix and llm-compressor type first."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantize.plain_models import write_plain
from quire.cli.main import main
from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint

QUICK = ("--report-tokens", "0", "-q")


def quantized(*arguments: object) -> None:
    assert main(["quantize", *map(str, arguments), *QUICK]) == 0


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["quantize", *map(str, arguments), *QUICK]) != 0
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def file(plain_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("file") / "llama.gguf"
    quantized(plain_llama, "--outfile", out, "--outtype", "auto")
    return out


def test_outtype_auto_takes_the_16_bits_that_the_weights_have(file: Path, tmp_path: Path) -> None:
    assert types(file)["output.weight"] == "BF16"  # fp32 has the range of bf16
    import torch

    write_plain(tmp_path / "half", dtype=torch.float16, num_hidden_layers=1)
    quantized(tmp_path / "half", "-o", tmp_path / "half.gguf", "--outtype", "auto")
    assert types(tmp_path / "half.gguf")["output.weight"] == "F16"


def test_the_type_may_stand_in_the_third_place_or_be_a_number(file: Path, tmp_path: Path) -> None:
    quantized("--pure", file, tmp_path / "a.gguf", "q5_k_s")
    quantized(file, tmp_path / "b.gguf", "--pure", "16")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert set(types(tmp_path / "a.gguf").values()) == {"Q5_K", "F32"}


def test_a_type_without_an_output_and_threads_get_the_whole_command(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "llama.gguf", "Q4_K_M")
    assert "an output is missing" in said and "`quire quantize llama.gguf llama-Q4_K_M.gguf Q4_K_M`" in said
    assert "taskset" in refused(capsys, file, tmp_path / "out.gguf", "Q4_K_M", "8")


def test_tensors_get_the_types_that_patterns_give_them(file: Path, tmp_path: Path) -> None:
    patterns = tmp_path / "types.txt"
    patterns.write_text("attn_(q|k)=q8_0\nnorm=Q4_0\n")
    flags = ("--tensor-type", "blk.1.ffn_down=Q6_K", "--tensor-type", "ffn_down=q5_k", "--tensor-type-file", patterns)
    quantized(file, tmp_path / "out.gguf", "Q4_K_S", *flags, "--leave-output-tensor")
    kinds = types(tmp_path / "out.gguf")
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.1.ffn_down.weight"]) == ("Q5_K", "Q6_K")
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.1.attn_k.weight"] == "Q8_0"
    assert kinds["output.weight"] == "BF16" and kinds["blk.0.attn_output.weight"] == "Q4_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"  # norms are never quantized


def test_a_pattern_whose_rows_are_no_whole_blocks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plain(tmp_path / "model", num_hidden_layers=1, hidden_size=64, num_attention_heads=2)
    said = refused(capsys, tmp_path / "model", tmp_path / "o.gguf", "Q8_0", "--tensor-type", "attn_q=Q4_K")
    assert "blk.0.attn_q.weight has rows of 64, no whole blocks of Q4_K (256)" in said
    assert not [*tmp_path.glob("o.gguf*")]


def test_copy_keeps_every_byte_and_joins_or_keeps_splits(file: Path, tmp_path: Path) -> None:
    quantized(file, tmp_path / "model.gguf", "Q4_K_M", "--split-max-size", "400K")
    first, *others = sorted(tmp_path.glob("model-*.gguf"))
    assert others
    quantized(first, tmp_path / "joined.gguf", "COPY")
    quantized(file, tmp_path / "whole.gguf", "Q4_K_M")
    whole, joined = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("whole", "joined"))
    assert {t.name: t.data.tobytes() for t in whole.tensors} == {t.name: t.data.tobytes() for t in joined.tensors}
    assert {key: field.contents() for key, field in whole.fields.items()} == {
        key: field.contents() for key, field in joined.fields.items()
    }
    quantized(first, tmp_path / "again.gguf", "COPY", "--keep-split")
    again = sorted(tmp_path.glob("again-*.gguf"))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in (first, *others)]


def test_keys_are_overridden_and_keep_their_type(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (
        "llama.context_length=int:64",
        "llama.rope.freq_base=float:500000",
        "my.note=str:a=b:c",
        "my.flag=bool:true",
    )
    quantized(file, tmp_path / "out.gguf", "COPY", *(part for each in changes for part in ("--override-kv", each)))
    before, after = gguf.GGUFReader(file).fields, gguf.GGUFReader(tmp_path / "out.gguf").fields
    values = {key: field.contents() for key, field in after.items()}
    assert (values["llama.context_length"], values["llama.rope.freq_base"]) == (64, 500000.0)
    assert (values["my.note"], values["my.flag"]) == ("a=b:c", True)
    assert after["llama.context_length"].types == before["llama.context_length"].types
    said = refused(capsys, file, tmp_path / "no.gguf", "COPY", "--override-kv", "llama.context_length=str:long")
    assert "'long' is not of the type that it has in the model" in said and "int:VALUE" in said
    said = refused(capsys, file, tmp_path / "no.gguf", "COPY", "--override-kv", "tokenizer.ggml.tokens=str:a")
    assert "it is an array in the model" in said


def test_layers_are_left_out_and_the_others_numbered_anew(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized(file, tmp_path / "out.gguf", "COPY", "--prune-layers", "0")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["llama.block_count"].contents() == 1
    before, after = open_checkpoint(file), open_checkpoint(tmp_path / "out.gguf")
    old, new = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 0))
    assert np.array_equal(dequantize(after.tensor(new)), dequantize(before.tensor(old))) and old not in after.names()
    assert "there are 0 to 1" in refused(capsys, file, tmp_path / "no.gguf", "COPY", "--prune-layers", "0,7")
    assert "names all 2 layers" in refused(capsys, file, tmp_path / "no.gguf", "COPY", "--prune-layers", "0,1")


def test_a_dry_run_names_every_tensor_and_writes_nothing(
    plain_llama: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized(file, tmp_path / "out.gguf", "Q4_K_M")
    capsys.readouterr()
    quantized(file, tmp_path / "dry.gguf", "Q4_K_M", "--dry-run", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["dry_run"] is True and not [*tmp_path.glob("dry*")]
    assert {tensor["name"]: tensor["type"] for tensor in told["tensors"]} == types(tmp_path / "out.gguf")
    quantized(plain_llama, tmp_path / "dry", "--method", "W4A16", "--algorithm", "gptq", "--dry-run")
    said = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj.weight_packed" in said and "would have" in said
    assert not [*tmp_path.glob("dry*")]


def test_flags_of_the_other_kind_of_output_are_refused(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (("--pure",), ("--keep-split",), ("--prune-layers", "1"), ("--override-kv", "a=int:1")):
        assert f"{flags[0]} is of a GGUF file" in refused(capsys, plain_llama, tmp_path / "out", "W4A16", *flags)
    assert "--dtype is of a folder" in refused(capsys, plain_llama, tmp_path / "o.gguf", "Q8_0", "--dtype", "F16")
    assert "Q8_0 has no --bits" in refused(capsys, plain_llama, tmp_path / "o.gguf", "Q8_0", "--bits", "4")


def test_the_importance_of_inputs_is_written_without_an_output(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--calibrate", "--calibration-tokens", "256", "--sequence-length", "64")
    quantized(plain_llama, *flags, "--save-imatrix", tmp_path / "alone.gguf")
    assert "alone.gguf: 15 matrices" in capsys.readouterr().out
    quantized(plain_llama, tmp_path / "out.gguf", "Q4_0", *flags, "--save-imatrix", tmp_path / "beside.gguf")
    assert (tmp_path / "alone.gguf").read_bytes() == (tmp_path / "beside.gguf").read_bytes()
    quantized(plain_llama, tmp_path / "again.gguf", "Q4_0", "--imatrix", tmp_path / "alone.gguf")
    again, out = (gguf.GGUFReader(tmp_path / name).tensors for name in ("again.gguf", "out.gguf"))
    assert [tensor.data.tobytes() for tensor in again] == [tensor.data.tobytes() for tensor in out]


def older_imatrix(newer: Path, chunks: int) -> bytes:
    """As llama-imatrix wrote it until 2025: sums of means, one for each chunk."""
    tensors = {
        tensor.name: np.asarray(tensor.data, np.float32).reshape(-1) for tensor in gguf.GGUFReader(newer).tensors
    }
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    data = struct.pack("<i", len(names))
    for name in names:
        means = tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"] * chunks
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", chunks, len(means))
        data += means.astype("<f4").tobytes()
    return data + struct.pack("<ii", chunks, 8) + b"text.txt"


def test_an_older_imatrix_gives_the_same_file(
    plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = tmp_path / "imatrix.gguf", tmp_path / "imatrix.dat"
    quantized(plain_llama, "--calibrate", "--calibration-tokens", "256", "--save-imatrix", new)
    old.write_bytes(older_imatrix(new, 8))
    for name, path in (("new", new), ("old", old)):
        quantized(plain_llama, tmp_path / f"{name}.gguf", "IQ4_NL", "--pure", "--imatrix", path)
    data = [[t.data.tobytes() for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors] for name in ("new", "old")]
    equal = np.mean(
        [np.mean(np.frombuffer(a, np.uint8) == np.frombuffer(b, np.uint8)) for a, b in zip(*data, strict=True)]
    )
    assert equal > 0.999  # means are rounded once more
    for damaged in (old.read_bytes()[:1000], b"\xff" * 100, b""):
        old.write_bytes(damaged)
        assert "is no importance matrix" in refused(capsys, plain_llama, tmp_path / "no.gguf", "Q4_0", "--imatrix", old)


def test_a_folder_is_cut_into_shards(plain_llama: Path, tmp_path: Path) -> None:
    quantized(plain_llama, tmp_path / "out", "W8A8", "--max-shard-size", "1MB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and {path.name for path in files} == {*index["weight_map"].values()}
    assert set(open_checkpoint(tmp_path / "out").names()) == set(open_checkpoint(plain_llama).names())
