"""The check that ends an installation finds what ``--no-deps`` could have missed."""

from importlib.metadata import Distribution

import pytest

import check_environment


class Fake(Distribution):
    def __init__(self, name, version, *requires):
        self.lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in requires)]

    def read_text(self, filename):
        return "\n".join(self.lines) + "\n" if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


GOOD = [Fake("torch", "2.13.0+cpu"), Fake("A.b", "1.5", "torch==2.13.0", "gone; extra == 'more'", "triton; python_version > '3'")]


def test_a_complete_cpu_environment_passes():
    assert list(check_environment.findings(GOOD)) == []


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (Fake("c", "1", "missing>=2"), "c 1 needs missing>=2, which is not installed"),
        (Fake("c", "1", "a-b>=2"), "c 1 needs a-b>=2, found 1.5"),
        (Fake("nvidia-cublas", "13"), "nvidia-cublas 13 is installed"),
        (Fake("triton", "3"), "triton 3 is installed"),
    ],
)
def test_a_planted_fault_is_found(planted, said):
    (line,) = check_environment.findings([*GOOD, planted])
    assert line.startswith(said)


def test_a_cuda_torch_is_found():
    (line,) = check_environment.findings([Fake("torch", "2.13.0")])
    assert line.startswith("torch 2.13.0 is installed")
