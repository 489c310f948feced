"""Selects the loss mask for trajectories that consist of messages: a built-in type or a custom one.

A custom mask is a class with ``get_loss_mask(messages)``, usually a subclass of ``MultiTurnLossMaskGenerator``, or a
function passed to ``register_loss_mask_type``. slime's parser accepts a fixed list of types, so that custom ones are
set in the file of ``--custom-config-path``:

    rollout_buffer_loss_mask: my_masks:CustomTaskLossMaskGenerator    # or /path/my_masks.py:Class, or a module alone
    loss_mask_type: custom_task                                       # the type that the class is called with

Loading it runs code that the trainer's user configured, like slime's own ``--*-path`` arguments.

``is_last_reply_truncated`` decides whether the last reply has an end of turn to train.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.utils.mask_generator import (
    BUILT_IN_TYPES,
    MultiTurnLossMaskGenerator,
    RebuiltRows,
    call_with_tools,
    known_loss_mask_types,
    register_loss_mask_type,
)
from slime.utils.mask_rows import TrainingRow, get_response_lengths, response_length_of
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import StopReason
from slime_plugins.rollout_buffer.wire import RolloutItem

logger = logging.getLogger(__name__)

DOCUMENTED_TYPE = "custom_task"
"""The type of classes with ``get_custom_multi_turn_loss_mask``."""
METHOD_PREFIX = "gen_multi_turn_loss_mask_"
"""Before the name of a type in the name of its method."""
SLIMES_MODULE = "slime.utils.mask_utils"
HOW = (
    "set rollout_buffer_loss_mask: module:Class (or /path/file.py:Class, or a module that calls "
    "register_loss_mask_type) in the file of --custom-config-path"
)
WANTS_OTHER_MESSAGES = (KeyError, IndexError, AttributeError)
"""Errors that a mask for messages of a special form raises if it is called with ``PROBE``."""
PROBE: Sequence[dict[str, Any]] = ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"})
STOPS_THAT_CUT = frozenset({StopReason.MAX_TOKENS, StopReason.MAX_CONTEXT, StopReason.FORBIDDEN_TOKEN})
"""Stop reasons of a truncated last reply."""
STOPS_BETWEEN_TURNS = frozenset(
    {StopReason.MAX_TURNS, StopReason.TERMINATED, StopReason.ANSWERED, StopReason.TASK_ENDED, StopReason.REPEATED}
)
"""Stop reasons of a complete last reply."""
FINISH_REASONS_THAT_CUT = frozenset({"length", "abort"})
"""Finish reasons of a truncated last reply, if the stop reason does not decide it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSettings:
    """Settings of the loss mask. ``source`` names the user's class or module, None for a built-in type."""

    tokenizer_path: str | None
    loss_mask_type: str
    source: str | None
    chat_template_kwargs: str = "{}"
    """JSON, so that settings are hashable."""

    @property
    def is_users_generator(self) -> bool:
        """True if the mask is not built-in."""
        return self.source is not None or self.loss_mask_type not in BUILT_IN_TYPES


class ClassWithoutRows:
    """Adapter for a class that only has ``get_loss_mask``, such as slime's own; it makes one row of all turns."""

    is_built_in = False

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.tokenizer = getattr(wrapped, "tokenizer", None)

    def get_loss_mask(self, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
        """Calls the class and checks its result."""
        return call_with_tools(self.wrapped.get_loss_mask, messages, tools)

    def rebuild_rows(self, messages: Any, tools: Any = None, **_: Any) -> RebuiltRows:
        """Returns the one row of the class's mask."""
        token_ids, loss_mask = self.get_loss_mask(messages, tools)
        return RebuiltRows([TrainingRow(token_ids, loss_mask, None, response_length_of(loss_mask), ())], by_turn=False)


Masks = MultiTurnLossMaskGenerator | ClassWithoutRows


@functools.lru_cache(maxsize=8)
def check_masks(settings: MaskSettings) -> None:
    """Calls a custom mask with a small conversation, before episodes are played.

    Raises:
        ConfigError: the class or module cannot be loaded, the type is unknown, or the result is no valid mask.
    """
    if not settings.is_users_generator:
        return
    generator = mask_generator(settings)
    try:
        call_with_tools(generator.get_loss_mask, list(PROBE), None)
    except WANTS_OTHER_MESSAGES as error:
        logger.warning("the loss mask of %s does not accept a plain conversation: %r", _described(settings), error)


@functools.lru_cache(maxsize=4)
def mask_generator(settings: MaskSettings) -> Masks:
    """Returns the mask generator of these settings, loaded once per process.

    Raises:
        ConfigError: as ``check_masks``. For built-in types, errors of loading the tokenizer are not translated.
    """
    if not settings.is_users_generator:
        return _make(MultiTurnLossMaskGenerator, settings, _tokenizer(settings.tokenizer_path), settings.loss_mask_type)
    candidates = _classes(settings)
    try:
        tokenizer = _tokenizer(settings.tokenizer_path)
    except Exception as error:
        raise ConfigError(
            f"the loss mask of {_described(settings)} needs the tokenizer of --hf-checkpoint "
            f"({settings.tokenizer_path}), which cannot be loaded: {error}"
        ) from error
    problem: Exception | SystemExit | None = None
    for kind in candidates:
        for loss_mask_type in _types_for(kind, settings.loss_mask_type):
            try:
                generator = _make(kind, settings, tokenizer, loss_mask_type)
                _try(generator)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's class is reported below
                problem = problem or error
            else:
                return generator
    raise ConfigError(f"the loss mask of {_described(settings)} cannot be used: {problem}; {HOW}") from problem


def _try(generator: Masks) -> None:
    with contextlib.suppress(*WANTS_OTHER_MESSAGES):  # check_masks logs it
        call_with_tools(generator.get_loss_mask, list(PROBE), None)


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str | None) -> Any:
    if path is None:
        raise ConfigError("there is no tokenizer: give --hf-checkpoint")
    return load_tokenizer(path, trusted=True)


