"""SGLang's modules, methods and fields, and this package's environment variables.

Each is written here once. SGLang's names are those of 0.5.17 - 0.5.23.
"""

PLUGIN_GROUP = "sglang.srt.plugins"
"""Entry-point group of SGLang's plugins, and the module that loads them."""

BACKEND_MODULE = "sglang.srt.layers.attention.linear.inkling_sconv_backend"
REFRESH = "_refresh_track_conv_indices"
ALLOC_GRAPH_BUFFERS = "_alloc_graph_buffers"
STATIC_INDICES = "_graph_track_conv_indices"
"""The backend's ``[max_rows, conv_kernel - 1]`` int64 buffer that captured kernels read."""

EXTEND_PREFIX_LENS = "extend_prefix_lens"
TRACK_MASK = "mamba_track_mask"
TRACK_INDICES = "mamba_track_indices"
TRACK_SEQLENS = "mamba_track_seqlens"
TRACK_CACHE_INDICES = "track_cache_indices"
"""Metadata field that holds the scatter's destination slots since 0.5.22."""

CLEAR_FIELDS = ("mamba_clear_indices", "mamba_cow_src_indices", "mamba_cow_dst_indices")
"""Fields that list the slots that a prefill clears, or copies from and to."""

PREFILL_RUNNER_MODULE = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
BUFFER_REGISTRY_MODULE = "sglang.srt.model_executor.cuda_graph_buffer_registry"
DRAFT_EXTEND_RUNNER_MODULE = (
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
)
DRAFT_WORKER_MODULE = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
SHORT_CONVOLUTION_MODULE = "sglang.srt.models.inkling_common.sconv"
SCHEDULE_BATCH_MODULE = "sglang.srt.managers.schedule_batch"
SPEC_UTILS_MODULE = "sglang.srt.speculative.spec_utils"

TRACK_GRID = "mamba_track_grid"
"""Since 0.5.19: gives the tokens between two checkpoints of decoding, from the page size."""

CONFIG_MODULES = ("sglang.srt.runtime_context", "sglang.srt.server_args")
"""Where the functions that return SGLang's configuration are defined."""

PLUGIN = "inkling_sconv"
DISTRIBUTION = "sglang-inkling-sconv"
MODE_VARIABLE = "INKLING_SCONV"
DRAFT_EXTEND_VARIABLE = "INKLING_SCONV_DRAFT_EXTEND"
FIXES_VARIABLE = "INKLING_SCONV_FIXES"
CRASHING_TREE_VARIABLE = "INKLING_SCONV_CRASHING_TREE"
"""Names a tree that crashes, for the registered tests and the benchmarks."""
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
"""SGLang's: if set, only the plugins that it lists are loaded."""
