"""The GGUF container: what is in it is read, and what is wrong with it is said."""

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import dequantize
from quire.ops.tensors import GGUF_TYPES
from quire.weights.gguf.container import GGUFFile, SkippedStrings
from quire.weights.gguf.tensors import read_directory, stored_tensor
from weights.gguf_files import entry, finish, raw_file, string


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_int32("i32", -5)
    writer.add_float32("f32", 0.5)
    writer.add_uint64("u64", 1 << 40)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "köln\0")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["", "a\0b", "日本"])
    path = finish(writer, tmp_path / "a.gguf")
    metadata = GGUFFile(path, with_strings=True).metadata
    assert metadata | {"numbers": list(metadata["numbers"])} == {
        "general.architecture": "llama", "u8": 200, "i8": -3, "u16": 60000, "i16": -30000, "i32": -5, "f32": 0.5,
        "u64": 1 << 40, "i64": -(1 << 40), "f64": 0.1, "yes": True, "text": "köln\0", "numbers": [1, 2, 3],
        "words": ["", "a\0b", "日本"],
    }  # fmt: skip
    assert GGUFFile(path).metadata["words"] == SkippedStrings(3)


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_tensors_of_every_type_are_views_of_the_file(tmp_path: Path, name: str) -> None:
    kind = GGUF_TYPES[name]
    rows, columns = 3, max(32, 2 * kind.block)
    data = np.random.default_rng(0).integers(0, 64, (rows, columns // kind.block * kind.block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("pad", np.ones(5, np.float32))
    writer.add_tensor("t", data, raw_dtype=gguf.GGMLQuantizationType[name])
    file = GGUFFile(finish(writer, tmp_path / "a.gguf"))
    found = read_directory(file)["t"]
    tensor = stored_tensor(file, found)
    assert (tensor.shape, tensor.type, found.offset % 32) == ((rows, columns), kind, 0)
    np.testing.assert_array_equal(tensor.data, data)
    assert not tensor.data.flags.owndata and not tensor.data.flags.writeable
    assert dequantize(tensor).shape == (rows, columns)


def test_version_2_is_read_and_alignment_is_kept(tmp_path: Path) -> None:
    alignment = string("general.alignment") + struct.pack("<II", 4, 64)
    directory = [entry("a", (2,), 0, 0), entry("b", (1,), 0, 64)]
    content = raw_file([alignment], directory, version=2)
    content += b"\0" * (-len(content) % 64) + struct.pack("<2f", 1.0, 2.0) + b"\0" * 56 + struct.pack("<f", 3.0)
    (tmp_path / "a.gguf").write_bytes(content)
    file = GGUFFile(tmp_path / "a.gguf")
    entries = read_directory(file)
    assert dequantize(stored_tensor(file, entries["a"])).tolist() == [[1.0, 2.0]]
    assert dequantize(stored_tensor(file, entries["b"])).tolist() == [[3.0]]


HUGE = (1 << 64) - 1
U32_KEY = string("n") + struct.pack("<II", 4, 7)


def array_key(kind: int, count: int, data: bytes = b"") -> bytes:
    return string("list") + struct.pack("<IIQ", 9, kind, count) + data


WRONG = {
    "an empty file": (b"", "is empty"),
    "another format": (b"PK\3\4" + b"\0" * 60, "not a GGUF file"),
    "a cut header": (b"GGUF\3\0", "the header at offset 4 needs 4 bytes"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "absurd number of keys": (raw_file(num_keys=HUGE), "keys"),
    "absurd number of tensors": (raw_file(num_tensors=1 << 40), "tensors"),
    "fewer keys than said": (raw_file([U32_KEY], num_keys=3, data=b"\xff" * 64), "key ''"),
    "a key name past the end": (raw_file([struct.pack("<Q", HUGE) + b"x" * 40]), "key 0"),
    "a key name that is too long": (raw_file([string("x" * 70000) + struct.pack("<II", 4, 1)]), "65535"),
    "a key that is not UTF-8": (raw_file([string(b"\xff\xfe") + struct.pack("<II", 4, 1)]), "UTF-8"),
    "a key given twice": (raw_file([U32_KEY, U32_KEY]), "'n'.* given before"),
    "an unknown value type": (raw_file([string("n") + struct.pack("<II", 13, 7)]), "'n'.*type 13"),
    "a boolean of 2": (raw_file([string("n") + struct.pack("<IB", 7, 2) + b"\0" * 8]), "boolean"),
    "an array of arrays": (raw_file([array_key(9, 1)], data=b"\0" * 64), "'list'.*array of arrays"),
    "an array of an unknown type": (raw_file([array_key(99, 1)], data=b"\0" * 64), "'list'.*type 99"),
    "an array past the end": (raw_file([array_key(12, 1 << 60)], data=b"\0" * 64), "'list'"),
    "strings past the end": (raw_file([array_key(8, 2, string("a") + struct.pack("<Q", HUGE))]), "'list'.*string"),
    "an alignment of 3": (raw_file([string("general.alignment") + struct.pack("<II", 4, 3)]), "general.alignment is 3"),
    "a tensor of no dimensions": (raw_file(tensors=[entry("t", (), 0, 0)], data=b"\0" * 64), "'t'.*0 dimensions"),
    "a tensor of five": (raw_file(tensors=[entry("t", (1,) * 5, 0, 0)], data=b"\0" * 64), "'t'.*5 dimensions"),
    "a tensor without weights": (raw_file(tensors=[entry("t", (0, 4), 0, 0)], data=b"\0" * 64), "shape"),
    "an absurd shape": (raw_file(tensors=[entry("t", (HUGE,) * 4, 0, 0)], data=b"\0" * 64), "'t'.*ends at"),
    "a tensor past the end": (raw_file(tensors=[entry("t", (16,), 0, 32)], data=b"\0" * 64), "'t'.*96 needs 64.*128"),
    "a misaligned tensor": (raw_file(tensors=[entry("t", (4,), 0, 8)], data=b"\0" * 64), "'t'.*8.*multiple of 32"),
    "half a block": (raw_file(tensors=[entry("t", (48,), 8, 0)], data=b"\0" * 64), "'t'.*48.*blocks of 32"),
    "a type that does not exist": (raw_file(tensors=[entry("t", (4,), 77, 0)], data=b"\0" * 64), "'t'.*type 77"),
    "a tensor given twice": (raw_file(tensors=[entry("t", (4,), 0, 0)] * 2, data=b"\0" * 64), "'t'.*before"),
    "tensors that overlap": (
        raw_file(tensors=[entry("a", (16,), 0, 0), entry("b", (4,), 0, 32)], data=b"\0" * 64),
        "'b'.*inside tensor 'a'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("with_strings", [False, True])
def test_a_damaged_file_is_named_with_the_place(tmp_path: Path, case: str, with_strings: bool) -> None:
    content, message = WRONG[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=message) as raised:
        read_directory(GGUFFile(path, with_strings=with_strings))
    assert "damaged.gguf" in raised.value.message


def test_what_nobody_wrote_code_for_is_unsupported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(raw_file(tensors=[entry("t", (256,), 15, 0)], data=b"\0" * 320))
    with pytest.raises(Unsupported, match="'t' is stored as Q8_K"):
        read_directory(GGUFFile(path))
    path.write_bytes(raw_file(version=1))
    with pytest.raises(Unsupported, match="version 1"):
        GGUFFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"gone\.gguf cannot be read: No such file"):
        GGUFFile(tmp_path / "gone.gguf")


def test_reading_metadata_imports_no_numpy() -> None:
    modules = "quire.weights.gguf.container, quire.text.tokenizers.tokenizer, quire.text.tokenizers.gguf"
    script = f"import sys, {modules}; print('numpy' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
