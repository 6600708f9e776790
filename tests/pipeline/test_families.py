"""Models that stages compute one after the other, against one process: the same bits, for all kinds of layers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import Gemma3nTextConfig, Gemma4TextConfig, Lfm2Config, OPTConfig, Qwen3MoeConfig

from models.checking import PROMPT, TINY, Cases, random_model
from models.test_lfm2 import HYBRID
from models.test_newer_families import GEMMA_3N, GEMMA_4
from models.test_other_families import CASES as BY_NAME
from pipeline.stages_here import InStages
from quire.core.errors import BadRequest, Unsupported
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.stage import check_pipeline
from quire.ops.stages.parts import check_stages, divide, divide_at
from quire.ops.stages.trace import BEFORE_LAYERS, LayerTrace, ModelTrace
from ranks.rank_threads import OneProcess, steps
from ranks.test_families import CASES as DIVIDED_BY_RANKS

MORE: Cases = {
    "lfm2": (Lfm2Config, HYBRID),  # the first of four stages has a convolution and no attention
    "opt-projected": (OPTConfig, {"word_embed_proj_dim": 48, "ffn_dim": 96, "do_layer_norm_before": False}),
    "qwen3-moe": (Qwen3MoeConfig, {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
}
SHARED = ("gemma-3n", "gemma-4")  # layers of theirs share keys and values
CASES = {name: case for name, case in DIVIDED_BY_RANKS.items() if name not in SHARED} | MORE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """With four layers, where the case does not say which kinds they have."""

    @cache
    def make(name: str) -> Path:
        config, options = CASES[name]
        layers = {} if options.keys() & {"layer_types", "no_rope_layers"} else {"num_hidden_layers": 4, "n_layer": 4}
        path = tmp_path_factory.mktemp(name)
        random_model(config(**{**TINY, **options, **layers}), seed=len(name)).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_bits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    path = checkpoint(name)
    whole = OneProcess("native", path)
    alone = steps(whole.logits, PROMPT)
    for size in sorted({2, whole.model.config.layers}):
        stages = InStages(path, size)
        for ours, theirs in zip(steps(stages.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_stage_has_its_part_of_the_weights_and_of_the_cache(checkpoint: Callable[[str], Path]) -> None:
    whole = OneProcess("native", checkpoint("llama"))
    stages = InStages(checkpoint("llama"), 3).stages
    assert sum(stage.model.weight_bytes for stage in stages) == whole.weight_bytes
    assert all(stage.model.weight_bytes < 0.6 * whole.weight_bytes for stage in stages)
    own = [stage.cache.own.spec.num_layers for stage in stages]
    assert sum(own) == stages[0].spec.num_layers == 4 and min(own) >= 1


def test_adapters_are_where_their_layers_are(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from models.lora_files import adapter

    path = checkpoint("llama")
    modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(path)
    adapter(model, tmp_path / "lora", seed=3, r=5, lora_alpha=7, target_modules=modules)
    adapters = {"lora": tmp_path / "lora"}
    alone = steps(OneProcess("native", path, adapters).logits, PROMPT, adapter=0)
    assert not np.array_equal(alone[0], steps(OneProcess("native", path).logits, PROMPT)[0]), "it adapts nothing"
    for ours, theirs in zip(steps(InStages(path, 3, adapters).logits, PROMPT, adapter=0), alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def traced(costs: list[int], head: int = 0) -> ModelTrace:
    trace = ModelTrace([*costs, head])
    trace.layers = {index: LayerTrace({index}, {index}) for index in range(len(costs))}
    trace.layers |= {BEFORE_LAYERS: LayerTrace(), len(costs): LayerTrace({len(costs)})}
    return trace


def test_the_largest_stage_is_as_small_as_it_can_be() -> None:
    assert [(part.first, part.end) for part in divide(traced([1] * 6), 6, 2)] == [(0, 3), (3, 6)]
    assert [(part.first, part.end) for part in divide(traced([1] * 6, head=4), 6, 2)] == [(0, 5), (5, 6)]
    assert [part.end for part in divide(traced([5, 1, 1, 1, 1, 1]), 6, 3)] == [1, 3, 6]
    assert divide(traced([1, 1], head=3), 2, 2)[1].weights == {1, 2}, "the head belongs to the last stage"


def test_layers_that_share_keys_and_values_are_not_divided() -> None:
    trace = traced([1] * 4)
    trace.layers[3].kv = {2}
    assert [part.first for part in divide(trace, 4, 3)] == [0, 1, 2]
    with pytest.raises(Unsupported, match=r"share keys and values: stages may begin at layers 1 to 2.*\n.*size of 3"):
        divide(trace, 4, 4)
    with pytest.raises(Unsupported, match=r"3 layers on the CPU, and layers .* share keys and values.*\n.*use 2 of"):
        divide_at(trace, 4, 3)
    trace.layers[3].kv = {0}
    with pytest.raises(Unsupported, match=r"no stage may begin between them.*\n.*leave out pipeline_parallel_size"):
        divide(trace, 4, 2)


SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
GEMMAS: Cases = {
    "gemma-4": (Gemma4TextConfig, GEMMA_4 | SIX),
    "gemma-3n": (Gemma3nTextConfig, GEMMA_3N | SIX | {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0, 0.0]}),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_layers_that_share_keys_and_values_may_be_behind_others(tmp_path: Path, name: str) -> None:
    """Layers 4 and 5 read those of layers 2 and 3; and all have inputs of their own, which the first stage makes."""
    config, options = GEMMAS[name]
    random_model(config(**{**TINY, **options}), seed=3).save_pretrained(tmp_path)
    alone = steps(OneProcess("native", tmp_path).logits, PROMPT)
    for size in (2, 3):
        stages = InStages(tmp_path, size)
        assert stages.stages[-1].part.first == 2 and len(stages.stages[0].part.handed_on) > 4
        for ours, theirs in zip(steps(stages.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["doge", "zamba"])
def test_what_layers_read_of_layers_long_before_goes_with_the_hidden_states(tmp_path: Path, name: str) -> None:
    config, options = BY_NAME[name]
    random_model(config(**{**TINY, **options}), seed=3).save_pretrained(tmp_path)
    whole = OneProcess("native", tmp_path)
    alone = steps(whole.logits, PROMPT)
    for size in sorted({2, whole.model.config.layers}):
        stages = InStages(tmp_path, size)
        assert all(len(stage.part.handed_on) == 2 for stage in stages.stages[:-1])
        for ours, theirs in zip(steps(stages.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_what_stages_cannot_do_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"pipeline_parallel_size is 5, and the model has 4 layers.*\n.*use 1 to 4"):
        check_stages(5, 4)
    with pytest.raises(BadRequest, match=r"there are 64 stages at most.*\n.*use 1 to 64"):
        check_stages(65, 100)
    with pytest.raises(Unsupported, match=r"not kept on disk.*\n.*kv_disk_path"):
        check_pipeline(ExecutorOptions(kv_disk_path="x"), 2)
    for backend in ("native", "cuda"):
        with pytest.raises(Unsupported, match=r"a stage of one rank has all experts"):
            check_pipeline(ExecutorOptions(backend=backend, enable_expert_parallel=True), 2)
    check_pipeline(ExecutorOptions(backend="cuda"), 2)
