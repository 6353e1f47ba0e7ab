"""What a model author imports stands on torch and the standard library alone."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src"

PROBE = """
import sys
import torch
before = set(sys.modules)
import stagevox.contract
for name in stagevox.contract.__all__:
    getattr(stagevox.contract, name)
print(*sorted(set(sys.modules) - before))
"""


def test_contract_imports_torch_and_the_standard_library_only():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={"PYTHONPATH": str(SRC), "PATH": ""}, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "stagevox.contract.phase" in loaded
    foreign = [name for name in loaded if name.split(".")[0] not in {*sys.stdlib_module_names, "torch", "stagevox"}]
    assert foreign == []
    own = [name for name in loaded if name.startswith("stagevox.") and not name.startswith("stagevox.contract")]
    assert own == ["stagevox.errors"]


def test_names_and_phases_load_no_torch():
    probe = "import sys, stagevox.contract as c; c.CODES, c.StageExecutionType, c.RowPhase; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe], env={"PYTHONPATH": str(SRC), "PATH": ""}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
