"""Bad input to the packaged model is answered before vLLM is even imported (F31, F35)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stagevox

BAD = {
    "blank": (["say", " "], "text: "),
    "no words": (["say", "!?"], "text: "),
    "vocabulary": (["say", "xyzzy"], "text: "),
    "emoji": (["say", "\N{GRINNING FACE}"], "text: "),
    "too long": (["say", "one " * 200], "text: "),
    "voice": (["say", "hello", "--voice", "SLT"], "voice: "),
    "empty voice": (["say", "hello", "--voice", ""], "voice: "),
    "model": (["say", "hello", "--model", "nothing"], "model: "),
    "folder": (["say", "hello", "--model", "."], "model: "),
    "seed": (["say", "hello", "--seed", "-1"], "seed: "),
    "temperature": (["say", "hello", "--temperature", "nan"], "temperature: "),
    "stage": (["say", "hello", "--stage-overrides", '{"takler": {}}'], "stage_overrides.takler: "),
    "json": (["say", "hello", "--stage-overrides", "{"], "stage_overrides: "),
    "output": (["say", "hello", "-o", "missing/a.wav"], "output: "),
}

SCRIPT = """
import contextlib, io, json, sys
from stagevox.cli.main import main
answers = {}
for name, (argv, _) in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main(argv)
    answers[name] = [code, stderr.getvalue()]
print(json.dumps([answers, "vllm" in sys.modules]))
"""


@pytest.mark.covers("SV-2")
def test_bad_input_never_imports_vllm(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(stagevox.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, json.dumps(BAD)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    answers, imported = json.loads(done.stdout)
    for name, (code, stderr) in answers.items():
        assert code == 2, (name, stderr)
        assert stderr.startswith(f"stagevox: error: {BAD[name][1]}") and stderr.count("\n") == 1, (name, stderr)
    assert not imported
    assert list(tmp_path.iterdir()) == []
