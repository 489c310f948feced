"""Records what slime's training steps compute: their data, their gradients, and what they log.

Functions of slime are wrapped while the steps run and put back afterwards; what they compute is not changed.
Metrics are recorded instead of logged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

Seen = dict[str, Any]

RECORDED_DATA = (
    "tokens",
    "log_probs",
    "rollout_log_probs",
    "advantages",
    "loss_masks",
    "response_lengths",
    "rollout_ids",
    "rollout_mask_sums",
)


@contextmanager
def watched(actor: Any) -> Iterator[Seen]:
    """Yields a record that is filled by the steps that the actor trains in the block."""
    seen: Seen = {"logged": {}, "steps": [], "logit_gradients": [], "gradients": {}, "images": [], "routes": []}
    with ExitStack() as stack:
        for watch in (_data, _log, _steps, _gradients, _logits, _images, _routes):
            stack.enter_context(watch(actor, seen))
        yield seen


@contextmanager
def _replaced(holder: Any, name: str, wrapper: Any) -> Iterator[None]:
    original = getattr(holder, name)
    setattr(holder, name, wrapper(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


@contextmanager
def _data(actor: Any, seen: Seen) -> Iterator[None]:
    """Records what a rank trains, after its advantages are computed and before its step."""

    def wrapper(original: Any) -> Any:
        def log_rollout_data(rollout_id: int, args: Any, data: dict[str, Any]) -> Any:
            seen["data"] = {key: plain(data[key]) for key in RECORDED_DATA if key in data}
            return original(rollout_id, args, data)

        return log_rollout_data

    module = sys.modules["slime.backends.megatron_utils.actor"]
    with _replaced(getattr(module, "train_metric_utils", module), "log_rollout_data", wrapper):
        yield


@contextmanager
def _log(actor: Any, seen: Seen) -> Iterator[None]:
    def wrapper(_: Any) -> Any:
        def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
            seen["logged"] |= {key: float(value) for key, value in metrics.items()}

        return log

    modules = [module for name, module in sys.modules.items() if name.endswith("logging_utils")]
    with ExitStack() as stack:
        for module in modules:
            if "log" in vars(module):
                stack.enter_context(_replaced(module, "log", wrapper))
        yield


@contextmanager
def _steps(actor: Any, seen: Seen) -> Iterator[None]:
    def wrapper(original: Any) -> Any:
        def train_one_step(*positional: Any, **named: Any) -> Any:
            losses, norm = original(*positional, **named)
            seen["steps"].append({"grad_norm": float(norm), "losses": {k: float(v) for k, v in losses.items()}})
            return losses, norm

        return train_one_step

    with _replaced(import_module("slime.backends.megatron_utils.model"), "train_one_step", wrapper):
        yield


@contextmanager
def _gradients(actor: Any, seen: Seen) -> Iterator[None]:
    """The size of every parameter's gradient, when the optimizer is about to use it."""

    def wrapper(original: Any) -> Any:
        def step(*positional: Any, **named: Any) -> Any:
            parameters = actor.model[0].named_parameters()
            seen["gradients"] = {name: float(value.main_grad.norm()) for name, value in parameters}
            return original(*positional, **named)

        return step

    with _replaced(actor.optimizer, "step", wrapper):
        yield


@contextmanager
def _logits(actor: Any, seen: Seen) -> Iterator[None]:
    """The size of the gradient at every token's logits, by micro-batch."""

    def watch(module: Any, inputs: Any, logits: Any) -> None:
        if torch.is_grad_enabled():
            number = len(seen["logit_gradients"])
            seen["logit_gradients"].append(None)
            logits.register_hook(lambda gradient: keep(number, gradient))

    def keep(number: int, gradient: Any) -> None:
        seen["logit_gradients"][number] = gradient.detach().abs().sum(-1).flatten().tolist()

    handle = actor.model[0].module.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _images(actor: Any, seen: Seen) -> Iterator[None]:
    """The grids of the images that reach the model with each micro-batch that is trained."""

    def watch(module: Any, positional: Any, named: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            grids = named.get("image_grid_thw")
            seen["images"].append(None if grids is None else grids.tolist())

    handle = actor.model[0].module.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _routes(actor: Any, seen: Seen) -> Iterator[None]:
    """The experts by which slime's replay routes each forward pass of each layer."""

    def wrapper(original: Any) -> Any:
        def pop_forward(self: Any) -> Any:
            indices = original(self)
            seen["routes"].append(indices.tolist())
            return indices

        return pop_forward

    try:
        replay = import_module("slime.utils.routing_replay").RoutingReplay
    except ImportError:
        yield
        return
    with _replaced(replay, "pop_forward", wrapper):
        yield


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, list) else value
