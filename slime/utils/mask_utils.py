"""From messages or generations to training rows. Pure: the tokenizer is passed in.

Two ways, in this order:

1. ``pack_training_rows`` keeps the token ids that the engine really sampled and trains exactly those.
2. ``MultiTurnLossMaskGenerator`` rebuilds ids and mask from OpenAI messages with the tokenizer's own chat template, for
   conversations that come without generations. Where it cannot know, it trains nothing and says so.

``report_drift`` says what the second would have done to a trajectory of the first.
"""

from slime.utils.mask_drift import DriftKind, DriftReport
from slime.utils.mask_generator import (
    MaskedConversation,
    MaskedTurn,
    MultiTurnLossMaskGenerator,
    RebuiltConversation,
    RebuiltRows,
    call_with_tools,
    checked_ids_and_mask,
    known_loss_mask_types,
    register_loss_mask_type,
)
from slime.utils.mask_rows import (
    Generation,
    PromptCheck,
    PromptReceipt,
    TrainingRow,
    WeightVersionSpan,
    expand_image_tokens,
    get_response_lengths,
    pack_training_rows,
    pack_training_rows_within,
)
from slime.utils.mask_template import Undecided, UndecidedReason

__all__ = [
    "DriftKind",
    "DriftReport",
    "Generation",
    "MaskedConversation",
    "MaskedTurn",
    "MultiTurnLossMaskGenerator",
    "PromptCheck",
    "PromptReceipt",
    "RebuiltConversation",
    "RebuiltRows",
    "TrainingRow",
    "Undecided",
    "UndecidedReason",
    "WeightVersionSpan",
    "call_with_tools",
    "checked_ids_and_mask",
    "expand_image_tokens",
    "get_response_lengths",
    "known_loss_mask_types",
    "pack_training_rows",
    "pack_training_rows_within",
    "register_loss_mask_type",
]