def _make(kind: Any, settings: MaskSettings, tokenizer: Any, loss_mask_type: str) -> Masks:
    options = json.loads(settings.chat_template_kwargs)
    if not (isinstance(kind, type) and issubclass(kind, MultiTurnLossMaskGenerator)):
        wrapped = kind(tokenizer, loss_mask_type)
        if not callable(getattr(wrapped, "get_loss_mask", None)):
            raise ConfigError(f"{kind!r} has no get_loss_mask(messages)")
        return ClassWithoutRows(wrapped)
    if kind.__init__ is MultiTurnLossMaskGenerator.__init__:
        return kind(tokenizer, loss_mask_type, chat_template_kwargs=options)
    return kind(tokenizer, loss_mask_type)


def _types_for(kind: Any, wanted: str) -> list[str]:
    """Returns the types to call a class with.

    That is ``wanted`` if it is a custom type, if the class defines it, or if the class defines no type. A class that
    defines other types is called with those: the built-in type ``wanted`` would hide their errors.
    """
    if wanted not in BUILT_IN_TYPES:
        return [wanted]
    defined = [name.removeprefix(METHOD_PREFIX) for name in vars(kind) if name.startswith(METHOD_PREFIX)]
    if hasattr(kind, "get_custom_multi_turn_loss_mask"):
        defined.append(DOCUMENTED_TYPE)
    return [wanted] if wanted in defined or not defined else defined


# --- finding the class -----------------------------------------------------------------------------------------------


def _classes(settings: MaskSettings) -> list[Any]:
    """Returns the classes that may implement the type, in the order of trial; loading a module may register the
    type."""
    if settings.source is None:
        return _classes_of_slimes_module(settings.loss_mask_type)
    module_name, _, class_name = _split(settings.source)
    module = _module(module_name, settings.source)
    if class_name:
        kind = getattr(module, class_name, None)
        if not callable(kind):
            raise ConfigError(f"rollout_buffer_loss_mask is {settings.source!r}, and {module_name} has no {class_name}")
        return [kind]
    classes = _user_classes(module)
    if settings.loss_mask_type not in BUILT_IN_TYPES and settings.loss_mask_type in known_loss_mask_types():
        classes = [MultiTurnLossMaskGenerator]
    if len(classes) != 1:
        names = ", ".join(kind.__name__ for kind in classes) or "no class of masks"
        raise ConfigError(
            f"rollout_buffer_loss_mask is {settings.source!r}, which has {names} and registers no type "
            f"{settings.loss_mask_type!r}: name the class, module:Class, or set loss_mask_type"
        )
    return classes


def _classes_of_slimes_module(loss_mask_type: str) -> list[Any]:
    """Returns the classes that may implement a type without a source: registered, or in slime's edited module."""
    if loss_mask_type in known_loss_mask_types():
        return [MultiTurnLossMaskGenerator]
    module = importlib.import_module(SLIMES_MODULE)
    edited = getattr(module, "MultiTurnLossMaskGenerator", None)
    classes = _user_classes(module)
    if edited is not None and edited is not MultiTurnLossMaskGenerator:
        classes = [kind for kind in classes if kind is not edited] + [edited]
    if not classes:
        known = ", ".join(known_loss_mask_types())
        raise ConfigError(f"the loss mask type {loss_mask_type!r} is not known (known are {known}): {HOW}")
    return classes


def _user_classes(module: ModuleType) -> list[Any]:
    """Returns the mask classes that a module defines itself."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "get_loss_mask")
    ]


def _split(source: str) -> tuple[str, str, str]:
    """Splits ``module:Class`` or ``/path/file.py:Class``; a dotted path may end in the class, as slime's own do."""
    module_name, colon, class_name = source.rpartition(":")
    if colon:
        return module_name.strip(), colon, class_name.strip()
    last = source.rpartition(".")[2]
    if not source.endswith(".py") and last[:1].isupper():
        return source.removesuffix(f".{last}"), ".", last
    return source, "", ""


@functools.lru_cache(maxsize=8)
def _module(name: str, source: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _module_of_file(Path(name).expanduser().resolve())
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may call sys.exit
        raise ConfigError(
            f"rollout_buffer_loss_mask is {source!r}, and {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    """Runs a file as a module, with the names of slime's mask_utils.py defined, so that its code can be pasted."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"rollout_buffer_loss_mask_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    for type_name in ("Any", "Dict", "List", "Optional", "Sequence", "Tuple", "Union"):
        setattr(module, type_name, getattr(typing, type_name))
    for value in (MultiTurnLossMaskGenerator, get_response_lengths, register_loss_mask_type):
        setattr(module, value.__name__, value)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _described(settings: MaskSettings) -> str:
    return settings.source or f"the type {settings.loss_mask_type!r}"


# --- the last reply --------------------------------------------------------------------------------------------------


def is_last_reply_truncated(item: RolloutItem) -> bool:
    """Returns True if the last reply was truncated before its end of turn.

    ``finish_reason`` is ``length`` for every truncated episode, also for one that ran out of turns: the stop reason
    decides first.
    """
    if item.stop_reason in STOPS_BETWEEN_TURNS:
        return False
    return item.stop_reason in STOPS_THAT_CUT or item.extra_info.get("finish_reason") in FINISH_REASONS_THAT_CUT
