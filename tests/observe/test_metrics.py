"""Metrics keep their number of series, whatever clients ask for."""

from __future__ import annotations

from raymoe.observe.metrics import PATHS, ApiMetrics


def series(metrics: ApiMetrics) -> set[str]:
    lines = metrics.render().decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_unknown_paths_and_models_share_one_series() -> None:
    metrics = ApiMetrics("m")
    metrics.answered("/x", "refused", 0.1)
    metrics.asked_for("x")
    before = series(metrics)
    for number in range(1000):
        metrics.answered(f"/v1/x/{number}", "refused", 0.1)
        metrics.asked_for(f"model-{number}")
    assert series(metrics) == before
    assert 'raymoe_http_requests_total{outcome="refused",path="other"} 1001.0' in metrics.render().decode()
    assert 'raymoe_model_requests_total{model="other"} 1001.0' in metrics.render().decode()


def test_the_served_model_counts_under_its_name_also_when_left_out() -> None:
    metrics = ApiMetrics("m")
    metrics.asked_for("m")
    metrics.asked_for(None)
    assert 'raymoe_model_requests_total{model="m"} 2.0' in metrics.render().decode()


def test_the_number_of_series_has_a_bound() -> None:
    metrics = ApiMetrics("m")
    outcomes = ("completed", "refused", "failed", "cancelled")
    for path in PATHS:
        for outcome in outcomes:
            metrics.answered(path, outcome, 1.0)
    for model in ("m", "x"):
        metrics.asked_for(model)
    # Counters come with a _created series; a histogram has 11 buckets, count, sum and created.
    assert len(series(metrics)) <= len(PATHS) * (2 * len(outcomes) + 14) + 14 + 2 * 2 + 2 + 4 * 2


def test_two_services_in_one_process_do_not_share_counters() -> None:
    first, second = ApiMetrics("m"), ApiMetrics("m")
    first.answered("/health", "completed", 0.1)
    assert "path=" in first.render().decode() and 'path="/health"' not in second.render().decode()
