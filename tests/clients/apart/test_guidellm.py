"""GuideLLM, from its command line: a short load, and a report without errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

from clients.served import SECONDS


def test_a_benchmark(address: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"Count to {n}.", "output_tokens_count": 4}) for n in range(6)))
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={address},model=smollm2"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    command += ["--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={tmp_path / 'report.json'}"]
    one = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # each takes seconds to start
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, cwd=tmp_path, env=one)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    [benchmark] = report["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4 and not requests["errored"], requests["errored"]
    for request in requests["successful"]:
        assert request["output_tokens"] == 4 and request["prompt_tokens"] > 4 and request["output"]
