"""A loss mask of the user's own is found, tried before anything is played, and decides what is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import CheckpointDataSource, trainer_args
from slime.rollout.agent_rollout import generate_rollout
from slime.rollout.agent_rollout_samples import SampleConverter
from slime.rollout.agent_rollout_settings import read_mask_settings
from slime.utils import mask_generator as built_in
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer import mask_selection
from slime_plugins.rollout_buffer.trainer.mask_selection import check_masks
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.loopback_buffer import LoopbackBuffer

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]

PASTED = """
class CustomTaskLossMaskGenerator(MultiTurnLossMaskGenerator):
    def get_custom_multi_turn_loss_mask(self, messages):
        return [1, 2, 3, len(messages)], [0, 0, 1, 1]

    def get_loss_mask(self, messages: List[Dict]) -> List[int]:
        if self.tokenizer_type == "qwen":
            return self.gen_multi_turn_loss_mask_qwen(messages)
        elif self.tokenizer_type == "custom_task":
            return self.get_custom_multi_turn_loss_mask(messages)
        else:
            raise ValueError(f"Unsupported tokenizer type: {self.tokenizer_type}")
"""
IMPORTING = "from typing import Dict, List\nfrom slime.utils.mask_utils import MultiTurnLossMaskGenerator\n" + PASTED
METHOD_ALONE = """
class CustomTaskLossMaskGenerator(MultiTurnLossMaskGenerator):
    def get_custom_multi_turn_loss_mask(self, messages):
        return [1, 2, 3, len(messages)], [0, 0, 1, 1]
"""
REGISTERING = """
from slime.utils.mask_utils import register_loss_mask_type

register_loss_mask_type("custom_task", lambda generator, messages, tools: ([1, 2, 3, len(messages)], [0, 0, 1, 1]))
"""


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test loads and registers again."""
    monkeypatch.setattr(built_in, "_registered", {})
    cached = (mask_selection._module, mask_selection.mask_generator, mask_selection.check_masks)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user keeps their masks; its folder can be imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_masks", raising=False)
    return tmp_path / "my_masks.py"


def args_with(**changes: Any) -> Any:
    return trainer_args(**{"hf_checkpoint": str(DEMO_TOKENIZER_PATH), **changes})


def trained(**changes: Any) -> tuple[list[int], list[int] | None, str]:
    """Tokens, mask and way of the row that the trainer makes of a plain conversation."""
    args = args_with(**changes)
    check_masks(read_mask_settings(args))
    (group,) = SampleConverter(args, samples_per_group=1).groups(
        [RolloutItem(uid="u", instance_id="i", messages=MESSAGES, reward=1.0, group_index=1)]
    )
    return group[0].tokens, group[0].loss_mask, group[0].metadata["row_source"]


CUSTOM = ([1, 2, 3, 2], [1, 1], "conversation")


@pytest.mark.parametrize(
    "code", [PASTED, IMPORTING, METHOD_ALONE, METHOD_ALONE.replace("messages):", "messages, **options):")]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_buffer_loss_mask": "{file}:CustomTaskLossMaskGenerator", "loss_mask_type": "custom_task"},
        {"rollout_buffer_loss_mask": "{file}:CustomTaskLossMaskGenerator"},
        {"rollout_buffer_loss_mask": "{file}", "loss_mask_type": "custom_task"},
        {"loss_mask_type": "{file}:CustomTaskLossMaskGenerator"},
    ],
)
def test_the_documents_class_works_from_a_file(file: Path, code: str, settings: dict[str, str]) -> None:
    file.write_text(code)
    assert trained(**{key: value.format(file=file) for key, value in settings.items()}) == CUSTOM


@pytest.mark.parametrize("by_file", [True, False])
def test_a_registered_type_is_found_in_the_module_that_registers_it(file: Path, by_file: bool) -> None:
    file.write_text(REGISTERING)
    source = str(file) if by_file else "my_masks"
    assert trained(rollout_buffer_loss_mask=source, loss_mask_type="custom_task") == CUSTOM
    assert trained(rollout_buffer_loss_mask=source, loss_mask_type="custom_task") == CUSTOM  # registered once


def test_a_class_that_changes_the_built_in_mask_keeps_its_type(file: Path) -> None:
    file.write_text(
        "class OnlyEnd(MultiTurnLossMaskGenerator):\n"
        "    def get_loss_mask(self, messages, tools=None):\n"
        "        token_ids, loss_mask = super().get_loss_mask(messages, tools)\n"
        "        last = max(at for at, one in enumerate(loss_mask) if one)\n"
        "        return token_ids, [int(at == last) for at in range(len(token_ids))]\n"
    )
    _, loss_mask, source = trained(rollout_buffer_loss_mask=f"{file}:OnlyEnd")
    assert (sum(loss_mask or []), source) == (1, "conversation")


