"""A program: the log-prob of every token of some rows under a model, in float32. Needs torch and transformers.

    python tests/recompute_log_probs.py MODEL < rows.json > log_probs.json

Rows are lists of token ids. A row's answer is one number shorter than the row: nothing predicts a first token.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers


def log_probs_of(model: Any, row: list[int]) -> list[float]:
    """The log-prob of each token after the first, given all before it."""
    ids = torch.tensor([row])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0].float()
    computed = torch.log_softmax(logits[:-1], -1)
    found: list[float] = computed.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def main() -> int:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    json.dump([log_probs_of(model, row) for row in json.load(sys.stdin)], sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
