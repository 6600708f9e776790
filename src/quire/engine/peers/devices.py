"""Options of other engines for several devices and several machines."""

from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed
from quire.engine.peers.reasons import OFF

_OTHER_MACHINES = (
    "the ranks of a stage are on one machine; run `quire stage MODEL --listen HOST:PORT` on each other one, and give "
    "their addresses here as pipeline_stages, or let Ray place the stages: pipeline_parallel_size, "
    "distributed_executor_backend ray"
)
_OTHER_ENGINES = (
    "the engines of data_parallel_size are on this machine, or where distributed_executor_backend ray finds room; else "
    "start a server on each machine, and `quire gateway` before them"
)
_NO_CONTEXT_PARALLEL = Only(
    ("1", "none"), "the KV cache is divided by heads (tensor_parallel_size) and by layers (pipeline_parallel_size)"
)
_MEETING = NoEffect("the engine starts its processes itself, and tells them how to meet")
_WHOLE_EXPERTS = NoEffect(
    "experts stay where they are; without enable_expert_parallel, ranks have equal parts of every expert"
)
_EXCHANGE = NoEffect("ranks exchange what experts gave by shared memory, or by NCCL")
_CPU_EXPERTS = (
    "layers are on the CPU as a whole, with their experts (cpu_layers), or weights are copied from there in time "
    "(offload_weights)"
)
_ONE_GPU = "CUDA_VISIBLE_DEVICES=N chooses the GPU, and tensor_parallel_size the number of GPUs"
_EQUAL_PARTS = "GPUs have equal parts of a model: tensor_parallel_size is their number"
_DEVICES = {"auto": None, "none": None, "0": "cuda", "{'': 'cpu'}": "cpu", "{'': 0}": "cuda", "{'': 'cuda:0'}": "cuda"}

VLLM: dict[str, PeerOption] = {
    "all2all_backend": _EXCHANGE,
    "cpu_offload_gb": Renamed("offload_weights"),
    "data_parallel_address": _MEETING,
    "data_parallel_backend": Renamed("distributed_executor_backend"),
    "data_parallel_external_lb": Only(OFF, _OTHER_ENGINES, switch=True),
    "data_parallel_hybrid_lb": Only(OFF, _OTHER_ENGINES, switch=True),
    "data_parallel_rank": Only(OFF, _OTHER_ENGINES),
    "data_parallel_rpc_port": _MEETING,
    "data_parallel_size_local": Only(OFF, _OTHER_ENGINES),
    "data_parallel_start_rank": Only(("0", *OFF), _OTHER_ENGINES),
    "dcp_kv_cache_interleave_size": _NO_CONTEXT_PARALLEL,
    "decode_context_parallel_size": _NO_CONTEXT_PARALLEL,
    "disable_custom_all_reduce": NoEffect("collectives are chosen by what the machine has", switch=True),
    "distributed_timeout_seconds": NoEffect("a rank that hangs is found by its heartbeat, within a second"),
    "enable_dbo": NoEffect("a step of ranks is one batch", switch=True),
    "enable_elastic_ep": Only(OFF, "the number of ranks is that of the start", switch=True),
    "enable_eplb": NoEffect(_WHOLE_EXPERTS.reason, switch=True),
    "eplb_config": _WHOLE_EXPERTS,
    "expert_placement_strategy": _WHOLE_EXPERTS,
    "fully_sharded_loras": NoEffect("ranks divide adapters by the outputs of B", switch=True),
    "headless": Only(OFF, f"a server has an API; {_OTHER_MACHINES}", switch=True),
    "max_parallel_loading_workers": NoEffect("weights are mapped and packed by all threads"),
    "nnodes": Only(("1", "none"), _OTHER_MACHINES),
    "node_rank": Only(("0", "none"), _OTHER_MACHINES),
    "num_redundant_experts": _WHOLE_EXPERTS,
    "prefill_context_parallel_size": _NO_CONTEXT_PARALLEL,
    "ray_workers_use_nsight": Only(OFF, "engines are not profiled", switch=True),
    "worker_cls": Only(("auto", *OFF), "no code is loaded from outside"),
    "worker_extension_cls": Only(OFF, "no code is loaded from outside"),
    "worker_use_ray": Renamed("distributed_executor_backend", {"true": "ray", "false": None}, switch=True),
}

TGI: dict[str, PeerOption] = {
    "master_addr": _MEETING,
    "master_port": _MEETING,
    "num_shard": Renamed("tensor_parallel_size"),
    "shard_uds_path": _MEETING,
    "sharded": Only(OFF, "tensor_parallel_size is the number of ranks, on CPUs or on a GPU each"),
}

LLAMA_SERVER: dict[str, PeerOption] = {
    "cpu_moe": Only(OFF, _CPU_EXPERTS, switch=True),
    "kv_offload": Only(("true",), "the KV cache of a layer is where the layer is: set gpu_layers", switch=True),
    "list_devices": Only(OFF, "`quire doctor` lists them", switch=True),
    "main_gpu": Only(("0",), _ONE_GPU),
    "n_cpu_moe": Only(("0",), _CPU_EXPERTS),
    "n_gpu_layers": Renamed("gpu_layers", {"-1": None, "auto": None, "all": None}),
    "numa": NoEffect("`quire doctor` lists NUMA nodes, and says how many engines, ranks or stages they are for"),
    "override_tensor": Only((), _CPU_EXPERTS),
    "rpc": Only((), _OTHER_MACHINES),
    "split_mode": Only(("none",), _EQUAL_PARTS),
    "tensor_split": Only(("1",), _EQUAL_PARTS),
}

SGLANG: dict[str, PeerOption] = {
    "base_gpu_id": Only(("0",), _ONE_GPU),
    "dist_init_addr": _MEETING,
    "dp_size": Renamed("data_parallel_size"),
    "enable_dp_attention": Only(OFF, "engines of data_parallel_size have the whole model each", switch=True),
    "ep_size": Only(("1", "none"), "enable_expert_parallel gives each rank of tensor_parallel_size whole experts"),
    "load_balance_method": NoEffect("a request goes where its prefix is cached, or where there is least to do"),
    "moe_a2a_backend": _EXCHANGE,
    "nccl_init_addr": _MEETING,
    "pp_size": Renamed("pipeline_parallel_size"),
    "tp_size": Renamed("tensor_parallel_size"),
}

TRANSFORMERS: dict[str, PeerOption] = {
    "device_map": Renamed("device", _DEVICES),
    "max_memory": Only(OFF, "gpu_memory_utilization, cpu_layers and offload_weights say what is where"),
    "tp_plan": Only(OFF, "tensor_parallel_size is the number of ranks, which the engine starts itself"),
}

SHORT_FLAGS = {
    "-cmoe": "cpu_moe",
    "-dcp": "decode_context_parallel_size",
    "-dev": "device",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpl": "data_parallel_size_local",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-mg": "main_gpu",
    "-ncmoe": "n_cpu_moe",
    "-ngl": "n_gpu_layers",
    "-nkvo": "kv_offload",
    "-ot": "override_tensor",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-r": "node_rank",
    "-sm": "split_mode",
    "-tp": "tensor_parallel_size",
    "-ts": "tensor_split",
    "--dp": "dp_size",
    "--ep": "ep_size",
    "--pp": "pp_size",
    "--tp": "tp_size",
}