def test_an_edited_module_of_slime_is_asked_for_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's own class with a branch more, which the overlay kept: no subclass of ours."""

    class MultiTurnLossMaskGenerator:
        def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
            self.tokenizer_type = tokenizer_type

        def get_loss_mask(self, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
            if self.tokenizer_type == "custom_task":
                return [1, 2, 3, len(messages)], [0, 0, 1, 1]
            raise ValueError(f"Unsupported tokenizer type: {self.tokenizer_type}")

    edited = ModuleType("slime.utils.mask_utils")
    edited.MultiTurnLossMaskGenerator = MultiTurnLossMaskGenerator  # type: ignore[attr-defined]  # it stands for a file
    monkeypatch.setitem(sys.modules, "slime.utils.mask_utils", edited)
    assert trained(loss_mask_type="custom_task") == CUSTOM
    with pytest.raises(ConfigError, match=r"the type 'other'.*Unsupported tokenizer type: other"):
        trained(loss_mask_type="other")


@pytest.mark.parametrize(
    ("code", "settings", "sentence"),
    [
        ("", {"loss_mask_type": "custom_task"}, "'custom_task' is not known.*rollout_buffer_loss_mask: module:Class"),
        ("", {"rollout_buffer_loss_mask": "/no/such.py:Mask"}, "there is no file /no/such.py"),
        ("", {"rollout_buffer_loss_mask": "no_such_module:Mask"}, "no_such_module cannot be loaded: ModuleNotFound"),
        ("x = (", {"rollout_buffer_loss_mask": "{file}:Mask"}, "cannot be loaded: SyntaxError"),
        ("import sys; sys.exit(3)", {"rollout_buffer_loss_mask": "{file}:Mask"}, "cannot be loaded: SystemExit: 3"),
        ("", {"rollout_buffer_loss_mask": "{file}:Mask"}, "has no Mask"),
        ("", {"rollout_buffer_loss_mask": "{file}"}, "has no class of masks"),
        (
            PASTED,
            {"rollout_buffer_loss_mask": "{file}", "loss_mask_type": "other"},
            "Unsupported tokenizer type: other",
        ),
        (
            "class Mask(MultiTurnLossMaskGenerator):\n    def get_loss_mask(self, messages): pass\n",
            {"rollout_buffer_loss_mask": "{file}:Mask"},
            r"it gave NoneType, and must give \(token_ids, loss_mask\)",
        ),
        (
            "class Mask(MultiTurnLossMaskGenerator):\n    def get_loss_mask(self, messages): return [1, 2], [1]\n",
            {"rollout_buffer_loss_mask": "{file}:Mask"},
            "2 token ids and a mask of 1",
        ),
        ("class Mask: ...\n", {"rollout_buffer_loss_mask": "{file}:Mask"}, "Mask"),
        (PASTED, {"rollout_buffer_loss_mask": "{file}", "hf_checkpoint": "/nowhere"}, "needs the tokenizer"),
        (PASTED, {"rollout_buffer_loss_mask": 7}, "rollout_buffer_loss_mask must be a string"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence_before_anything_is_played(
    file: Path, code: str, settings: dict[str, Any], sentence: str
) -> None:
    file.write_text(code)
    given = {key: value.format(file=file) if isinstance(value, str) else value for key, value in settings.items()}
    with LoopbackBuffer(["task"]) as buffer:
        args = args_with(rollout_buffer_url=buffer.url, **given)
        with pytest.raises(ConfigError, match=sentence):
            generate_rollout(args, 0, CheckpointDataSource(args))
        assert buffer.requests == []


@pytest.mark.parametrize("given", ["None", "([1, 2, 3], [0, 1])", "([1, 2], [0, 0.5])", "xxx"])
def test_a_class_that_does_not_work_never_leaves_the_mask_to_a_built_in_type(file: Path, given: str) -> None:
    file.write_text(METHOD_ALONE.replace("[1, 2, 3, len(messages)], [0, 0, 1, 1]", given))

    with pytest.raises(ConfigError, match="cannot be used"):
        check_masks(read_mask_settings(args_with(rollout_buffer_loss_mask=f"{file}:CustomTaskLossMaskGenerator")))


def test_a_mask_for_messages_of_its_own_kind_is_only_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(
        "class Mask(MultiTurnLossMaskGenerator):\n"
        "    def get_loss_mask(self, messages):\n"
        "        return [1, 2, 3], [0, 1, int(messages[1]['weight'])]\n"
    )
    check_masks(read_mask_settings(args_with(rollout_buffer_loss_mask=f"{file}:Mask")))
    assert "does not accept a plain conversation: KeyError('weight')" in caplog.text
