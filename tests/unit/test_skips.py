"""A skip is listed with its reason; one that could have run is a failure where CI is set."""

from __future__ import annotations

from tests.skips import EXPECTED, unexpected


def test_a_skip_for_a_missing_browser_or_package_is_unexpected() -> None:
    reasons = [
        "Skipped: no Chromium on the PATH, and ROLLOUT_BUFFER_CHROMIUM names none",
        "Skipped: Ray is not installed",
    ]
    assert unexpected(reasons) == sorted(reasons)


def test_at_most_ten_kinds_of_skips_are_expected() -> None:
    assert len(EXPECTED) <= 10
