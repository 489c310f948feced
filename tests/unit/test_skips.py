"""A skip is listed with its reason; one that could have run is a failure where CI is set."""

from __future__ import annotations

from tests.skips import EXPECTED, unexpected


def test_a_missing_browser_or_package_may_not() -> None:
    reasons = [
        "Skipped: no Chromium on the PATH, and ROLLOUT_BUFFER_CHROMIUM names none",
        "Skipped: Ray is not installed",
    ]
    assert unexpected(reasons) == sorted(reasons)


def test_what_may_be_skipped_is_ten_reasons_at_most() -> None:
    assert len(EXPECTED) <= 10
