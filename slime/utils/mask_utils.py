"""From messages or generations to training rows. Pure: the tokenizer is passed in.

Two ways, in this order:

1. ``pack_training_rows`` keeps the token ids that the engine really sampled and trains exactly those.
2. ``MultiTurnLossMaskGenerator`` rebuilds ids and mask from OpenAI messages with the tokenizer's own chat template, for
   conversations that come without generations. Where it cannot know, it trains nothing and says so.

``report_drift`` says what the second would have done to a trajectory of the first.
"""

from slime.utils.mask_generator import (
    DriftKind,
    DriftReport,
    Generation,
    MaskedConversation,
    MaskedTurn,
    MultiTurnLossMaskGenerator,
    PromptCheck,
    PromptReceipt,
    RebuiltConversation,
    RebuiltRows,
    TrainingRow,
    Undecided,
    UndecidedReason,
    WeightVersionSpan,
    call_with_tools,
    checked_ids_and_mask,
    expand_image_tokens,
    get_response_lengths,
    known_loss_mask_types,
    pack_training_rows,
    pack_training_rows_within,
    register_loss_mask_type,
)

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
