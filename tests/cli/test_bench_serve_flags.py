"""The flags of `quire bench serve`, and mistakes in them."""

import math
import socket
from dataclasses import fields

import pytest

from quire.cli import main as cli
from quire.cli.bench.serve.flags import DatasetFlags, LoadFlags, ResultFlags, ServerFlags

NO_DEFAULT = """
base_url model served_model_name tokenizer extra_body dataset_path input_len output_len sharegpt_output_len
max_concurrency ramp_up_strategy ramp_up_start_rps ramp_up_end_rps temperature top_p top_k min_p frequency_penalty
presence_penalty repetition_penalty logprobs result_dir result_filename label
"""
VLLM_DEFAULTS = {
    "backend": "openai",
    "host": "127.0.0.1",
    "port": 8000,
    "ready_check_timeout_sec": 0,
    "dataset_name": "random",
    "num_prompts": 1000,
    "seed": 0,
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 0.0,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 256,
    "prefix_repetition_suffix_len": 256,
    "prefix_repetition_num_prefixes": 10,
    "prefix_repetition_output_len": 128,
    "custom_output_len": 256,
    "request_rate": math.inf,
    "burstiness": 1.0,
    "num_warmups": 0,
    "save_result": False,
    "save_detailed": False,
    "append_result": False,
    "lora_assignment": "random",
    "disable_tqdm": False,
    "disable_shuffle": False,
    "no_oversample": False,
    "insecure": False,
} | dict.fromkeys(NO_DEFAULT.split())


def test_flags_have_the_defaults_of_vllm() -> None:
    flags = [field for kind in (ServerFlags, DatasetFlags, LoadFlags, ResultFlags) for field in fields(kind)]
    defaults = {field.name: field.default for field in flags}
    assert VLLM_DEFAULTS.items() <= defaults.items()
    assert all(field.metadata["help"] for field in flags)


@pytest.mark.parametrize("name", ["sglang", "llama.cpp", "lmdeploy"])
def test_servers_that_vllms_command_knows_by_name_are_asked_as_openais(name: str) -> None:
    flags = ServerFlags(backend=name)
    assert flags.path == "/v1/completions" and not flags.is_chat


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert cli.main(["bench", "serve", "--base-url", url]) == cli.USAGE_ERROR
    assert f"error: no server at {url}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--dataset-name shared-prefx", "did you mean `shared-prefix`?"),
        ("--dataset-name my-own", "choose from random, prefix_repetition"),
        ("--dataset-name hf", "is one of `vllm bench serve` that is not here\nhint: datasets of the hub"),
        ("--dataset-name sonnet --sonnet-input-len 550", "--dataset-name prefix_repetition"),
        ("--dataset-name random-rerank", "is not put under load here"),
        ("--profile", "`quire bench serve` has no --profile, which `vllm bench serve` has"),
        ("--plot-timeline --timeline-itl-thresholds 25,50", "--save-detailed writes the times"),
        ("--hf-split train", "has no --hf-split"),
        ("--lora-modules sql --lora-assignment any", "`any` is not one of random, round-robin"),
        ("--request-id-prefix a\tb", "a header has printable characters"),
        ("--dataset-name burstgpt", "needs a file: give --dataset-path"),
        ("--backend tensorrt-llm", "choose from openai, vllm, openai-chat"),
        ("--request-rate -2", "--request-rate is -2\nhint: it must be above 0"),
        ("--request-rate 0", "--request-rate is 0"),
        ("--request-rate nan", "--request-rate is nan"),
        ("--burstiness 0", "--burstiness is 0"),
        ("--num-prompts 0", "--num-prompts is 0"),
        ("--max-concurrency 0", "--max-concurrency is 0"),
        ("--random-range-ratio 1", "at least 0 and below 1"),
        ("--ramp-up-strategy linear", "goes from one rate to another"),
        ("--ramp-up-start-rps 1", "rates and no strategy"),
        ("--goodput ttft=500", "write NAME:VALUE"),
        ("--goodput tftt:500", "did you mean `ttft`?"),
        ("--goodput ttft:soon", "is no time"),
        ("--metric-percentiles 50,101", "from 0 to 100"),
        ("--percentile-metrics ttft,tpto", "did you mean `tpot`?"),
        ("--extra-body nonsense", "--extra-body is not JSON"),
        ("--extra-body [1]", "--extra-body is not a JSON object"),
        ("--header bad", "write NAME=VALUE"),
        ("--base-url localhost:8000", "it looks like http://127.0.0.1:8000"),
        ("--base-url http://127.0.0.1:99999", "it looks like http://127.0.0.1:8000"),
        ("--base-url http://127.0.0.1:port", "it looks like http://127.0.0.1:8000"),
        ("--port 99999", "give at most 65535"),
        ("--endpoint v1", "it begins with /"),
        ("--dataset-name custom", "needs a file: give --dataset-path"),
        ("--dataset-path x.json", "has no --dataset-path"),
        ("--dataset-name custom --dataset-path /nowhere", "/nowhere cannot be read"),
        ("--dataset-name sharegpt --dataset-path /nowhere --output-len 2", "/nowhere cannot be read"),
        ("--dataset-name trace --dataset-path /nowhere", "/nowhere cannot be read"),
        ("--dataset-name trace --dataset-path /nowhere --request-rate 2", "a trace says itself when requests come"),
        ("--dataset-name simulated --burstiness 2", "a rate and bursts only"),
        ("--result-dir /proc/nowhere", "the folder /proc/nowhere cannot be made"),
        ("--result-dir / --result-filename proc", "/proc cannot be written"),
        ("--num-promts 3", "did you mean `--num-prompts`?"),
    ],
)
def test_mistakes_are_named(flags: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "x", *flags.split(" ")]) == 2
    assert complaint in capsys.readouterr().err
