"""The cache of a process that has a part of a model: some layers, or some heads."""

from quire.ops.kv_spec import KVSpec, WindowedKVCache


class PartCache:
    """`spec` is that of the whole model. Blocks, pages and states of the part are those of `own`, with the same ids."""

    def __init__(self, spec: KVSpec, own: WindowedKVCache) -> None:
        self.spec, self.own = spec, own
        self.copy, self.swap_out, self.swap_in = own.copy, own.swap_out, own.swap_in
        self.swap_states_out, self.swap_states_in = own.swap_states_out, own.swap_states_in
        self.copy_states = own.copy_states
        self.attach_pages, self.copy_pages = own.attach_pages, own.copy_pages
        self.swap_pages_in, self.swap_pages_out = own.swap_pages_in, own.swap_pages_out
        self.host_page_buffers = own.host_page_buffers
        self.swapped = own.swapped
        self.host_buffers, self.host_state_buffers = own.host_buffers, own.host_state_buffers
        self.move, self.join_swaps = own.move, own.join_swaps
