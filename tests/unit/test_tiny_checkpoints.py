"""The tool that writes random checkpoints never writes over anything."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "tiny_checkpoints.py"


def test_what_is_there_already_stays(tmp_path):
    (tmp_path / "config.json").write_text("precious")
    done = subprocess.run([sys.executable, str(TOOL), "qwen3_tts", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.endswith(f"error: {tmp_path} is there already\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
