"""What a name of a model means: a path, a short name, a repository; and which models are here."""

import re
from pathlib import Path

import pytest

import quire.hub
from hub.wheels import BODY
from quire.core.errors import BadCheckpoint, UnknownModel
from quire.hub import ALIASES, DEFAULT_MODEL, cache_dir, cached_models, resolve_model
from quire.hub.aliases import SMOLLM2_135M, WheelModel
from quire.hub.huggingface import is_repo_id
from quire.hub.resolve import model_name


def test_the_hub_imports_core_alone_until_a_model_is_checked() -> None:
    for path in Path(quire.hub.__file__).parent.glob("*.py"):
        modules = re.findall(r"^(?:from|import) quire\.(\w+)", path.read_text(), re.MULTILINE)
        assert set(modules) <= {"core", "hub"}, path


def test_a_gguf_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q4.gguf"
    file.write_bytes(BODY)
    files = resolve_model(str(file))
    assert (files.path, files.name) == (file, "My-Model.Q4")
    assert model_name(str(file)) == "My-Model.Q4"


def test_a_checkpoint_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "Model").mkdir()
    (tmp_path / "Model" / "config.json").write_text("{}")
    files = resolve_model(f"{tmp_path}/Model/")
    assert (files.path, files.name) == (tmp_path / "Model", "Model")


def test_a_directory_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(BODY)
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(BODY)
    with pytest.raises(UnknownModel, match="2 GGUF files"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(BadCheckpoint, match="not a GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_an_unknown_name_lists_what_was_tried_and_similar_names() -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve_model("smolm2")
    lines = caught.value.message.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1.", "2.", "3."]
    assert "`smollm2`" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["", "../../etc/missing", "~/missing.gguf", "missing.gguf", "a/b/c", "owner/..", "x" * 200]
)
def test_a_name_that_is_no_repository_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(UnknownModel, match="owner/name"):
        resolve_model(name)


def test_the_default_model_is_an_alias() -> None:
    assert isinstance(ALIASES[DEFAULT_MODEL], WheelModel)


def test_the_default_model_is_listed_by_its_short_name(own_cache: Path) -> None:
    (own_cache / "models").mkdir(parents=True)
    (own_cache / "models" / SMOLLM2_135M.file_name).write_bytes(BODY)
    assert [(model.name, model.num_bytes) for model in cached_models()] == [(DEFAULT_MODEL, len(BODY))]


def test_a_model_that_was_downloaded_is_suggested_once(own_cache: Path) -> None:
    (own_cache / "models").mkdir(parents=True)
    (own_cache / "models" / SMOLLM2_135M.file_name).write_bytes(BODY)
    with pytest.raises(UnknownModel) as caught:
        resolve_model("smolm2")
    assert str(caught.value).count(f"`{DEFAULT_MODEL}`") == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/quire")


def test_a_repository_with_weights_of_pytorch_is_listed(tmp_path: Path) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--owner--old" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "pytorch_model.bin").write_bytes(BODY)
    assert [(model.name, model.num_bytes) for model in cached_models()] == [("owner/old", len(BODY))]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "a/b", "a-b/c_d.e"])
def test_repository_ids(name: str) -> None:
    assert is_repo_id(name)


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "../b", "a/..", "a/b..c", "/a", "a/", "a b/c", "a/b\n", "-a/b", "a\\b/c"]
)
def test_what_is_no_repository_id(name: str) -> None:
    assert not is_repo_id(name)
