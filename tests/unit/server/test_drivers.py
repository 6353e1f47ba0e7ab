"""What drivers are told of the model and of the operator's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stagevox.config.deploy import Connectors
from stagevox.connectors.outbox import RoadLimits
from stagevox.server.drivers import DriverOptions, make_client
from tests.support.scripted import blueprint


def test_both_drivers_know_which_stage_writes_the_text(monkeypatch):
    monkeypatch.setattr("stagevox.config.env.prepare_inline_process", lambda: None)  # it is for good
    for driver in ("inline", "process"):
        assert make_client(driver, blueprint(), DriverOptions())._orchestrator.text_stage == "thinker"


def test_every_window_that_a_deploy_file_may_have_is_one_that_a_stage_takes():
    with pytest.raises(ValidationError):
        Connectors(window=RoadLimits().queued + 1)
    for window in (1, RoadLimits().queued):
        RoadLimits(per_request=Connectors(window=window).window)
