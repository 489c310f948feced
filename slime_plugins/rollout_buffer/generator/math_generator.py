"""Math problems with one right answer. A single-turn generator to copy for your own task.

An input line: ``{"instance_id": "7", "prompt": [{"role": "user", "content": "What is 6 * 7?"}], "label": "42"}``
(``answer`` is an alias of ``label``). The reward is 1 if the last ``\\boxed{}`` of the reply, or without one its last
number, equals the label as a mathematical expression, else 0.
"""

from __future__ import annotations

from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext, SingleTurnGenerator
from slime_plugins.rollout_buffer.generator.math_reward.answers import final_answer, is_same_text, label_of
from slime_plugins.rollout_buffer.generator.math_reward.judge import MathJudge
from slime_plugins.rollout_buffer.types import Instance, Message

TASK_TYPE = "math"
REWARD_RANGE = (0.0, 1.0)


class MathGenerator(SingleTurnGenerator):
    """Samples one answer per problem and compares it with the label."""

    def __init__(self) -> None:
        super().__init__()
        self._judge = MathJudge()

    async def start(self, context: GeneratorContext) -> None:
        """As ``SingleTurnGenerator.start``; also starts the judge.

        Raises:
            ConfigError: as ``SingleTurnGenerator.start``, or math-verify is not installed.
            JudgeError: the judge's processes do not start.
        """
        await super().start(context)
        await self._judge.start()

    def messages(self, instance: Instance) -> list[Message]:
        """As ``SingleTurnGenerator.messages``; a line without a label fails before anything is sampled."""
        label_of(instance)
        return super().messages(instance)

    async def reward(self, instance: Instance, text: str) -> float:
        """Returns 1 for a right answer, else 0; also 0 if the comparison takes too long.

        Raises:
            JudgeError: no verdict: the judge's processes crashed or hung.
        """
        label = label_of(instance)
        answer = final_answer(text)
        if answer is None:
            return 0.0
        return float(is_same_text(answer, label) or await self._judge.are_equal(label, answer))

    async def close(self) -> None:
        await self._judge.close()


def create_generator() -> MathGenerator:
    return MathGenerator()
