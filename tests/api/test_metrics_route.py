"""What /metrics says after real requests."""

from __future__ import annotations

from tests.api.scripted import ScriptedBackend, call, complete, make_service


def test_totals_are_right_and_series_stay_constant_under_attack() -> None:
    service = make_service(ScriptedBackend("abc"))
    for _ in range(3):
        complete(service, prompt="xy")
    complete(service, prompt="")
    text = call(service, "GET", "/metrics").text
    assert 'raymoe_http_requests_total{outcome="completed",path="/v1/completions"} 3.0' in text
    assert 'raymoe_http_requests_total{outcome="refused",path="/v1/completions"} 1.0' in text
    assert "raymoe_prompt_tokens_total 6.0" in text
    assert "raymoe_completion_tokens_total 9.0" in text
    assert "raymoe_first_token_seconds_count 3.0" in text

    counts = set()
    for number in range(20):
        call(service, "GET", f"/v1/x/{number}")
        call(service, "GET", f"/v1/models/{number}")
        complete(service, prompt="x", model=f"model-{number}")
        counts.add(len(call(service, "GET", "/metrics").text.splitlines()))
    assert len(counts) <= 2  # the first scrape's own series appears in the second
