"""A run: the plan is made and checked, then written task by task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import BadCheckpoint, DoesNotFit
from quire.quantize.device import CPU, Device, Report
from quire.quantize.gguf_plan import is_quantized, plan_gguf
from quire.quantize.huggingface_plan import plan_huggingface
from quire.quantize.merged import merged
from quire.quantize.methods import COPY, LINEAR_METHODS, PLAIN, FormatOptions, LinearFormats, check_no_options
from quire.quantize.output import PartialOutput, check_free
from quire.quantize.plan import Importance, QuantizeError, QuantizeOptions, Task, WritePlan, source_state
from quire.runtime.available_memory import available_memory
from quire.weights.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from quire.weights.formats import stored_format

WORKING_COPIES = 8  # of a tensor as fp32, at most, while it is encoded
LARGE_SHARE = 1 / 32  # of all weights, in one tensor: an embedding
CHUNKED_WEIGHTS = 1 << 24  # a GGUF tensor is encoded at most so many weights at a time


@dataclass(frozen=True, slots=True)
class QuantizeRun:
    """`source`: a directory or a GGUF file."""

    source: Path
    out: Path
    options: QuantizeOptions
    formats: FormatOptions = field(default_factory=FormatOptions)
    importance: Importance = field(default_factory=Importance)
    device: Device = field(default_factory=CPU)

    @property
    def to_gguf(self) -> bool:
        return self.out.suffix == ".gguf"

    @property
    def forms(self) -> LinearFormats | None:
        """The formats of linear layers in Hugging Face's layout; None for plain conversions and GGUF."""
        method = self.options.method
        if method not in LINEAR_METHODS:
            return None
        return LinearFormats(method, self.formats, self.options.types, self.options.patterns)

    def open(self) -> Checkpoint:
        checkpoint = open_checkpoint(self.source)
        return merged(checkpoint, Path(self.options.lora)) if self.options.lora else checkpoint

    def check_output(self) -> None:
        """Whether the output is of a kind that the method has, and free: what needs no look at the model."""
        method = self.options.method
        if method in LINEAR_METHODS and self.to_gguf:
            raise QuantizeError(f"{method} is written to a folder, and {self.out} is a file", "leave out `.gguf`")
        if method not in LINEAR_METHODS and method not in PLAIN and not self.to_gguf:
            raise QuantizeError(f"{method} is a type of GGUF", f"name a file: {self.out}.gguf")
        if method == COPY and self.source.is_dir():
            raise QuantizeError(f"COPY is of GGUF files, and {self.source} is a folder", "BF16 and F16 convert it")
        if method not in LINEAR_METHODS:
            check_no_options(method, self.formats)
        self._check_flags()
        check_free(self.out, self.source)

    def _check_flags(self) -> None:
        """Whether the kind of output has what the options ask for: nothing is ignored."""
        options, kind = self.options, "a GGUF file" if self.to_gguf else "a folder"
        of_files = {
            "--pure": options.pure,
            "--output-tensor-type": options.head_type,
            "--token-embedding-type": options.table_type,
            "--keep-split": options.keep_split,
            "--override-kv": options.overrides,
            "--prune-layers": options.pruned,
        }
        of_folders = {"--kv-cache-scales": options.kv_scales, "--dtype": options.dtype}
        if wrong := [flag for flag, given in (of_folders if self.to_gguf else of_files).items() if given]:
            other = "a folder in Hugging Face's layout" if self.to_gguf else "a GGUF file"
            raise QuantizeError(f"{wrong[0]} is of {other}, and {self.out} is {kind}", "leave it out")
        if options.patterns and options.method in PLAIN and not self.to_gguf:
            raise QuantizeError(
                f"--tensor-type quantizes some layers, and {options.method} none",
                "give the method of the others, and name layers that stay with --ignore",
            )
        if options.split_bytes is not None and options.keep_split:
            raise QuantizeError("--keep-split and --split-max-size exclude each other", "give one of them")

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        self.check_output()
        self._check_source()
        from_gguf = not find_checkpoint(self.source).is_dir()
        if self.to_gguf:
            copies_keys = from_gguf and not self.options.lora
            if from_gguf and self.options.lora:
                raise QuantizeError(
                    "an adapter is merged into a GGUF file by way of Hugging Face's layout",
                    "first `--method F16` with --lora into a folder, then quantize that",
                )
            plan = plan_gguf(checkpoint, copies_keys, self.out, self.options, self.importance)
            check_free(plan.out, self.source)
            return plan
        return plan_huggingface(checkpoint, self.out, self.options, self.forms, self.importance, self.device)

    def _check_source(self) -> None:
        source = find_checkpoint(self.source)
        if self.options.requantize or self.options.method in (*PLAIN, COPY):
            return
        if source.is_dir():
            stored = stored_format(open_checkpoint(source).config, source)
        else:
            stored = "GGUF types" if is_quantized(source) else ""
        if stored:
            raise QuantizeError(
                f"{source.name} is quantized already ({stored}): what that lost is lost, and this loses more",
                "quantize the original, or add --requantize",
            )

    def settings(self) -> dict[str, Any]:
        """All that the bytes depend on, for resuming."""
        vectors = {name: float(vector.sum()) for name, vector in self.importance.sums.items()}
        return {
            "source": source_state(find_checkpoint(self.source)),
            "options": repr(self.options),
            "formats": repr(self.formats),
            "importance": vectors,
            "device": self.device.kind,
        }


