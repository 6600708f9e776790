"""`vllm bench serve`, which knows when each token came, over both of the routes it is mostly used with."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_a_benchmark(address: str, tiny_model: Path, tmp_path: Path) -> None:
    """The prompts are drawn from the vocabulary of another model: to this one they are a text like any."""
    command = [sys.executable, "-c", BENCH, "--base-url", address, "--model", "smollm2", "--tokenizer", str(tiny_model)]
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
