from slime_plugins.rollout_buffer.stand_in_engine.conversation import Conversation
from slime_plugins.rollout_buffer.stand_in_engine.luck import Luck


def is_phone_task(conversation: Conversation) -> bool:
    return False


def play_phone(conversation: Conversation, *, skill: float, luck: Luck) -> str:
    return ""
