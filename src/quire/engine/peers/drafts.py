"""Options of other engines for speculative decoding."""

from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed
from quire.engine.peers.reasons import OFF

THREADS = NoEffect("threads are for all steps")
DRAFTS = Only(("0", *OFF), "say by what method: spec_method is ngram, and spec_tokens how many draft tokens")
DRAFT_LENGTH = NoEffect("as many draft tokens are verified as pay, at most spec_tokens")
DRAWN = "tokens are drawn as without drafts, and no draft token is accepted for being likely"
DRAFT_PLACE = NoEffect("what drafts is computed where the model is")
DRAFT_KV = NoEffect("kv_cache_dtype is for what drafts, too")
LOOKUP = NoEffect(
    "speculative_config has prompt_lookup_min and prompt_lookup_max of ngram, suffix_decoding_max_tree_depth of suffix"
)
LOOKUP_FILES = Only(OFF, "the method suffix keeps recent answers in memory, and reads no files")
SYNTHETIC = Only(
    OFF,
    "speculative_config has rejection_sample_method, synthetic_acceptance_rates and synthetic_acceptance_length",
)

VLLM: dict[str, PeerOption] = {
    "ngram_prompt_lookup_max": LOOKUP,
    "ngram_prompt_lookup_min": LOOKUP,
    "num_speculative_tokens": Renamed("spec_tokens"),
    "speculative_draft_tensor_parallel_size": Only(("1", "none"), "what drafts is computed by one process"),
    "speculative_model": Renamed("spec_model"),
}

TGI: dict[str, PeerOption] = {
    "speculate": DRAFTS,
}

LLAMA_SERVER: dict[str, PeerOption] = {
    "cache_type_k_draft": DRAFT_KV,
    "cache_type_v_draft": DRAFT_KV,
    "ctx_size_draft": NoEffect("a draft model reads as far as the model; speculative_config has max_model_len for it"),
    "device_draft": DRAFT_PLACE,
    "draft": Renamed("spec_tokens"),
    "draft_max": Renamed("spec_tokens"),
    "draft_min": DRAFT_LENGTH,
    "draft_n": Renamed("spec_tokens"),
    "draft_n_min": DRAFT_LENGTH,
    "draft_p_min": DRAFT_LENGTH,
    "draft_p_split": DRAFT_LENGTH,
    "gpu_layers_draft": DRAFT_PLACE,
    "hf_repo_draft": Renamed("spec_model"),
    "lookup_cache_dynamic": LOOKUP_FILES,
    "lookup_cache_static": LOOKUP_FILES,
    "model_draft": Renamed("spec_model"),
    "n_gpu_layers_draft": DRAFT_PLACE,
    "spec_default": Renamed("spec_method", {"true": "suffix", "false": None}, switch=True),
    "spec_draft_device": DRAFT_PLACE,
    "spec_draft_hf": Renamed("spec_model"),
    "spec_draft_model": Renamed("spec_model"),
    "spec_draft_n_max": Renamed("spec_tokens"),
    "spec_draft_n_min": DRAFT_LENGTH,
    "spec_draft_ngl": DRAFT_PLACE,
    "spec_draft_p_min": DRAFT_LENGTH,
    "spec_draft_p_split": DRAFT_LENGTH,
    "spec_draft_sampling": NoEffect("draft tokens are drawn as the request draws its tokens"),
    "spec_draft_threads": THREADS,
    "spec_draft_threads_batch": THREADS,
    "spec_draft_type_k": DRAFT_KV,
    "spec_draft_type_v": DRAFT_KV,
    "spec_ngram_check_rate": LOOKUP,
    "spec_ngram_map_k4v_min_hits": LOOKUP,
    "spec_ngram_map_k4v_size_m": LOOKUP,
    "spec_ngram_map_k4v_size_n": LOOKUP,
    "spec_ngram_map_k_min_hits": LOOKUP,
    "spec_ngram_map_k_size_m": LOOKUP,
    "spec_ngram_map_k_size_n": LOOKUP,
    "spec_ngram_min_hits": LOOKUP,
    "spec_ngram_mod_n_match": LOOKUP,
    "spec_ngram_mod_n_max": LOOKUP,
    "spec_ngram_mod_n_min": LOOKUP,
    "spec_ngram_simple_min_hits": LOOKUP,
    "spec_ngram_simple_size_m": LOOKUP,
    "spec_ngram_simple_size_n": LOOKUP,
    "spec_ngram_size_m": LOOKUP,
    "spec_ngram_size_n": LOOKUP,
    "spec_synth_len": SYNTHETIC,
    "spec_synth_rates": SYNTHETIC,
    "spec_type": Renamed("spec_method", {"none": None}),
    "threads_batch_draft": THREADS,
    "threads_draft": THREADS,
}

SGLANG: dict[str, PeerOption] = {
    "speculative_accept_threshold_acc": Only(("1", "1.0"), DRAWN),
    "speculative_accept_threshold_single": Only(("1", "1.0"), DRAWN),
    "speculative_algorithm": Renamed("spec_method", {"none": None}),
    "speculative_draft_model_path": Renamed("spec_model"),
    "speculative_eagle_topk": Only(("1", "none"), "speculative_config has tree_nodes and tree_top_k for trees"),
    "speculative_num_draft_tokens": DRAFT_LENGTH,
    "speculative_num_steps": Renamed("spec_tokens"),
}

TRANSFORMERS: dict[str, PeerOption] = {
    "assistant_model": Renamed("spec_model"),
    "num_assistant_tokens": Renamed("spec_tokens"),
    "prompt_lookup_num_tokens": DRAFTS,
}

SHORT_FLAGS = {
    "-cd": "ctx_size_draft",
    "-ctkd": "cache_type_k_draft",
    "-ctvd": "cache_type_v_draft",
    "-devd": "device_draft",
    "-hfd": "hf_repo_draft",
    "-hfrd": "hf_repo_draft",
    "-lcd": "lookup_cache_dynamic",
    "-lcs": "lookup_cache_static",
    "-ngld": "n_gpu_layers_draft",
    "-sc": "speculative_config",
    "-tbd": "threads_batch_draft",
    "-td": "threads_draft",
}