@dataclass(frozen=True, slots=True)
class Written:
    plan: WritePlan
    resumed: int  # tasks that an earlier run had done


def write(
    plan: WritePlan,
    settings: Mapping[str, Any],
    report: Report,
    first: Callable[[PartialOutput, set[str]], None] | None = None,
    device: Device | None = None,
) -> Written:
    """`first` writes tasks of its own, such as those that need a forward pass; it is told which tensors are there."""
    _check_memory(plan)
    output = PartialOutput(plan.out, plan.files, plan.small)
    try:
        there = output.begin(settings)
        resumed = sum(task.is_in(there) for task in plan.tasks)
        if first is not None:
            first(output, there)
        _write_tasks(output, plan, there, device or CPU(), report)
        output.finish()
    except KeyboardInterrupt as error:
        done = f"{output.num_done} of {sum(len(task.outputs) for task in plan.tasks)} tensors are done"
        raise KeyboardInterrupt(f"stopped: {done}, and the same command goes on in {output.folder}") from error
    except BadCheckpoint:  # no later run can use what there is
        output.discard()
        raise
    finally:
        output.close()
    return Written(plan, resumed)


def _write_tasks(output: PartialOutput, plan: WritePlan, there: set[str], device: Device, report: Report) -> None:
    missing = [task for task in plan.tasks if not task.is_in(there)]
    total = plan.num_weights
    done = total - sum(task.num_weights for task in missing)
    missing.sort(key=lambda task: task.num_weights < LARGE_SHARE * total)  # or all would wait for the last of them
    report("writing", done, total)

    def written(task: Task) -> Task:
        output.write(task.pieces)
        return task

    for task in device.each(written, missing):
        if task.finish is not None:
            task.finish()
        done += task.num_weights
        report("writing", done, total)


def _check_memory(plan: WritePlan) -> None:
    def needed(task: Task) -> int:
        weights = min(task.num_weights, CHUNKED_WEIGHTS) if plan.small is None else task.num_weights
        return 4 * WORKING_COPIES * weights if task.type not in PLAIN else 8 * min(task.num_weights, CHUNKED_WEIGHTS)

    largest = max(plan.tasks, key=needed)
    if (free := available_memory()) < needed(largest):
        raise DoesNotFit(
            f"{largest.outputs[0].name} needs {needed(largest) / 1e9:.1f} GB of memory while it is quantized, and "
            f"{free / 1e9:.1f} GB are free",
            "stop other programs",
        )
