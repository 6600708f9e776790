"""`quire cache`: what is on disk is shown, checked and removed."""

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.core.block_keys import page_key, state_key
from runtime.test_disk_tier import driven, keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks of one model."""
    with driven(tmp_path) as one:
        one.save(*enumerate(keys(3)))
    (tmp_path / "f00d" / "model.json").write_text(json.dumps({"model": "tiny", "block_size": 16}))
    return tmp_path


def test_models_are_listed_with_their_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["cache", "ls", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "48 tokens" in told and "free on its disk" in told
    monkeypatch.setenv("QUIRE_KV_DISK_PATH", str(folder))
    assert main(["cache", "ls", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert (model["model"], model["num_blocks"], model["kv_cache_dtype"]) == ("tiny", 3, "?")


def test_states_and_window_pages_are_counted_beside_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = next(folder.rglob("*.kv"))
    for key, count in ((state_key(b""), 1), (page_key(b""), 2)):
        for number in range(count):
            block.with_name(f"{number}{block.stem[1:]}{key.hex()}.kv").write_bytes(block.read_bytes())
    assert main(["cache", "ls", str(folder)]) == 0
    assert "48 tokens       1 states       2 window pages" in capsys.readouterr().out


def test_damaged_blocks_are_found_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(folder)]) == 0
    file = next(folder.rglob("*.kv"))
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["cache", "verify", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["damaged"] == [str(file)]
    assert not file.exists() and len(list(folder.rglob("*.kv"))) == 2


def test_one_model_or_all_are_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.txt").write_text("not a block")
    assert main(["cache", "clear", str(folder), "beef"]) == 2
    assert "has no model `beef`" in capsys.readouterr().err
    assert main(["cache", "clear", "beef", "--kv-disk-path", str(folder)]) == 2
    assert "has no model `beef`" in capsys.readouterr().err
    assert main(["cache", "clear", "f0", "--kv-disk-path", str(folder)]) == 0
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]


def test_what_an_engine_writes_after_a_clear_is_listed_and_cleared_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with driven(tmp_path) as one:
        one.save((0, keys(1)[0]))
        assert main(["cache", "clear", str(tmp_path)]) == 0 and not list(tmp_path.iterdir())
        one.save((1, keys(1)[0]))
    capsys.readouterr()
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["models"]
    assert (listed["num_blocks"], listed["kv_cache_dtype"], listed["block_size"]) == (1, "float16", 16)


def test_blocks_whose_description_is_lost_are_listed_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "f00d" / "model.json").unlink()
    (folder / "photos" / "a" / "b").mkdir(parents=True)
    (folder / "photos" / "a" / "b" / "c.kv").write_bytes(b"not ours")
    assert main(["cache", "clear", str(folder)]) == 0
    assert [file.name for file in folder.iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verfy", "."], "did you mean `verify`?"),
        ([], "--kv-disk-path"),
        (["ls"], "--kv-disk-path"),
        (["ls", ".", "f0", "--kv-disk-path", "."], "given twice"),
        (["ls", "--what"], "see `quire cache --help`"),
        (["ls", "/does/not/exist"], "there is no directory"),
    ],
)
def test_mistakes_are_explained(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_KV_DISK_PATH", raising=False)
    assert main(["cache", *argv]) == 2
    assert message in capsys.readouterr().err
