"""Makes code written for CUDA run on the CPU: devices are mapped, streams and memory figures do nothing.

For slime's and Megatron's training code in tests. Nothing of what they compute is replaced.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo  # it lists functions of torch.cuda when it is first imported, and refuses replaced ones
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is not looked into
    """Maps every device that is asked for to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.")  # Megatron asserts it before it clips
        if name == "to" and len(args) > 1 and not isinstance(args[1], torch.dtype | torch.Tensor):
            args = (args[0], CPU, *args[2:])
        if kwargs.pop("pin_memory", False):
            kwargs["pin_memory"] = False
        kwargs.pop("non_blocking", None) if name != "to" and name != "copy_" else None
        return func(*args, **kwargs)


class _Stream:
    """A stream that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def install() -> None:
    """Maps CUDA to the CPU in this process, for good."""
    _CudaMeansCpu().__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = cuda.synchronize = cuda.empty_cache = cuda.ipc_collect = lambda *_, **__: None
    cuda.memory_allocated = cuda.memory_reserved = cuda.max_memory_allocated = lambda *_, **__: 0
    cuda.mem_get_info = lambda *_: (1, 1)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_device_properties = lambda *_: MagicMock(major=9, minor=0, multi_processor_count=1, total_memory=1 << 34)
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda *_, **__: None
    cuda.LongTensor, cuda.FloatTensor, cuda.ByteTensor = torch.LongTensor, torch.FloatTensor, torch.ByteTensor
    cuda.IntTensor = torch.IntTensor
    cuda.nvtx = MagicMock()
    torch.compile = lambda function=None, **_: function if function is not None else (lambda inner: inner)


def stub(*names: str) -> None:
    """Gives every module under these names any attribute that is asked for."""
    import importlib.abc
    import importlib.machinery

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
            if name.split(".")[0] in names:
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
            return None

        def create_module(self, spec: Any) -> ModuleType:
            module = MagicMock(name=spec.name)
            module.__path__, module.__spec__ = [], spec
            return module

        def exec_module(self, module: ModuleType) -> None: ...

    sys.meta_path.insert(0, Finder())
