"""Create ``.venv`` and install the pinned packages into it: ``python3.11 tools/setup_venv.py [--dev]``.

Standard library only; ``make`` runs it before every target. A stamp holds the digest of what was installed, so that a repeat
costs nothing; after an interrupted run the next one starts afresh (from pip's cache).
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UNFINISHED = VENV / ".unfinished"  # pip takes a package that it was interrupted in for installed
LISTS = {"runtime": ROOT / "requirements" / "cpu.txt", "dev": ROOT / "requirements" / "dev.txt"}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    wanted = ["runtime", "dev"] if "--dev" in sys.argv[1:] else ["runtime"]
    if VENV.is_symlink():
        return  # somebody else's environment, used as it is
    if all(up_to_date(name) for name in wanted):
        return
    if sys.version_info[:2] != (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"stagevox needs Python 3.11, {sys.executable} is {found}; name another one: make PYTHON=/path/to/python3.11")
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        sys.exit(f"{sys.executable} lacks venv or ensurepip; install them (Debian and Ubuntu: apt-get install python3.11-venv)")
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second make waits here, then finds the stamps
        os.set_inheritable(lock.fileno(), True)  # a pip that outlives this process keeps the lock
        for name in wanted:
            if not up_to_date(name):
                create()
                stamp(name).unlink(missing_ok=True)
                UNFINISHED.touch()
                install(name)
                stamp(name).write_text(digest(name))
                UNFINISHED.unlink()


def up_to_date(name: str) -> bool:
    return stamp(name).exists() and stamp(name).read_text() == digest(name)


def stamp(name: str) -> Path:
    return VENV / f".installed-{name}"


def digest(name: str) -> str:
    """What the installation depends on: the list, the package's metadata, and where the checkout lies."""
    read = [LISTS[name], ROOT / "pyproject.toml"] if name == "runtime" else [LISTS[name]]
    return hashlib.sha256(b"\0".join([str(ROOT).encode(), *(path.read_bytes() for path in read)])).hexdigest()


def create() -> None:
    works = PYTHON.exists() and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    if not works or UNFINISHED.exists():
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)


def install(name: str) -> None:
    print(f"installing {LISTS[name].relative_to(ROOT)} into .venv (once; a few minutes)", flush=True)
    if name == "runtime":
        install_torch()
    pip("-r", LISTS[name])
    if name == "runtime":
        pip("--no-build-isolation", "-e", ROOT)
    if subprocess.run([PYTHON, ROOT / "tools" / "check_environment.py"]).returncode:
        sys.exit("the environment is not what requirements/ asks for")


def install_torch() -> None:
    """PyPI has no +cpu builds. A machine may know of the wheel through its own pip settings; else take PyTorch's index."""
    torch = next(line for line in LISTS["runtime"].read_text().splitlines() if line.startswith("torch=="))
    # The short timeouts keep an unreachable index from hanging.
    if pip("--timeout", "20", "--retries", "1", torch, check=False):
        return
    print(f"{torch} is not where pip looks by default; trying {TORCH_INDEX}", flush=True)
    # --index-url, so that PyTorch's index is asked for torch and for nothing else.
    if not pip("--index-url", TORCH_INDEX, "--timeout", "20", "--retries", "1", torch, check=False):
        sys.exit(f"{torch} could not be installed: neither pip's own index nor {TORCH_INDEX} gave it (is there a network?)")


def pip(*arguments: "str | Path", check: bool = True) -> bool:
    # --no-deps: the lists are complete, and a resolver would pull CUDA. --no-compile: most of these modules are never imported.
    command = [PYTHON, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=not check, close_fds=False, env={**os.environ, "PIP_NO_INPUT": "1"})
    if check and done.returncode:
        sys.exit("pip failed; what it wrote stands above. Run the same command again once that is mended.")
    return done.returncode == 0


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the next make starts the installation afresh")
