"""A safetensors file whose header is wrong is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import dequantize
from quire.weights.raw import RawTensors
from quire.weights.safetensors import SafetensorsFile


def write(path: Path, header: Any, data: bytes = b"\0" * 64) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def tensor(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def tensors_of(path: Path) -> RawTensors:
    file = SafetensorsFile(path)
    return RawTensors(path, dict.fromkeys(file.entries, file))


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {"a": values, "half": values.astype(np.float16), "scalar": np.array(3.0, np.float32)}
    save_file(tensors, tmp_path / "m.safetensors")
    file = tensors_of(tmp_path / "m.safetensors")
    stored = file.tensor("a")
    assert stored.shape == (2, 3, 4) and stored.data.shape == (6, 16) and not stored.data.flags.owndata
    np.testing.assert_array_equal(dequantize(stored), values.reshape(6, 4))
    np.testing.assert_array_equal(dequantize(file.tensor("half")), values.reshape(6, 4))
    assert dequantize(file.tensor("scalar")).tolist() == [[3.0]]


def test_bfloat16_and_empty_tensors(tmp_path: Path) -> None:
    header = {"b": tensor("BF16", [2], [0, 4]), "none": tensor("F32", [0, 3], [4, 4]), "__metadata__": {"format": "pt"}}
    file = tensors_of(write(tmp_path / "m.safetensors", header, b"\x80\x3f\x00\xc0"))
    assert dequantize(file.tensor("b")).tolist() == [[1.0, -2.0]]
    assert dequantize(file.tensor("none")).shape == (0, 3)


def test_a_type_nobody_wrote_code_for_is_unsupported_when_it_is_wanted(tmp_path: Path) -> None:
    header = {"a": tensor("I32", [1], [0, 4]), "b": tensor("F99", [1], [4, 5])}
    file = tensors_of(write(tmp_path / "m.safetensors", header))
    for name, dtype in (("a", "I32"), ("b", "F99")):
        with pytest.raises(Unsupported, match=f"{name}.*{dtype}"):
            file.tensor(name)


WRONG = {
    "a header that is not JSON": (b"{nonsense", "not JSON"),
    "a header that is not UTF-8": (b"\xff\xfe{}", "not JSON"),
    "a header that is deep": (b"[" * 100_000, "not JSON"),
    "a header that is a list": ([], "not a JSON object"),
    "a shape of a million axes": ({"a": tensor(shape=[9] * 1_000_000)}, "has the shape"),
    "a shape of a number with many digits": ({"a": tensor(shape=[10**4000, 0])}, "has the shape"),
    "a name that is given twice behind many others": (
        b"{" + b",".join(b'"%d":0' % (index % 199_999) for index in range(200_000)) + b"}",
        "given twice",
    ),
    "a name given twice": (b'{"a": {}, "a": {}}', "'a' is given twice"),
    "a tensor that is a number": ({"a": 1}, "'a' is not described"),
    "a shape of fractions": ({"a": tensor(shape=[1.5])}, "'a' has the shape"),
    "a negative shape": ({"a": tensor(shape=[-4])}, "'a' has the shape"),
    "no dtype": ({"a": tensor(dtype=None)}, "'a' has the dtype None"),
    "one offset": ({"a": tensor(offsets=[0])}, "'a' has the offsets"),
    "offsets backwards": ({"a": tensor(offsets=[16, 0])}, "'a' is at offset"),
    "data past the end": ({"a": tensor(shape=[32], offsets=[0, 128])}, "'a' is at offset .* file ends at"),
    "a shape that is another size": ({"a": tensor(shape=[5])}, "'a' at offset .* 16 bytes.*needs 20"),
    "an absurd shape": ({"a": tensor(shape=[1 << 62, 1 << 62])}, "'a' at offset"),
    "tensors that overlap": ({"a": tensor(), "b": tensor(offsets=[8, 24])}, "'b' at offset .* inside tensor 'a'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_file_is_named_with_the_tensor(tmp_path: Path, case: str) -> None:
    header, message = WRONG[case]
    with pytest.raises(BadCheckpoint, match=message) as raised:
        SafetensorsFile(write(tmp_path / "damaged.safetensors", header))
    assert "damaged.safetensors" in raised.value.message


@pytest.mark.parametrize("content", [b"", b"\1\2", b"\xff" * 8 + b"{}", (1000).to_bytes(8, "little") + b"{}"])
def test_a_cut_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cut.safetensors").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"cut\.safetensors"):
        SafetensorsFile(tmp_path / "cut.safetensors")
