# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Notice what code does on the host beside computing: printing, files, clocks, random numbers, tensors read as numbers.

Neither a dispatch mode nor a comparison of attributes can see that. Python itself can: it tells a profile function of
every call of a C function, and there is no other way to a clock or to a terminal.
"""

import ctypes
import datetime
import functools
import gc
import io
import os
import random
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_replay.reasons import Finding, Reason

_CLOCKS = {getattr(time, name) for name in ("clock_gettime", "clock_gettime_ns") if hasattr(time, name)}
_EFFECTS = frozenset(
    {print, input, open, os.urandom, os.read, os.write, os.stat, os.utime, os.mkdir, os.remove, os.unlink, os.rename}
    | {os.replace, os.listdir, os.scandir, os.system, os.putenv, os.unsetenv, os.open, os.rmdir, os.kill}
    | {
        getattr(os, name)
        for name in ("chmod", "fork", "ftruncate", "link", "pwrite", "symlink", "truncate")
        if hasattr(os, name)
    }
    | {time.thread_time, time.thread_time_ns, *_CLOCKS}
    | {time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns}
    | {time.process_time, time.process_time_ns, time.localtime, time.gmtime, time.strftime, time.sleep}
)
_FILES = frozenset({torch.save.__code__, torch.load.__code__})
_HOOKING = frozenset({Tensor.register_hook.__code__, Tensor.register_post_accumulate_grad_hook.__code__})
"""A hook may do anything, and a replayed backward pass calls none."""

_TODAY = frozenset({"now", "utcnow", "today"})
_OUTSIDE = frozenset(
    {"_queue", "queue", "_socket", "socket", "mmap", "_sqlite3", "sqlite3", "subprocess", "concurrent", "asyncio"}
    | {"multiprocessing"}
)
"""Packages of the standard library whose objects are there to be talked to, or are shared with others."""
_SIGNALS = (threading.Event, threading.Semaphore, threading.Barrier)
_MEMORY = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, memoryview)

_STREAM = frozenset({"write", "writelines", "read", "readline", "readlines"})
_IS_CAPTURING = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_SETTING = frozenset({"seed", "setstate", "manual_seed", "set_state", "set_offset", "graphsafe_set_state"})
_NUMBERS = frozenset({"numpy", "tolist"})
_TRUSTED = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_replay", "numpy"})
"""Libraries whose own clocks and messages change nothing that a step computes."""


class EffectWatch:
    """Watches one run of a region for effects on the host.

    Attributes:
        finding: The first effect.
        random_line: Where Python's random numbers were first drawn.
        blind: A profiler had the place of the watch.
        asks: The code asked whether it is being captured, or for a generator's state, which a capture forbids.

    Args:
        device: The device of the recordings. On another device than the CPU a tensor cannot be read as numbers without
            an operation that the inspection sees.
        active: Watch at all, which makes Python slow.
    """

    def __init__(self, device: torch.device, active: bool = True) -> None:
        self._active = active
        self._reads_numbers = device.type == "cpu"
        self.finding: Finding | None = None
        self.random_line: str | None = None
        self.blind = False
        self.asks = False

    def __enter__(self) -> "EffectWatch":
        # A Python profiler at work keeps its place: it would miss calls otherwise.
        self.blind = sys.getprofile() is not None
        if self._active and not self.blind:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if self.finding is not None:
            return
        if event == "call" and frame.f_code in _FILES:
            self.finding = _found(user_line(frame) or frame.f_code.co_name, f"{frame.f_code.co_name}()")
        if event == "call" and frame.f_code in _HOOKING:
            actual = f"{frame.f_code.co_name}() in each call"
            self.finding = Finding(Reason.HOOKS, user_line(frame) or "a tensor", "no hooks on tensors", actual)
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        if function is _IS_CAPTURING or (isinstance(owner, torch.Generator) and function.__name__ == "get_state"):
            self.asks = True
        if isinstance(owner, (random.Random, torch.Generator)) and function.__name__ in _SETTING:
            actual = f"{function.__name__}() in each call"
            where = user_line(frame) or function.__name__
            self.finding = Finding(Reason.HOST_RANDOM, where, "generators that are not set", actual)
        elif isinstance(owner, random.Random):
            self.random_line = self.random_line or user_line(frame)
        elif isinstance(owner, Tensor):
            if self._reads_numbers and function.__name__ in _NUMBERS and (line := user_line(frame)) is not None:
                expected = "work that the device can do alone"
                self.finding = Finding(Reason.HOST_SYNC, line, expected, f"Tensor.{function.__name__}()")
        elif _is_effect(function, owner) and not _is_trusted(frame) and not _is_collecting(frame):
            self.finding = _found(user_line(frame) or function.__name__, f"{function.__name__}()")


def _found(where: str, actual: str) -> Finding:
    return Finding(Reason.HOST_EFFECT, where, "no effect but the results", actual)


def is_outside(value: Any) -> bool:
    """Tells whether a value is shared with others: a queue, a database, a socket, another process, memory."""
    kind: Any = type(value)
    return _is_outside(kind)


@functools.lru_cache(maxsize=1024)
def _is_outside(kind: type) -> bool:
    packages = (str(base.__module__).split(".")[0] for base in kind.__mro__)
    return issubclass(kind, (*_SIGNALS, *_MEMORY)) or not _OUTSIDE.isdisjoint(packages)


def _is_effect(function: Any, owner: Any) -> bool:
    if isinstance(owner, type):
        return function.__name__ in _TODAY and issubclass(owner, datetime.date)
    if isinstance(owner, io.IOBase):
        return function.__name__ in _STREAM
    if is_outside(owner):
        return True
    return getattr(function, "__hash__", None) is not None and function in _EFFECTS


def _is_trusted(frame: FrameType | None) -> bool:
    """Tells whether the innermost frame outside of the standard library belongs to a trusted library."""
    while frame is not None and _library(frame) in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and _library(frame) in _TRUSTED


def _is_collecting(frame: FrameType | None) -> bool:
    """Tells whether the garbage collector called, which happens to be in the middle of anything."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def user_line(frame: FrameType | None = None) -> str | None:
    """Returns file and line of the innermost frame of the user's own code, or None.

    Args:
        frame: Where to begin; by default the caller.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if _library(frame) not in _TRUSTED and _library(frame) not in sys.stdlib_module_names:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]
