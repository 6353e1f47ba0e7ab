"""``stagevox serve``: what its options come to, without a model."""

from __future__ import annotations

import argparse

import pytest

from stagevox.cli import serve
from stagevox.observe import log
from stagevox.server import drivers


class Reached(Exception):
    """Raised in place of loading a model."""


@pytest.fixture
def deadline(monkeypatch, tmp_path):
    """The deadline that stages are started with, given arguments and a deploy file's text."""

    def deadline(*given, deploy=None):
        seen = []

        def make_client(name, blueprint, options):
            seen.append(options.deadline)
            raise Reached

        monkeypatch.setattr(drivers, "make_client", make_client)
        monkeypatch.setattr(log, "set_up", lambda *options: None)
        if deploy is not None:
            file = tmp_path / "deploy.yaml"
            file.write_text(deploy)
            given = (*given, "--deploy-config", str(file))
        parser = argparse.ArgumentParser()
        serve.add_parser(parser.add_subparsers())
        with pytest.raises(Reached):
            serve.run(parser.parse_args(["serve", "--port", "0", *given]))
        return seen[0]

    return deadline


def test_the_deadline_is_that_of_the_deploy_file(deadline):
    assert deadline() == 30
    assert deadline(deploy="deadlines: {input: 7}") == 7
    assert deadline("--deadline", "3", deploy="deadlines: {input: 7}") == 3
