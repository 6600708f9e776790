"""What `quire quantize` does: calibrate, write, measure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.quantize import quality
from quire.quantize.calibration import collect_importance, read_text, sequences
from quire.quantize.device import Device, Logits, Report
from quire.quantize.gguf_plan import gguf_tensors
from quire.quantize.gptq import GPTQOptions
from quire.quantize.gptq_pass import GPTQPass
from quire.quantize.huggingface_plan import fitting_group
from quire.quantize.imatrix import read_imatrix, write_imatrix
from quire.quantize.methods import COPY, LINEAR_METHODS
from quire.quantize.mix import MixTarget
from quire.quantize.mix_plan import MixPlan
from quire.quantize.output import PartialOutput
from quire.quantize.plan import Importance, QuantizeError, WritePlan, count
from quire.quantize.quality import Quality
from quire.quantize.run import QuantizeRun, Written, write
from quire.quantize.smoothing import smoothed
from quire.weights.checkpoint import Checkpoint, open_checkpoint

SMOOTHING = ("awq", "smoothquant")
MEASURED_WEIGHTS = 2 * 10**9  # larger models are measured only when asked to
DEFAULT_MEASURED_TOKENS = 1024
GPTQ_LAYOUTS = ("GPTQ", "GPTQ_V2")
ACT_ORDER_NOTE = (
    "compressed-tensors reads groups of inputs in another order up to version 0.19 only; "
    "without --act-order, any version does; `--method GPTQ` keeps the order"
)


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """`text`: a file; None: the default text. `wanted`: whether the command line asks for a calibration at all."""

    wanted: bool = False
    text: Path | None = None
    num_tokens: int = 16384
    length: int = 512
    imatrix: Path | None = None
    save_imatrix: Path | None = None
    measured_tokens: int | None = None  # None: DEFAULT_MEASURED_TOKENS, unless the model is large


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    written: Written
    quality: Quality | None
    losses: dict[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dry: bool = False  # nothing was written

    def as_json(self) -> dict[str, Any]:
        plan = self.written.plan
        tensors = [{"name": t.name, "type": t.type, "shape": [*t.shape], "bytes": t.nbytes} for t in plan.tensors]
        return {
            **({"dry_run": True, "tensors": tensors} if self.dry else {}),
            "output": str(plan.out),
            "bytes": plan.nbytes,
            "bits_per_weight": round(plan.bits_a_weight, 4),
            "types": {kind: {"tensors": t, "weights": w} for kind, (t, w) in plan.types().items()},
            "resumed_tensors": self.written.resumed,
            "quality": None if self.quality is None else self.quality.as_json(),
            "losses": self.losses,
            "notes": [*plan.notes, *self.notes],
        }


def check_request(
    run: QuantizeRun, calibration: CalibrationOptions, algorithm: str | None, options: GPTQOptions
) -> None:
    """What needs no look at the model, so that it can be refused before a download."""
    run.check_output()
    _algorithm(run, algorithm, options)
    check_calibration(_with_activations(run, calibration))


def check_calibration(calibration: CalibrationOptions) -> None:
    if calibration.wanted:
        read_text(calibration.text)
    if calibration.imatrix is not None and not calibration.imatrix.is_file():
        raise QuantizeError(
            f"--imatrix is {calibration.imatrix}, and there is no such file", "`--save-imatrix` makes one"
        )
    saved = calibration.save_imatrix
    if saved is not None and not saved.parent.is_dir():
        raise QuantizeError(f"--save-imatrix is {saved}, and there is no folder {saved.parent}", "make it first")


def quantize(
    run: QuantizeRun,
    calibration: CalibrationOptions,
    algorithm: str | None,
    options: GPTQOptions,
    report: Report,
    target: MixTarget | None = None,
    *,
    dry: bool = False,
) -> QuantizeResult:
    """`target`: of a mix, whose formats are chosen by sensitivity. `dry`: plan and check alone."""
    chosen = _algorithm(run, algorithm, options)
    if target is not None:
        if run.options.patterns:
            raise QuantizeError("a mix chooses the format of each tensor, and --tensor-type names some", "leave it out")
        if chosen in SMOOTHING:
            raise QuantizeError(f"--algorithm {chosen} scales layers for one format", "a mix has nearest and gptq")
        calibration = replace(calibration, wanted=calibration.wanted or calibration.imatrix is None)
    checkpoint = run.open()
    run, notes = _with_fitting_groups(run, checkpoint)
    num_weights = run.plan(checkpoint).num_weights  # what cannot be written is refused before the work
    planned_mix = None if target is None else MixPlan(run, checkpoint, target)
    if dry and target is None:
        return QuantizeResult(Written(run.plan(checkpoint), 0), None, {}, notes, dry=True)
    calibration = _with_activations(run, calibration)
    text_needed = calibration.wanted or chosen != "nearest" or target is not None
    calibrated: list[list[int]] = []
    held_out: list[list[int]] = []
    source = str(calibration.text.name) if calibration.text else "the default text"
    measured = 0 if run.options.method == COPY else _measured_tokens(calibration, num_weights)
    if text_needed or measured:
        text = read_text(calibration.text)
        calibrated, held_out = sequences(
            run.source, text, calibration.length, calibration.num_tokens, measures=measured > 0
        )
    if chosen not in SMOOTHING:
        rounding = "nearest" if target is not None else chosen  # a mix needs the importance in any case
        run = replace(run, importance=_importance(run, checkpoint, calibration, rounding, calibrated, source, report))
    packed = run.options.method not in GPTQ_LAYOUTS
    notes += [ACT_ORDER_NOTE] if run.formats.act_order and packed else []
    if planned_mix is not None:
        mix = planned_mix.chosen(run, calibrated, report)
        run = mix.run
        notes.append(mix.note)
        if dry:
            return QuantizeResult(Written(run.plan(checkpoint), 0), None, {}, notes, dry=True)
    losses: dict[str, float] = {}
    written = _write(run, chosen, checkpoint, options, calibrated, source, report, notes, losses)
    result = _measure(checkpoint, written.plan.out, held_out, measured, run.device, report) if measured else None
    return QuantizeResult(written, result, losses, notes)


def save_importance(run: QuantizeRun, calibration: CalibrationOptions, report: Report) -> int:
    """The importance of inputs alone, as `llama-imatrix` makes it -> the number of matrices."""
    checkpoint = run.open()
    tensors = gguf_tensors(checkpoint)  # what has no names in GGUF is refused before the work
    text = read_text(calibration.text)
    used, _ = sequences(run.source, text, calibration.length, calibration.num_tokens, measures=False)
    source = calibration.text.name if calibration.text else "the default text"
    importance = collect_importance(checkpoint, used, source, run.device, report)
    assert calibration.save_imatrix is not None
    return write_imatrix(calibration.save_imatrix, importance, tensors, len(used), calibration.length)


def _with_fitting_groups(run: QuantizeRun, checkpoint: Checkpoint) -> tuple[QuantizeRun, list[str]]:
    """Where no size of groups is given and the method's divides few layers, one that divides almost all."""
    method = run.options.method
    if run.forms is None or run.formats.group_size is not None or "group_size" not in LINEAR_METHODS[method].options:
        return run, []
    if (size := fitting_group(checkpoint, run.forms, run.options)) is None:
        return run, []
    note = f"groups of {size}: most layers have inputs that are no multiple of {method}'s own size"
    return replace(run, formats=replace(run.formats, group_size=size)), [note]


