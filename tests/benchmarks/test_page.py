"""The tables of the docs that show saved results."""

from pathlib import Path

from benchmarks.page import PAGE, RESULTS, filled, load_results, parts

CHECKOUT = Path(__file__).parents[2]


def test_committed_page_is_current() -> None:
    page, results = (CHECKOUT / PAGE).read_text(encoding="utf-8"), load_results(CHECKOUT / RESULTS)
    assert parts(page) == results.keys()
    assert filled(page, results) == page, "run python -m benchmarks.page"


def test_table_has_values_units_and_goals() -> None:
    goal = {"relation": ">=", "bound": 0.9}
    figures = [
        {"name": "small", "value": 2.5, "unit": "s", "goal": None, "met": None},
        {"name": "  memory", "value": 1234.5, "unit": "MB", "goal": None, "met": None},
        {"name": "small: share", "value": 0.5, "unit": "", "goal": goal, "met": False},
        {"name": "|Δ|", "value": 0.0123, "unit": "nats", "goal": None, "met": None},
    ]
    machine = {"cores": 2, "gpus": [{"name": "H100"}]}
    settings = {"arguments": ["--rounds", "2"]}
    record = {"time": "2026-01-02 03:04", "machine": machine, "settings": settings, "figures": figures}
    page = filled("before\n<!-- results: fit -->\nold\n<!-- end -->\nafter", {"fit": record})
    assert page.startswith(
        "before\n<!-- results: fit -->\n`python -m benchmarks fit --rounds 2`, 2026-01-02, 2 cores, H100 "
    )
    assert "| small | 2.5 s | 1,234 MB | 0.5 (>= 0.9: **missed**) |\n" in page
    assert "| \\|Δ\\| | 0.0123 nats |\n<!-- end -->\nafter" in page
    assert "old" not in page
