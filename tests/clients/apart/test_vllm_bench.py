"""`vllm bench serve`, which knows when each token came, over both of the routes it is mostly used with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from clients.served import SECONDS

# What `vllm bench serve` runs, twice. `vllm` itself reads all of its commands first, and so needs all that vLLM does.
BENCH = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    each = [f"--backend={backend}", f"--endpoint={endpoint}", f"--result-filename={backend}"]
    main(parser.parse_args([*sys.argv[1:], *each]))
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Of bytes: the prompts that are drawn from it are a text like any to the model."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {token: at for at, token in enumerate(["<|end|>", *sorted(ByteLevel.alphabet())])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def test_a_benchmark(address: str, tokenizer: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCH, "--base-url", address, "--model", "smollm2", "--tokenizer", str(tokenizer)]
    command += ["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "4", "--ignore-eos"]
    command += ["--num-prompts", "4", "--max-concurrency", "2", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for backend in ("openai", "openai-chat"):
        result = json.loads((tmp_path / backend).read_text())
        assert (result["completed"], result["failed"]) == (4, 0), result["errors"]
        assert result["output_lens"] == [4] * 4 and result["total_input_tokens"] > 0
        assert all(gaps for gaps in result["itls"]) and all(first > 0 for first in result["ttfts"])
