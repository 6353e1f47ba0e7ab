"""Second environments: the Python that a reference needs, beside the one that stagevox runs in.

A reference may want another version of ``transformers``. Its environment is a virtual one of its own under ``.oracles/NAME``
that holds only what is pinned for it, and falls back on this interpreter's packages (PyTorch, numpy) for the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".oracles"
"""Where environments are made; git ignores it."""


def ensure(name: str, requirements: Sequence[str]) -> Path:
    """Make the environment ``name`` if it isn't there, with exactly the pinned ``requirements``; return its interpreter."""
    folder = ROOT / name
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = "\n".join(requirements) + "\n"
    if python.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *requirements]
    subprocess.run(install, check=True)
    # Entries of a .pth file come after the environment's own packages: what is pinned wins, the rest is found here.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = folder / "lib" / version / "site-packages"
    # The source folder is for PyTorch, which loads our declarations of torchvision's operators when it starts.
    fall_back = (sysconfig.get_path("purelib"), str(ROOT.parent / "src"))
    (own / "fall_back.pth").write_text("\n".join(fall_back) + "\n", encoding="utf-8")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def run(python: Path, *arguments: str) -> None:
    """Run a reference's script in its environment, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT.parent / "src")}
    subprocess.run([str(python), *arguments], check=True, env=environment)
