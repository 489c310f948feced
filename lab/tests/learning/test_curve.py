"""Curves as SVG: well-formed, every curve named, larger rewards higher."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from rollout_buffer_lab.learning.curve import Curve, draw


def test_a_picture_is_well_formed_and_names_its_curves() -> None:
    picture = draw([Curve(name="<true>", means=[0.1, 0.9], quartiles=[(0.0, 0.2), (0.8, 1.0)])], "a & b")

    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert "<true>" in texts
    assert "a & b" in texts


def test_a_larger_reward_stands_higher() -> None:
    picture = draw([Curve(name="x", means=[0.0, 0.5, 3.0])], "rewards beyond one widen the picture")

    found = re.search(r'polyline points="([^"]+)"', picture)
    assert found is not None
    heights = [float(point.split(",")[1]) for point in found[1].split()]
    assert heights == sorted(heights, reverse=True)
    assert min(heights) >= 0
