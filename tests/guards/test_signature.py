# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What tells two calls apart."""

from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import nn
from torch.autograd import forward_ad

from lightning_replay import Finding, Reason
from lightning_replay.engine.modes import current_modes
from lightning_replay.guards.signature import check_input_aliases, check_modes, read_arguments

CPU = torch.device("cpu")


def key(*args: Any, **kwargs: Any) -> Any:
    arguments = read_arguments("net", args, kwargs, CPU)
    assert not isinstance(arguments, Finding), arguments
    return arguments.key


def test_equal_calls_have_equal_keys() -> None:
    assert key(torch.ones(2), scale=1.0, mask=None) == key(torch.zeros(2), scale=1.0, mask=None)
    assert hash(key(torch.ones(2))) == hash(key(torch.ones(2)))


shared = torch.ones(4)
DIFFERENT = {
    "shape": ((torch.ones(2),), (torch.ones(3),)),
    "dtype": ((torch.ones(2),), (torch.ones(2).double(),)),
    "strides": ((torch.ones(2, 2),), (torch.ones(2, 2).t(),)),
    "trainable": ((torch.ones(2),), (torch.ones(2, requires_grad=True),)),
    "alignment": ((torch.ones(2),), (torch.ones(3)[1:],)),
    "expanded": ((torch.ones(2, 2),), (torch.ones(1).expand(2, 2),)),
    "aliases": ((torch.ones(4), torch.ones(4)), (shared, shared)),
    "value": ((torch.ones(2), 1), (torch.ones(2), 2)),
    "type of value": ((torch.ones(2), 1), (torch.ones(2), True)),
    "nesting": (([torch.ones(2)],), ((torch.ones(2),),)),
    "None": ((torch.ones(2), None), (torch.ones(2),)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls(name: str) -> None:
    left, right = DIFFERENT[name]

    assert key(*left) != key(*right)


def test_positional_is_not_keyword() -> None:
    assert key(torch.ones(2)) != key(x=torch.ones(2))


@pytest.mark.parametrize(
    ("value", "reason", "where"),
    [
        (object(), Reason.ARGUMENT, "net"),
        ({"a": [{1, 2}]}, Reason.ARGUMENT, "a[0]"),
        (torch.eye(2).to_sparse(), Reason.UNSUPPORTED_TENSOR, "net"),
        (torch.ones(2, device="meta"), Reason.UNSUPPORTED_TENSOR, "net"),
        (torch.ones(4).as_strided((3, 2), (1, 1)), Reason.UNSUPPORTED_TENSOR, "net"),
    ],
)
def test_arguments_that_cannot_be_static(value: Any, reason: Reason, where: str) -> None:
    finding = read_arguments("net", (value,), {}, CPU)

    assert isinstance(finding, Finding)
    assert finding.reason is reason
    assert where in finding.where


def test_aliases_among_trainable_arguments() -> None:
    weight = nn.Parameter(torch.ones(2))
    base = torch.ones(2, requires_grad=True)

    def finding(*args: Any) -> Any:
        arguments = read_arguments("net", args, {}, CPU)
        assert not isinstance(arguments, Finding)
        return check_input_aliases("net", arguments, {id(weight): "net.weight"})

    assert finding(base, base) is None
    assert finding(torch.ones(2), torch.ones(2)) is None
    assert finding(base, base.view(2, 1)).reason is Reason.OUTPUT_ALIAS
    assert finding(weight).reason is Reason.FOREIGN_GRAPH


def test_modes() -> None:
    assert check_modes("net", current_modes("cpu")) is None
    with torch.no_grad():
        assert check_modes("net", current_modes("cpu")).reason is Reason.UNRECORDED_MODE
    with torch.inference_mode():
        assert check_modes("net", current_modes("cpu")).reason is Reason.UNRECORDED_MODE
    with torch.autograd.graph.save_on_cpu():
        assert check_modes("net", current_modes("cpu")).reason is Reason.UNRECORDED_MODE
    with forward_ad.dual_level():
        assert check_modes("net", current_modes("cpu")).reason is Reason.UNRECORDED_MODE
    findings = []
    torch.func.vmap(lambda row: findings.append(check_modes("net", current_modes("cpu"))) or row)(torch.ones(2))
    assert findings[0].reason is Reason.UNRECORDED_MODE
    with torch.autograd.set_detect_anomaly(True):
        assert check_modes("net", current_modes("cpu")).reason is Reason.DETECT_ANOMALY
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert check_modes("net", current_modes("cpu")).reason is Reason.UNRECORDED_MODE


def test_modes_are_told_apart_and_entered_again() -> None:
    plain = current_modes("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = current_modes("cpu")
    assert cast != plain
    assert cast.autocast_caches_weights
    assert not plain.autocast_caches_weights

    with cast.entered():
        assert current_modes("cpu") == cast
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert current_modes("cpu") == plain
    torch.set_default_dtype(torch.float64)
    try:
        assert current_modes("cpu") != plain
        with plain.entered():
            assert torch.ones(1).dtype is torch.float32
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


SWITCHES: list[tuple[Any, str, Any]] = [
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    (torch.backends.cudnn, "enabled", False),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "benchmark_limit", 3),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.opt_einsum, "enabled", False),
    (torch.backends.opt_einsum, "strategy", "greedy"),
    (torch.utils.deterministic, "fill_uninitialized_memory", False),
]


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    SWITCHES,
    ids=[f"{getattr(holder, '__name__', type(holder).__name__)}.{name}" for holder, name, _ in SWITCHES],
)
def test_switches_of_torch_are_told_apart(holder: Any, name: str, value: Any) -> None:
    usual = getattr(holder, name, None)
    if usual in (None, value):
        pytest.skip("not a switch of this torch")
    before = current_modes("cuda")

    setattr(holder, name, value)
    try:
        assert current_modes("cuda") != before
    finally:
        setattr(holder, name, usual)
    assert current_modes("cuda") == before


FUNCTIONS: list[tuple[Any, Any, Any]] = [
    (torch.use_deterministic_algorithms, True, False),
    (torch.set_float32_matmul_precision, "high", "highest"),
    (torch.backends.cuda.enable_flash_sdp, False, True),
    (torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    (torch.backends.cuda.enable_math_sdp, False, True),
    (torch.backends.cuda.enable_cudnn_sdp, False, True),
    (getattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp", None), True, False),
    (getattr(torch.backends.cuda, "preferred_blas_library", None), "cublaslt", "default"),
    (torch.backends.cuda.preferred_linalg_library, "magma", "default"),
]


@pytest.mark.parametrize(("function", "value", "usual"), FUNCTIONS)
def test_functions_that_switch_torch_are_told_apart(function: Any, value: Any, usual: Any) -> None:
    if function is None:
        pytest.skip("not in this torch")
    before = current_modes("cuda")
    try:
        function(value)
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        assert current_modes("cuda") != before
    finally:
        function(usual)


def test_the_order_of_attention_kernels_is_told_apart() -> None:
    if not hasattr(torch._C, "_get_sdp_priority_order"):
        pytest.skip("not in this torch")
    before = current_modes("cuda")
    kernels = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]

    with torch.nn.attention.sdpa_kernel(kernels, set_priority=True):
        first = current_modes("cuda")
    with torch.nn.attention.sdpa_kernel(kernels[::-1], set_priority=True):
        assert current_modes("cuda") != first
    assert current_modes("cuda") == before
