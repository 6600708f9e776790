"""Heads that draft from hidden states, beside the same in plain torch: logits, drafts, and what is refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checking import DEVICE, make_ops, on_host
from models.head_twins import (
    FORMATS,
    Drafts,
    Target,
    mtp_twin,
    write_deep_speculator,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_mtp,
)
from quire.core.draft_tree import UNKNOWN_PARENT, DraftTree, is_unknown
from quire.core.errors import BadCheckpoint, BadRequest, QuireError, Unsupported
from quire.core.params import SamplingParams
from quire.core.plan import UNKNOWN, Admission, Run, StepPlan
from quire.executors.draft_checkpoint import HeadCheckpoint
from quire.models import eagle
from quire.models.config import ModelConfig
from quire.models.registry import family, read_model_config
from quire.ops.native.liveness import needed_for_logits
from quire.ops.native.recorder import Recorder, SymbolicBatch
from quire.ops.opset import OpSet
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.gptq import GPTQOptions
from quire.quantize.plan import QuantizeOptions
from quire.quantize.run import QuantizeRun
from quire.runtime.kv import KVSize, kv_spec
from quire.runtime.runner import Runner
from quire.runtime.spec import METHODS
from quire.runtime.spec.proposer import ProposerContext
from quire.runtime.spec.proposers import Proposers
from quire.runtime.spec.taps import with_taps
from quire.weights.checkpoint import open_checkpoint

BLOCK, NUM_DRAFTS, NUM_NODES, MAX_LEN = 4, 3, 40, 96
PROMPTS = [list(range(40, 62)), [70, 3, 99, 99, 8], [17]]
TRUTH = "gpu" if torch.cuda.is_available() else "native"  # where tokens to come are taken from: the same, and quicker
SHORT = PROMPTS if torch.cuda.is_available() else [list(range(40, 47)), [70, 3], [17]]  # Triton's interpreter is slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], tuple[Path, str, Path, Drafts]]:
    """Format -> target, method, head (the target's own folder for MTP), twin."""

    @cache
    def make(name: str) -> tuple[Path, str, Path, Drafts]:
        folder = tmp_path_factory.mktemp("head")
        if name.startswith("MTP"):
            path = write_mtp(folder, name.split()[1], tiny_model)
            return path, "mtp", path, mtp_twin(Target(path), path)
        method, write, twin = FORMATS[name]
        head = write(folder)
        return tiny_model, method, head, twin(Target(tiny_model), head)

    return make


def new_runner(ops: OpSet, path: Path, method: str, head: Path, num_drafts: int = NUM_DRAFTS, **tree: int) -> Runner:
    checkpoint = open_checkpoint(path)
    file = family(checkpoint.config.architecture)
    config = read_model_config(file, checkpoint.config)
    model = file.load(ops, checkpoint, config, MAX_LEN)
    opened = HeadCheckpoint.open(method, str(head) if METHODS[method].has_model else "", checkpoint, config)
    size = KVSize(kv_spec(config, BLOCK, "float32"), 80, 0, MAX_LEN)
    context = ProposerContext(ops, model, size, 4, 32, head=opened.load(ops, model))
    made = getattr(import_module(METHODS[method].module), METHODS[method].name)(context, num_drafts, **tree)
    proposers = Proposers([(method, made)], {method: tree.get("tree_nodes", num_drafts)})
    return Runner(ops, model, size, max_rows=4, max_tokens=32, proposer=proposers)


def head_of(runner: Runner) -> Any:
    assert runner.proposer is not None
    return runner.proposer._methods[0][1]


def without_chain(runner: Runner) -> None:
    if program := getattr(head_of(runner), "_program", None):
        program.chain = None


class Steps:
    """A scheduler by hand: all prompts, and then as many drafts as are told."""

    def __init__(
        self,
        runner: Runner,
        temperatures: Sequence[float] = (0.0, 0.0, 0.0),
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> None:
        self.runner, self.number, self.temperatures = runner, 0, temperatures
        self.blocks = iter(np.random.default_rng(1).permutation(80).tolist())
        self.tokens = {row: list(prompt) for row, prompt in enumerate(prompts)}
        self.tables: dict[int, list[int]] = {row: [] for row in self.tokens}
        self.drafts: dict[int, list[int]] = {}

    def grow(self, row: int, length: int) -> list[int]:
        new = [next(self.blocks) for _ in range(-(-length // BLOCK) - len(self.tables[row]))]
        self.tables[row] += new
        return new

    def run(self, runs: list[Run], admitted: list[Admission]) -> None:
        self.number += 1
        self.output = self.runner.run(StepPlan(self.number, runs, admitted=admitted))
        for one in self.output.sampled:
            self.tokens[one.row] += one.tokens
            self.drafts[one.row] = one.proposals[0].tokens if one.proposals else []
            kept = -(-(len(self.tokens[one.row]) - 1) // BLOCK)
            if runs[0].drafts or any(run.drafts for run in runs if run.row == one.row):
                self.tables[one.row] = self.tables[one.row][:kept]

    def prefill(self) -> None:
        """The longest prompt in two chunks, the second beside the others."""
        admitted = []
        for row, tokens in self.tokens.items():
            self.grow(row, len(tokens))
            params = SamplingParams(temperature=self.temperatures[row], seed=1)
            admitted.append(Admission(row, params, 0, list(tokens), len(tokens), list(self.tables[row]), []))
        whole, *others = map(len, self.tokens.values())
        self.run([Run(0, 0, whole // 2)], admitted)
        self.run([Run(0, whole // 2, whole - whole // 2), *(Run(row, 0, n) for row, n in enumerate(others, 1))], [])

    def decode(self, drafts: dict[int, list[int]], parents: dict[int, list[int]] | None = None) -> None:
        """`parents`: of trees"""
        runs = []
        for row, tokens in self.tokens.items():
            start, count = len(tokens) - 1, 1 + len(drafts.get(row, []))
            tree = list(drafts.get(row, [])), list((parents or {}).get(row, []))
            runs.append(Run(row, start, count, self.grow(row, start + count), *tree))
        self.run(runs, [])


def check_drafts(
    backend: str, path: Path, method: str, head: Path, twin: Drafts, *, brief: bool = False, file: Path | None = None
) -> None:
    """At every step: after a prompt in chunks, without drafts, with right, wrong and half right ones. `file`: the same
    target in another format."""
    steps = Steps(new_runner(make_ops(backend), file or path, method, head), prompts=SHORT if brief else PROMPTS)
    target = Target(path)
    without_chain(steps.runner)  # its steps cannot be listened to
    heard = logits_heard(head_of(steps.runner))

    def check() -> None:
        expected = {row: twin(tokens, NUM_DRAFTS) for row, tokens in steps.tokens.items()}
        for number, lines in enumerate(heard[-NUM_DRAFTS:]):
            wanted = np.stack([of_row[1][number].numpy() for of_row in expected.values()])
            finite = np.isfinite(wanted)
            assert (np.isfinite(lines) == finite).all()
            scale = np.abs(wanted[finite]).max()
            np.testing.assert_allclose(lines[finite], wanted[finite], rtol=1e-4, atol=1e-4 * scale)
        assert steps.drafts == {row: drafts for row, (drafts, _) in expected.items()}

    def truth(row: int, count: int) -> list[int]:
        tokens = list(steps.tokens[row])
        for _ in range(count):
            with torch.no_grad():
                tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(steps.tokens[row]) :]

    steps.prefill()
    check()
    if not brief:
        steps.decode({})
        check()
    steps.decode({0: truth(0, 3), 1: [*truth(1, 1), 0, 0], 2: [0]})
    check()
    if not brief:
        steps.decode({0: truth(0, 2), 2: truth(2, 3)})
        check()


def test_a_head_goes_on_after_steps_without_drafts(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are read before they are overwritten, also where no drafts are asked for."""
    monkeypatch.setattr("quire.runtime.spec.head.MAX_UNASKED", 100)
    path, method, head, twin = made("EAGLE-3")
    steps = Steps(new_runner(make_ops(BACKENDS[-1]), path, method, head))
    proposer = head_of(steps.runner)
    propose = proposer.propose
    steps.prefill()
    proposer.propose = lambda known, counts: {}
    for number in range(9):
        steps.decode({row: [number] * row for row in range(3)})
    proposer.propose = propose
    steps.decode({})
    assert steps.drafts == {row: twin(tokens, NUM_DRAFTS)[0] for row, tokens in steps.tokens.items()}


def logits_heard(proposer: Any) -> list[np.ndarray]:
    """The logits that drafts are drawn from, one entry a draft."""
    heard: list[np.ndarray] = []
    begin = proposer._sampler.begin

    def listen(logits: Any, rows: Any, masks: Any = None) -> Any:
        heard.append(on_host(logits)[: len(rows)].copy())
        return begin(logits, rows, masks)

    proposer._sampler.begin = listen
    return heard


ALL = [*FORMATS, "MTP deepseek", "MTP glm"]
BACKENDS = ["torch", "native"] if DEVICE is None else ["gpu"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_those_of_plain_torch(made: Any, backend: str, name: str) -> None:
    check_drafts(backend, *made(name))


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_drafts_of_a_gguf_file_are_those_of_plain_torch(made: Any, family: str, tmp_path: Path) -> None:
    """DeepSeek's as llama.cpp writes it, GLM's as Quire does."""
    path, method, head, twin = made(f"MTP {family}")
    file = tmp_path / "model.gguf"
    if family == "deepseek":
        writing = pytest.importorskip("models.gguf_deepseek_writing", reason="needs the package gguf")
        writing.write_deepseek_gguf(path, file, apart=True)
    else:
        run = QuantizeRun(path, file, QuantizeOptions("F32"))
        quantize(run, CalibrationOptions(measured_tokens=0), None, GPTQOptions(), lambda phase, done, total: None)
    check_drafts(BACKENDS[-1], path, method, head, twin, file=file)


def test_drafts_of_the_gpus_op_set(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, or in Triton's interpreter."""
    monkeypatch.setattr("models.checking.DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    check_drafts("gpu", *made("EAGLE-3"), brief=True)


def test_drafts_that_follow_each_other_without_the_host(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.checking.DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    path, method, head, _ = made("EAGLE-3")
    chained, single = (Steps(new_runner(make_ops("gpu"), path, method, head), prompts=SHORT) for _ in range(2))
    drafter = head_of(chained.runner)
    assert drafter._program.chain is not None
    without_chain(single.runner)
    chained.prefill()
    single.prefill()
    for _ in range(2):
        assert chained.drafts == {row: [UNKNOWN] * NUM_DRAFTS for row in single.drafts}
        assert {row: drafter.read_drafts(row, NUM_DRAFTS) for row in chained.drafts} == single.drafts
        chained.decode(chained.drafts)
        single.decode(single.drafts)
        assert chained.tokens == single.tokens
    if not torch.cuda.is_available():  # there, what is not a graph yet is not timed
        ((num_rows, seconds), *others) = next(iter(chained.output.draft_steps.values()))
        assert num_rows == len(SHORT) and chained.output.draft_seconds >= (1 + len(others)) * seconds > 0


def test_drafts_that_only_the_device_knows_are_accepted(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that the host knows: all, some, none; beside a row whose drafts it knows."""
    monkeypatch.setattr("models.checking.DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    path, method, head, _ = made("EAGLE-3")
    known, kept = (Steps(new_runner(make_ops("gpu"), path, method, head), prompts=SHORT) for _ in range(2))
    known.prefill()
    kept.prefill()
    one_by_one = Steps(new_runner(make_ops(TRUTH), path, method, head), prompts=SHORT)
    one_by_one.prefill()
    for _ in range(NUM_DRAFTS):
        one_by_one.decode({})
    truth = {row: tokens[len(known.tokens[row]) :] for row, tokens in one_by_one.tokens.items()}
    guesses = {0: truth[0], 1: [truth[1][0], *(token ^ 1 for token in truth[1][1:])], 2: truth[2]}
    known.decode(guesses)
    sampler: Any = kept.runner.sampler
    for row in (0, 1):
        for place, token in enumerate(guesses[row], 1):
            sampler.last[row + place * sampler.num_rows] = token
    kept.decode({row: [UNKNOWN] * NUM_DRAFTS if row < 2 else of_row for row, of_row in guesses.items()})
    assert kept.tokens == known.tokens
    assert [len(kept.tokens[row]) - len(SHORT[row]) for row in kept.tokens] == [2 + NUM_DRAFTS, 3, 2 + NUM_DRAFTS]


def test_drafts_are_queued_before_the_host_knows_what_is_accepted(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that it would have asked for: behind all drafts, some and none; greedy and sampled; and again."""
    monkeypatch.setattr("models.checking.DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    path, method, head, _ = made("EAGLE-3")
    temperatures = 0.0, 1.0, 0.6
    ahead, single, truth = (
        Steps(new_runner(make_ops(backend), path, method, head), temperatures, SHORT)
        for backend in ("gpu", "gpu", TRUTH)
    )
    without_chain(single.runner)
    drafter = head_of(ahead.runner)
    for steps in (ahead, single, truth):
        steps.prefill()
    for _ in range(2 * NUM_DRAFTS + 2):
        truth.decode({})
    for accepted in ((3, 1, 0), (0, 2, 3)):
        rest = {row: truth.tokens[row][len(tokens) :] for row, tokens in ahead.tokens.items()}
        drafts = {row: [*rest[row][:n], *(token ^ 1 for token in rest[row][n:3])] for row, n in enumerate(accepted)}
        before = {row: len(tokens) for row, tokens in ahead.tokens.items()}
        heard = queued(drafter)
        ahead.decode(drafts)
        single.decode(drafts)
        assert heard == [{0, 1, 2}] and not drafter._ahead
        assert [len(tokens) - before[row] for row, tokens in ahead.tokens.items()] == [1 + n for n in accepted]
        assert ahead.tokens == single.tokens
        assert {row: drafter.read_drafts(row, NUM_DRAFTS) for row in ahead.drafts} == single.drafts


def queued(proposer: Any) -> list[set[int]]:
    """The rows whose drafts are queued from now on, while their last ones are verified."""
    heard = list[set[int]]()
    propose = proposer.propose

    def listen(known: Any, counts: Any) -> Any:
        heard.append(set(proposer._ahead))
        return propose(known, counts)

    proposer.propose = listen
    return heard


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.6)])
def test_trees_that_grow_without_the_host(made: Any, monkeypatch: pytest.MonkeyPatch, temperatures: Any) -> None:
    """They are those that the host makes of the logits of each level."""
    monkeypatch.setattr("models.checking.DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    path, method, head, _ = made("EAGLE-3")
    trees = list[list[DraftTree]]()
    for at_once in (True, False):
        runner = new_runner(make_ops("gpu"), path, method, head, tree_nodes=NUM_NODES, tree_top_k=3)
        assert head_of(runner)._program.chain.takes_trees
        if not at_once:
            without_chain(runner)
        trees.append(trees_heard(head_of(runner)))
        Steps(runner, temperatures, SHORT).prefill()
    assert len(trees[0]) == len(trees[1]) == 3
    for grown, expected in zip(*trees, strict=True):
        grown.check()
        assert (grown.tokens, grown.parents) == (expected.tokens, expected.parents)
        assert max(grown.depths()) == NUM_DRAFTS and len(grown.tokens) == NUM_NODES
        np.testing.assert_allclose(grown.confidences, expected.confidences, rtol=1e-4)


def trees_heard(proposer: Any) -> list[DraftTree]:
    """The trees that are proposed from now on."""
    heard = list[DraftTree]()
    propose = proposer.propose

    def listen(known: Any, counts: Any) -> Any:
        proposed = propose(known, counts)
        for row, tree in proposed.items():
            heard.append(proposer.grown_tree(row)() if is_unknown(tree.parents) else tree)
        return proposed

    proposer.propose = listen
    return heard


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.6)])
def test_trees_are_queued_before_the_host_knows_what_is_accepted(
    made: Any, monkeypatch: pytest.MonkeyPatch, temperatures: Any
) -> None:
    """They are those that the host makes of each level's logits: behind trees and chains of which all, some and none is
    accepted, and trees that only the device knows."""
    monkeypatch.setattr("models.checking.DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    path, method, head, _ = made("EAGLE-3")
    tree = {"tree_nodes": 8, "tree_top_k": 2}
    ahead, single, truth = (
        Steps(new_runner(make_ops(backend), path, method, head, **tree), temperatures, SHORT)
        for backend in ("gpu", "gpu", TRUTH)
    )
    without_chain(single.runner)
    for steps in (ahead, single, truth):
        steps.prefill()
    for _ in range(9):
        truth.decode({})
    drafter, unknown = head_of(ahead.runner), ([UNKNOWN] * 8, [UNKNOWN_PARENT] * 8)
    sampler: Any = ahead.runner.sampler
    for accepted in ((3, 1, 0), (0, 2, 3), (1, 0, 2)):
        trees = {row: around(truth.tokens[row][len(ahead.tokens[row]) :], n) for row, n in enumerate(accepted)}
        keep(sampler, trees[1])
        before = {row: len(tokens) for row, tokens in ahead.tokens.items()}
        heard, made_ahead, expected = queued(drafter), trees_heard(drafter), trees_heard(head_of(single.runner))
        drafter._grown[1] = lambda tree=trees[1]: [(tree.tokens, tree.parents, tree.confidences)], 0
        ahead.decode(
            {row: one.tokens for row, one in trees.items()} | {1: unknown[0]},
            {row: one.parents for row, one in trees.items()} | {1: unknown[1]},
        )
        single.decode({row: one.tokens for row, one in trees.items()}, {row: one.parents for row, one in trees.items()})
        assert heard == [{0, 1, 2}] and not drafter._ahead
        assert [len(tokens) - before[row] for row, tokens in ahead.tokens.items()] == [1 + n for n in accepted]
        assert ahead.tokens == single.tokens
        assert len(made_ahead) == len(expected) == 3
        for grown, of_host in zip(made_ahead, expected, strict=True):
            assert (grown.tokens, grown.parents) == (of_host.tokens, of_host.parents)
            np.testing.assert_allclose(grown.confidences, of_host.confidences, rtol=1e-4)
    (proposal,) = ahead.output.sampled[2].proposals
    assert is_unknown(proposal.parents) and ahead.runner.proposer is not None
    ahead.runner.proposer.read_drafts(2, proposal)  # as for a row with structured output
    assert (proposal.tokens, proposal.parents) == (expected[2].tokens, expected[2].parents)


def around(rest: list[int], num_accepted: int) -> DraftTree:
    """A tree of eight nodes in which so many of these tokens stand, not as a chain has them."""
    right = [*rest[:num_accepted], *(token ^ 1 for token in rest[num_accepted:3])]
    tokens = [right[0] ^ 2, right[0], right[1] ^ 4, right[1], right[0] ^ 4, right[2] ^ 2, right[2], right[1]]
    return DraftTree(tokens, [-1, -1, 1, 1, -1, 3, 3, 0], [0.5] * 8)


def keep(sampler: Any, tree: DraftTree) -> None:
    """For row 1, as a head would."""
    found = torch.tensor([[tree.tokens, tree.parents, [1] * 8]], dtype=torch.int32, device=sampler.device)
    sampler.keep_trees(found, torch.tensor([1], dtype=torch.int32, device=sampler.device), 3)


def target_config(path: Path) -> ModelConfig:
    checkpoint = open_checkpoint(path)
    return read_model_config(family(checkpoint.config.architecture), checkpoint.config)


@pytest.mark.parametrize("layers, taps", [(30, (2, 15, 27)), (32, (2, 16, 29)), (6, (2, 3, 3))])
def test_without_a_list_three_layers_are_read(tmp_path: Path, tiny_model: Path, layers: int, taps: Any) -> None:
    head = open_checkpoint(write_eagle3(tmp_path, eagle_config={}))
    target = target_config(tiny_model)
    deeper = replace(target, layers=layers, windows=(0,) * layers, rotated=(True,) * layers)  # type: ignore[call-arg]
    assert eagle.eagle3_config(head, deeper).taps == taps


@pytest.mark.parametrize(
    "method, write, told",
    [
        ("eagle", lambda path: write_eagle(path, hidden=64), "hidden states of 64 columns, and the model's have 72"),
        ("eagle", lambda path: write_eagle(path, vocab=300), "300 tokens, and the model has 259"),
        ("eagle3", lambda path: write_eagle3(path, target_hidden_size=80), "80 columns, and the model's have 72"),
        ("eagle3", lambda path: write_eagle3(path, eagle_config={}), "layers 2, 1, -1, and the model has no -1"),
        ("eagle3", lambda path: write_eagle3(path, draft_vocab_size=90), r"d2t is \[200\], and draft_vocab_size is 90"),
        ("eagle3", lambda path: write_eagle3(path, model_type="gpt2"), "a layer of a `gpt2`(.|\n)*llama, qwen3"),
        ("eagle", write_deep_speculator, "not those of `EAGLE`.*unknown"),
        ("medusa", write_eagle3, "medusa_num_heads is missing"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, tiny_model: Path, method: str, write: Callable[[Path], Path], told: str
) -> None:
    with pytest.raises((BadRequest, BadCheckpoint, Unsupported), match=told) as refused:
        new_runner(make_ops(BACKENDS[-1]), tiny_model, method, write(tmp_path))
    assert isinstance(refused.value, QuireError)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_a_whole_model_as_a_head_is_refused_by_what_it_is(tiny_model: Path, method: str) -> None:
    """The missing tensors were told, and that the download might be incomplete."""
    told = f"{method} drafts with a head, and {tiny_model.name} is a whole `LlamaForCausalLM`"
    with pytest.raises(BadRequest, match=re.escape(told)) as refused:
        HeadCheckpoint.open(method, str(tiny_model), open_checkpoint(tiny_model), target_config(tiny_model))
    assert "draft_model" in refused.value.hint


def test_a_family_without_the_layers_is_refused(tiny_model: Path) -> None:
    with pytest.raises(Unsupported, match="`LlamaForCausalLM` without layers that predict further tokens"):
        HeadCheckpoint.open("mtp", "", open_checkpoint(tiny_model), target_config(tiny_model))


def test_another_kind_of_layer_is_refused(made: Any) -> None:
    path = made("MTP glm")[0]
    config = target_config(path)
    own_kind = type("OtherConfig", (type(config),), {})
    one = {name: getattr(config, name)[:1] for name in ("windows", "rotated", "sparse")}
    for other in (
        replace(config, layers=1, **one),  # behind which lies an ordinary layer
        own_kind(**{field.name: getattr(config, field.name) for field in fields(config)}),
    ):
        with pytest.raises(Unsupported, match=r"`Glm4MoeForCausalLM` without a layer .* as those of DeepSeek-V3"):
            HeadCheckpoint.open("mtp", "", open_checkpoint(path), other)


def test_more_drafts_than_heads_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="is 4, and there are 3 heads"):
        new_runner(make_ops(BACKENDS[-1]), tiny_model, "medusa", write_medusa(tmp_path), num_drafts=4)


@pytest.mark.parametrize("name, spared", [(None, True), ("EAGLE-3", True), ("EAGLE", False)])
def test_only_what_a_head_reads_is_computed_for_all_tokens(
    made: Any, tiny_model: Path, name: str | None, spared: bool
) -> None:
    """Without a head, and with one that reads earlier layers, the last layer of a prompt is computed for the tokens
    that have logits."""
    ops, checkpoint, config = make_ops("native"), open_checkpoint(tiny_model), target_config(tiny_model)
    model = family(checkpoint.config.architecture).load(ops, checkpoint, config, MAX_LEN)
    forward = model.forward
    if name:
        _, method, head, _ = made(name)
        opened = HeadCheckpoint.open(method, str(head), checkpoint, config)
        forward = with_taps(forward, replace(opened.load(ops, model), taps=(0, 1, 1) if spared else (3,)))
    recorder = Recorder(kv_spec(config, BLOCK, "float32"), 8)
    forward(recorder, SymbolicBatch())
    assert (recorder.kept is not None) == (name is not None)
    assert bool(needed_for_logits(recorder.uses)) == spared
