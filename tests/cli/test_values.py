import pytest

from quire.cli.values import read_bytes, read_count, read_truth


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("-1", -1),
        (" 7 ", 7),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert read_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 4 << 30),
        ("4G", 4 << 30),
        ("512MB", 512_000_000),
        ("512 MiB", 512 << 20),
        ("0.5GiB", 1 << 29),
        ("10kB", 10_000),
        ("123", 123),
        ("8B", 8),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert read_bytes(text) == value


@pytest.mark.parametrize("text", ["", "four", "4 4", "4X", "1e3", "1.0001k", "0x10", "٣", "k"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        read_count(text)


@pytest.mark.parametrize("text", ["", "4Gb", "GiB", "4GiBs", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        read_bytes(text)


def test_truths() -> None:
    assert [read_truth(text) for text in ("1", "True", "ON", "no", "0")] == [True, True, True, False, False]
    with pytest.raises(ValueError, match="perhaps"):
        read_truth("perhaps")