def _with_activations(run: QuantizeRun, calibration: CalibrationOptions) -> CalibrationOptions:
    """Scales of inputs or of the KV cache need a calibration."""
    if not (run.options.kv_scales or (run.forms is not None and run.forms.needs_inputs)):
        return calibration
    if calibration.imatrix is not None:
        raise QuantizeError(
            f"{run.options.method} needs the largest inputs, which {calibration.imatrix} does not have",
            "use --calibrate instead",
        )
    return replace(calibration, wanted=True)


def _algorithm(run: QuantizeRun, algorithm: str | None, options: GPTQOptions) -> str:
    method = run.options.method
    default = LINEAR_METHODS[method].algorithm if method in LINEAR_METHODS else "nearest"
    chosen = algorithm or default
    if chosen != "nearest" and (run.forms is None or run.forms.usual.grid is None):
        known = [name for name, row in LINEAR_METHODS.items() if "symmetric" in row.options]
        raise QuantizeError(
            f"--algorithm {chosen} is for integers, and {method} has none",
            f"use one of {', '.join(known)}, W4A8, W4AFP8, W8A8, AWQ",
        )
    if chosen in SMOOTHING and run.options.patterns:
        raise QuantizeError(f"--algorithm {chosen} scales layers for one format", "several have nearest and gptq")
    if (run.formats.act_order or options.order) and chosen != "gptq":
        raise QuantizeError(
            f"--act-order is the order in which GPTQ rounds, and the algorithm is {chosen}", "add `--algorithm gptq`"
        )
    return chosen


def _importance(
    run: QuantizeRun, checkpoint: Checkpoint, calibration: CalibrationOptions, algorithm: str,
    calibrated: Sequence[Sequence[int]], source: str, report: Report,
) -> Importance:  # fmt: skip
    if calibration.imatrix is not None:
        return read_imatrix(calibration.imatrix, gguf_tensors(checkpoint))
    if not calibration.wanted or (algorithm == "gptq" and not run.options.kv_scales):
        return Importance()
    importance = collect_importance(checkpoint, calibrated, source, run.device, report)
    if calibration.save_imatrix is not None:
        tensors = gguf_tensors(checkpoint)
        write_imatrix(calibration.save_imatrix, importance, tensors, len(calibrated), calibration.length)
    return importance


def _write(
    run: QuantizeRun, algorithm: str, checkpoint: Checkpoint, options: GPTQOptions, calibrated: list[list[int]],
    source: str, report: Report, notes: list[str], losses: dict[str, float],
) -> Written:  # fmt: skip
    weights: Checkpoint = checkpoint
    if algorithm in SMOOTHING:
        grid = run.forms.usual.grid if run.forms is not None else None
        assert grid is not None
        strength = run.options.smoothing_strength
        weights, importance = smoothed(checkpoint, algorithm, grid, calibrated, source, run.device, report, strength)
        run = replace(run, importance=importance)
    plan = run.plan(weights)
    if algorithm == "gptq":
        return _write_gptq(run, plan, checkpoint, options, calibrated, report, notes, losses)
    notes += _unseen(plan, run.importance)
    return write(plan, run.settings(), report, device=run.device)


