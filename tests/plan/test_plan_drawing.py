"""Rules of the plan's picture: it names chips, rates and memory, in light and dark, by eye, keyboard and ear."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from functools import cache

from isthmus.core.plan import Plan
from isthmus.plan.search.finish.plan_drawing import draw_plan, plan_page
from isthmus.plan.time.predict import PlanForecast, predict
from tests.plan.hand import model_of, plan_of, pool_of

POOL = pool_of("H20", "A100", gbps=10.0, round_trip_ms=20.0)


@cache
def drawn(dp: int = 1) -> tuple[Plan, PlanForecast]:
    plan = plan_of(dp=dp)
    return plan, predict(plan, POOL, model_of())


def texts(markup: str) -> list[str]:
    """Every text of a drawing or page, which is well-formed."""
    tree = ET.fromstring(markup.removeprefix("<!doctype html>\n"))
    return [text for text in tree.itertext() if text.strip()]


def test_the_picture_names_chips_rates_and_memory() -> None:
    """Each stage: cluster, number and kind of chips, peak rate, time, memory used and present; each hop: its rate."""
    plan, forecast = drawn()
    found = texts(draw_plan(plan, POOL, forecast))
    for word in ("1 x H20", "1 x A100", "148 TFLOP/s each", "312 TFLOP/s each", "10 ms"):
        assert word in found, word
    assert any(text.endswith("of 10 Gbit/s") for text in found)
    assert len([text for text in found if text.endswith("of 74.5 GiB") and ";" not in text]) == 1
    assert sum("per micro-batch" in text for text in found) >= 2


def test_equal_replicas_are_drawn_once() -> None:
    """Four boxes for two equal replicas of two stages would say nothing that two do not."""
    plan, forecast = drawn(2)
    svg = ET.fromstring(draw_plan(plan, POOL, forecast))
    boxes = [node for node in svg.iter() if node.get("class") == "box"]
    assert len(boxes) == 2
    assert any(text.startswith("2 equal replicas") for text in svg.itertext())


def test_the_picture_is_seen_in_the_dark_and_heard() -> None:
    """Colours are those of all pages, light and dark; every box and hop takes the focus and announces its lines."""
    plan, forecast = drawn()
    text = draw_plan(plan, POOL, forecast)
    assert "prefers-color-scheme: dark" in text
    groups = [node for node in ET.fromstring(text).iter() if node.get("tabindex") == "0"]
    labels = [node.get("aria-label") or "" for node in groups]
    assert len(labels) == 3
    assert all("GiB" in label or label.startswith("link a to b") for label in labels)


def test_the_page_has_drawing_words_and_tables_and_loads_nothing() -> None:
    """`explain --picture plan.html`: self-contained, and what users wrote stays text."""
    plan, forecast = drawn()
    page = plan_page(plan, POOL, forecast, ["Stage 0 is <b>slow</b>."])
    found = texts(page)
    assert "Stage 0 is <b>slow</b>." in found
    assert {"memory per chip", "peak rate (bf16)", "capacity"} <= set(found)
    for word in ("<script", "https:", "src=", "href", "@import", "url("):
        assert word not in page
    assert "default-src 'none'" in page
