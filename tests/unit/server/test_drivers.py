"""What drivers are told of the model and of the operator's settings."""

from __future__ import annotations

from stagevox.server.drivers import DriverOptions, make_client
from tests.support.scripted import blueprint


def test_both_drivers_know_which_stage_writes_the_text(monkeypatch):
    monkeypatch.setattr("stagevox.config.env.prepare_inline_process", lambda: None)  # it is for good
    for driver in ("inline", "process"):
        assert make_client(driver, blueprint(), DriverOptions())._orchestrator.text_stage == "thinker"
