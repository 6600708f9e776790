"""Which options of where a model is computed go together."""

from typing import Protocol

from quire.core.errors import BadRequest


class PlacementOptions(Protocol):
    """The options that say where layers and their weights are; `EngineOptions` has them."""

    @property
    def pipeline_parallel_size(self) -> int: ...

    @property
    def stage_addresses(self) -> tuple[str, ...]: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def cpu_layers(self) -> int: ...

    @property
    def gpu_layers(self) -> int | None: ...

    @property
    def offload_weights(self) -> float: ...

    @property
    def offload_folder(self) -> str | None: ...


def check_placement(options: PlacementOptions) -> None:
    if options.stage_addresses and options.pipeline_parallel_size not in (1, options.num_stages):
        raise BadRequest(
            f"pipeline_parallel_size is {options.pipeline_parallel_size}, and pipeline_stages names "
            f"{len(options.stage_addresses)} stages beside the last",
            f"use {options.num_stages}, or leave it out",
            param="pipeline_parallel_size",
        )
    if options.cpu_layers and options.gpu_layers is not None:
        raise BadRequest(
            "cpu_layers and gpu_layers are both given, and say the same of one model",
            "give one of them",
            param="cpu_layers",
        )
    if (options.cpu_layers or options.gpu_layers) and options.num_stages > 1:
        raise BadRequest(
            f"pipeline_parallel_size is {options.num_stages}, and layers on a CPU and a GPU are stages of one process",
            "leave out cpu_layers and gpu_layers, or pipeline_parallel_size",
            param="cpu_layers",
        )
    if options.offload_folder and not options.offload_weights:
        raise BadRequest(
            "offload_folder is given, and no weights are offloaded",
            "give offload_weights, or leave it out",
            param="offload_folder",
        )
    if options.offload_weights and (options.cpu_layers or options.gpu_layers is not None or options.num_stages > 1):
        raise BadRequest(
            "offload_weights is for a model whose layers are all on one GPU",
            "leave it out, or cpu_layers, gpu_layers and pipeline_parallel_size",
            param="offload_weights",
        )