def _write_gptq(
    run: QuantizeRun, plan: WritePlan, checkpoint: Checkpoint, options: GPTQOptions, calibrated: list[list[int]],
    report: Report, notes: list[str], losses: dict[str, float],
) -> Written:  # fmt: skip
    forms = run.forms
    assert forms is not None
    tasks = {
        name: task for task in plan.tasks if task.type in LINEAR_METHODS for name in task.published
        if forms.of(name).grid is not None
    }  # fmt: skip
    run.device.check_activations(checkpoint, sum(map(len, calibrated)))

    def first(output: PartialOutput, there: set[str]) -> None:
        hook = GPTQPass(checkpoint, tasks, forms, options, output, there, run.device, report)
        run.device.compare(checkpoint, calibrated, hook)
        losses.update(hook.losses)
        if hook.unseen:
            notes.append(_without_inputs(hook.unseen))

    settings = {**run.settings(), "gptq": repr(options), "tokens": [sum(map(sum, calibrated)), len(calibrated)]}
    return write(plan, settings, report, first, run.device)


def _unseen(plan: WritePlan, importance: Importance) -> list[str]:
    """Matrices that were quantized without the importance of their inputs."""
    if not importance:
        return []
    missing = [
        name for task in plan.tasks if len(task.outputs[0].shape) > 1 for name in task.published
        if name in importance.counts and not importance.counts[name]
    ]  # fmt: skip
    return [_without_inputs(missing)] if missing else []


def _without_inputs(names: Sequence[str]) -> str:
    return f"{len(names)} layers had no inputs and are rounded to nearest: {', '.join(names)}"


def _measured_tokens(calibration: CalibrationOptions, num_weights: int) -> int:
    if calibration.measured_tokens is not None:
        return calibration.measured_tokens
    return DEFAULT_MEASURED_TOKENS if num_weights <= MEASURED_WEIGHTS else 0


def _measure(
    original: Checkpoint, out: Path, held_out: list[list[int]], num_tokens: int, device: Device, report: Report
) -> Quality:
    chosen = cut_to(held_out, num_tokens)
    report("measuring", 0, 3)
    first = quality.last_states(original, chosen, device)
    report("measuring", 1, 3)
    second = quality.last_states(open_checkpoint(out), chosen, device)
    report("measuring", 2, 3)
    compared = quality.compare(first, second, chosen)
    report("measuring", 3, 3)
    return compared


def cut_to(held_out: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The first sequences, the last of them cut, `num_tokens` in all."""
    chosen: list[list[int]] = []
    for sequence in held_out:
        if (left := num_tokens - sum(map(len, chosen))) < 2:
            break
        chosen.append([*sequence[:left]])
    return chosen


class MethodComparison:
    """Several methods on one model: the original's forward pass and the importance of inputs are computed once."""

    def __init__(self, run: QuantizeRun, calibration: CalibrationOptions, report: Report) -> None:
        self._calibration, self._report = calibration, report
        self._checkpoint = run.open()
        text = read_text(calibration.text)
        self._calibrated, held_out = sequences(run.source, text, calibration.length, calibration.num_tokens)
        self._measured = cut_to(held_out, calibration.measured_tokens or DEFAULT_MEASURED_TOKENS)
        source = calibration.text.name if calibration.text else "the default text"
        self._importance = _importance(
            run, self._checkpoint, calibration, "nearest", self._calibrated, source, report
        )  # fmt: skip
        self._original = quality.last_states(self._checkpoint, self._measured, run.device)

    def original(self) -> dict[str, Any]:
        weights = sum(count(self._checkpoint.shape(name)) for name in self._checkpoint.names())
        nbytes = self._checkpoint.nbytes
        return self._figures("original", nbytes, 8 * nbytes / weights, self._original)

    def row(self, run: QuantizeRun, algorithm: str | None, options: GPTQOptions) -> tuple[dict[str, Any], Path]:
        """The figures of a method, and the output that was written for them."""
        run, _ = _with_fitting_groups(replace(run, importance=self._importance), self._checkpoint)
        chosen = _algorithm(run, algorithm if run.options.method in LINEAR_METHODS else None, options)
        plan = _write(
            run, chosen, self._checkpoint, options, self._calibrated, "text", self._report, [], {}
        ).plan  # fmt: skip
        states = quality.last_states(open_checkpoint(plan.out), self._measured, run.device)
        return self._figures(run.options.method, plan.nbytes, plan.bits_a_weight, states), plan.out

    def _figures(self, method: str, nbytes: int, bits: float, states: Logits) -> dict[str, Any]:
        compared = quality.compare(self._original, states, self._measured)
        return {
            "method": method,
            "bytes": nbytes,
            "bits_per_weight": round(bits, 4),
            "quality": compared.as_json(),
        }
