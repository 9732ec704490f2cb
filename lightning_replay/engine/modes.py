# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The process-wide and thread-wide switches of torch that decide which kernels a call launches."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad


def _readers(*names: str) -> tuple[Callable[[], Any], ...]:
    """Returns those that this torch has: not all are in every release and build."""
    return tuple(getattr(torch._C, name) for name in names if hasattr(torch._C, name))


def _precision_readers() -> tuple[Callable[[], Any], ...]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        return partial(getattr, matmul, "allow_tf32"), partial(getattr, cudnn, "allow_tf32")
    # torch >= 2.9; reading the older names may raise there
    holders = (matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
    return tuple(partial(getattr, holder, "fp32_precision") for holder in holders)


# What stands behind the documented switches of torch.backends and torch.cuda.tunable: read before each replay, and by
# the documented names that takes several times as long.
_COMMON = (
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    # Its own getters miss what is assigned to the module, which torch.einsum reads.
    partial(getattr, torch.backends.opt_einsum, "enabled"),
    partial(getattr, torch.backends.opt_einsum, "strategy"),
)
_CUDA = _precision_readers() + _readers(
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_blas_preferred_backend",
    "_get_linalg_preferred_backend",
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_cuda_get_cudnn_benchmark_limit",
    "_get_cudnn_deterministic",
    "_get_cudnn_depthwise_kernel",
    "_get_miopen_immediate",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_rocm_fa_preferred_backend",
    "_get_deterministic_fill_uninitialized_memory",
    "_cuda_tunableop_is_enabled",
    "_cuda_tunableop_tuning_is_enabled",
)
_sdp_priority_order = getattr(torch._C, "_get_sdp_priority_order", tuple)
_innermost_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
"""Returns the innermost transformation of torch.func that is at work, or None."""


class Modes(NamedTuple):
    """A snapshot of torch's switches. Two equal snapshots make the same call launch the same kernels."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    foreign_modes: int
    anomaly: bool
    switches: tuple[Any, ...]
    saved_tensor_hooks: bool = False
    transformed: bool = False

    @property
    def autocast_caches_weights(self) -> bool:
        """Tells whether casts of weights are shared by everything under one autocast context."""
        return self.autocast_cache and any(enabled for _, enabled, _ in self.autocast)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs a block under the autocast, default dtype and gradient modes of the snapshot.

        The weight cache of autocast is empty at both ends: a cast made outside would otherwise be frozen into a
        recording.
        """
        before = torch.get_default_dtype()
        torch.clear_autocast_cache()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                )
            torch.set_default_dtype(self.default_dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
                torch.clear_autocast_cache()


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Runs a block with autocast off on every device, without emptying its weight cache."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def current_modes(device_type: str) -> Modes:
    """Reads the switches as they are now, for calls on devices of one type and on the CPU."""
    kinds = ("cpu",) if device_type == "cpu" else (device_type, "cpu")
    return Modes(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=torch.get_default_dtype(),
        foreign_modes=torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        anomaly=torch.is_anomaly_enabled(),
        switches=_switches(device_type),
        saved_tensor_hooks=_saved_tensor_hooks(),
        transformed=_innermost_transform() is not None or forward_ad._current_level >= 0,
    )


def _saved_tensor_hooks() -> bool:
    """Tells whether something packs and unpacks what autograd saves: checkpointing, offloading to the CPU."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in every torch of the range
    return top is not None and top(True) is not None


def _switches(device_type: str) -> tuple[Any, ...]:
    common = tuple(read() for read in _COMMON)
    return common if device_type != "cuda" else (*common, *(read() for read in _CUDA), *_sdp_priority_order())
