"""Converts generations or messages to training rows. Pure: the tokenizer is passed in.

1. ``pack_training_rows`` trains exactly the token ids that the engine sampled.
2. ``MultiTurnLossMaskGenerator`` rebuilds ids and mask from OpenAI messages with the tokenizer's chat template, for
   conversations without generations. Tokens that cannot be decided are not trained, and reported.

``report_drift`` compares the two for one trajectory.
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
