"""torch's own tests of DistributedDataParallel against our wrapper, on two Gloo ranks; torch_ddp.py says how."""

import importlib
import inspect
import os
import re
from unittest import mock

import pytest
import torch
from torch_ddp import MODULE

QUICK = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_namedtuple",
    "test_ddp_shared_grad_acc_unused_params",
    "test_grads_same_across_ranks_with_no_sync",
    "test_undefined_grad_parity_unused_parameters",
]
SLOW = [
    "test_DistributedDataParallel",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_compile_static_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_inference",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_uneven_input_exception",
    "test_ddp_zero_output_features",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
]
NOT_OURS = {
    "hooks in the place of the collectives (register_comm_hook), which ours does not take": (
        "comm_hook_logging", "hook_with_optimizer_parity_adamw", "hook_with_optimizer_parity_adam",
        "hook_with_optimizer_parity_sgd", "hook_parity_allreduce", "hook_parity_allreduce_process_group",
        "hook_parity_powerSGD", "hook_parity_post_localSGD", "hook_pickling_powerSGD", "python_error_logged",
        "buffer_hook_allreduce", "buffer_hook_allreduce_return_future", "broadcast_buffer_via_hook",
    ),
    "options of torch's constructor that ours has not": (
        "bucket_cap_mb_list", "device_mesh_initialization", "skip_all_reduce_unused_parameters",
        "join_respects_forward_sync_buffers_false", "init_sync_buffers_with_forward_sync_buffers_false",
        "native_mixed_precision_ignored_params", "apply_optim_in_backward_ignored_params", "ignore_params_arg",
        "native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none", "get_data_parallel_params",
        "multiple_nested_unused_params_err_ignore_params",
    ),
    "private members of torch's object: reducer, logger, settings": (
        "logging_data_cpu", "logging_data_gpu", "sync_bn_logged", "sync_module_states", "device", "has_finalized",
        "control_flow_different_across_ranks", "control_flow_same_across_ranks", "detect_ddp_is_actually_static",
        "sparse_error_with_logger", "build_debug_param_to_name_mapping", "update_process_group_grad_undefined",
        "build_debug_param_to_name_mapping_requires_grad", "remove_autograd_hooks", "different_graph_across_ranks",
        "update_process_group_no_find_unused", "sink_noclone", "uneven_input_join_disable", "static_graph_api_cpu",
        "sparse_error_without_logger", "verify_model_across_rank_with_logger",
        "verify_model_across_rank_without_logger",
    ),
    "torch's words in an error, or its error one step late; ours comes in the same backward (unused_cases.py)": (
        "unused_params_rebuild_buckets_exception", "multiple_nested_unused_params_error", "invalid_static_graph",
        "broadcast_buffers_deprecation_warning", "DistributedDataParallel_requires_grad",
    ),
    "a wrapper around a wrapper, an error here": ("static_graph_nested_types",),
    "a hidden 1 / W over ranks that have no batch: ours divides by those that have": (
        "join_model_equivalence", "grad_div_uneven_inputs",
    ),
    "an optimizer that takes the averages away inside the backward": (
        "apply_optim_in_backward", "apply_optim_in_backward_grad_as_bucket_view_false",
    ),
    "GPUs in earnest: streams, profiles, SyncBatchNorm (which torch has for GPUs only)": (
        "non_default_stream", "profiling_autograd_profiler", "profiling_execution_trace", "profiling_torch_profiler",
        "SyncBatchNorm", "SyncBatchNorm_2D_Input", "SyncBatchNorm_Channels_Last",
        "SyncBatchNorm_Diff_Input_Sizes_Running_Value", "SyncBatchNorm_Diff_Input_Sizes_gradient",
        "SyncBatchNorm_No_Affine", "SyncBatchNorm_Single_Input_Per_Process", "SyncBatchNorm_half",
        "sync_bn_training_vs_eval", "uneven_inputs_stop_iteration_sync_bn",
    ),
}  # fmt: skip
PREFIXES = (
    "test_",
    "test_ddp_",
    "test_DistributedDataParallel_",
    "test_compute_bucket_assignment_by_size_",
)


def theirs():
    with mock.patch.dict(os.environ, {"BACKEND": "gloo", "WORLD_SIZE": "2"}):
        return importlib.import_module(MODULE).DistributedTest._DistTestBase


def run(rank_pools, name):
    if not hasattr(theirs(), name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert rank_pools.run(2, "torch_ddp", "run", test_name=name) == [None] * 2


@pytest.mark.parametrize("name", QUICK)
def test_of_torch(rank_pools, name):
    run(rank_pools, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_of_torch_in_full(rank_pools, name):
    run(rank_pools, name)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the table is of torch 2.13")
def test_every_test_of_torch_is_run_or_has_a_reason():
    texts = {
        name: inspect.getsource(function)
        for name, function in vars(theirs()).items()
        if re.match("_?test", name) and callable(function)
    }

    def wraps(name, seen=()):
        """Whether a test, or one that it calls, makes a DistributedDataParallel."""
        called = set(re.findall(r"self\.(_?test_\w+)", texts[name])) - {name, *seen}
        return "DistributedDataParallel(" in texts[name] or any(
            wraps(other, (*seen, name)) for other in called & texts.keys()
        )

    excused = {
        prefix + name for names in NOT_OURS.values() for name in names for prefix in PREFIXES
    }
    left = {name for name in texts if name.startswith("test_") and wraps(name)}
    assert not left - excused - {*QUICK, *SLOW}
    assert not excused & {*QUICK, *SLOW}
