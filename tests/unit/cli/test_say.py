"""``stagevox say`` on stages without engines: one line and the right exit code, whatever happens (F31, F35, F40)."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import wave
from pathlib import Path

import pytest

import stagevox
from stagevox.cli.main import main

SRC = str(Path(stagevox.__file__).parents[1])
CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def say(fake_model, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capfd.readouterr()
        code = main(["say", "--model", "fake", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_it_speaks(say, tmp_path):
    code, out, err = say("hello")
    assert (code, err) == (0, "")
    first, *stages = out.splitlines()
    assert first.startswith("speech.wav: 0.15 s of speech in ") and "real-time factor" in first
    assert [line.split(":")[0].strip() for line in stages] == ["thinker", "talker", "code2wav"]
    assert "15 tokens" in stages[1] and " ms each" in stages[1] and "tokens" not in stages[2]
    with wave.open("speech.wav", "rb") as file:
        assert (file.getnframes(), file.getframerate()) == (15, 100)
    assert files(tmp_path) == ["speech.wav"]


def test_a_caller_in_python_keeps_its_signal_handlers(say):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert say("hello")[0] == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_json_is_one_object_and_nothing_else(say):
    code, out, err = say("hello", "--json", "-o", "a.wav")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert out == json.dumps(report) + "\n"
    assert list(report) == ["text", "file", "sample_rate", "audio_seconds", "wall_seconds", "rtf", "finish_reason", "stages"]
    assert (report["text"], report["file"], report["sample_rate"]) == ("5 letters", "a.wav", 100)
    assert report["audio_seconds"] == 0.15 and report["finish_reason"] == "stop"
    assert report["rtf"] == pytest.approx(report["wall_seconds"] / 0.15, abs=1e-5)
    assert [list(stage) for stage in report["stages"]] == [["name", "steps", "tokens", "ms_per_token"]] * 3
    assert report["stages"][2]["ms_per_token"] is None


def test_libraries_that_print_do_not_spoil_the_json(say, fake_model):
    def chatter(stage):
        os.write(1, b"C code says hello\n")
        print("Python too")

    fake_model.stages["talker"].on_step = chatter
    code, out, err = say("hello", "--json")
    assert code == 0 and json.loads(out)
    assert "C code says hello" in err and "Python too" in err


def test_no_audio_is_null_not_nan(say, fake_model):
    fake_model.stages["talker"].factor = 0
    code, out, _ = say("hello", "--json")
    assert code == 0 and json.loads(out)["rtf"] is None
    with wave.open("speech.wav", "rb") as file:
        assert file.getnframes() == 0


def test_a_cut_is_told(say, fake_model):
    add = fake_model.stages["talker"].add

    def capped(request):
        request.sampling["max_tokens"] = 4
        add(request)

    fake_model.stages["talker"].add = capped
    assert "cut short" in say("hello", "--seed", "1")[1]


def test_options_reach_the_stages(say, fake_model):
    seen = {}
    for stage in fake_model.stages.values():
        add = stage.add
        stage.add = lambda request, add=add, name=stage.name: (seen.update({name: request}), add(request))
    code, _, err = say("hi", "--voice", "kal", "--seed", "7", "--temperature", "0.5", "--trace", "trace.json")
    assert (code, err) == (0, "")
    assert seen["talker"].sampling == {"seed": 7, "temperature": 0.5}
    assert seen["talker"].options == {"voice": "kal"}
    assert fake_model.stages["talker"].record is True
    assert json.loads(Path("trace.json").read_text())["stages"] == {"thinker": [], "talker": [], "code2wav": []}


def test_the_trace_shows_every_step_and_the_prompt(say, fake_model):
    assert say("hello", "--trace", "trace.json")[0] == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    steps = [names[event["pid"]] for event in events if event.get("cat") == "step"]
    for name, stage in fake_model.stages.items():
        assert steps.count(f"stage: {name}") == stage.steps > 0
    (end,) = (event for event in events if event["ph"] == "e" and event["name"] == "offline")
    assert end["args"]["finish_reason"] == "stop" and end["ts"] >= max(e["ts"] for e in events if e.get("cat") == "step")


def test_the_text_may_come_from_stdin(say, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("héllo".encode())))
    assert json.loads(say("-", "--json")[1])["text"] == "5 letters"


@pytest.mark.parametrize(
    "argv, message",
    [
        ([""], "text: empty"),
        (["  \n"], "text: empty"),
        (["4 2"], "text: can't say '4 2'"),
        (["a\udcff"], "text: not valid UTF-8"),
        (["a", "--voice", "SLT"], "voice: no voice 'SLT' (allowed: slt, kal)"),
        (["a", "--voice", ""], "voice: no voice '' (allowed: slt, kal)"),
        (["a", "--model", "nothing"], "model: no model 'nothing' (allowed: fake)"),
        (["a", "--seed", "-1"], "seed: out of range: -1 (allowed: 0 to 9223372036854775807)"),
        (["a", "--seed", "x"], "seed: not an integer: 'x'"),
        (["a", "--temperature", "nan"], "temperature: not a finite number: nan"),
        (["a", "--temperature", "inf"], "temperature: not a finite number: inf"),
        (["a", "--temperature", "-1"], "temperature: out of range: -1.0 (allowed: at least 0, at most 2)"),
        (["a", "--temperature", "hot"], "temperature: not a number: 'hot'"),
        (["a", "--stage-overrides", "{"], "stage_overrides: not JSON: Expecting property name"),
        (["a", "--stage-overrides", "[" * 100000], "stage_overrides: not JSON: "),
        (
            ["a", "--stage-overrides", '{"talker": {"seed": 1}, "talker": {}}'],
            "stage_overrides: not JSON: 'talker' stands there twice",
        ),
        (["a", "--stage-overrides", "3"], "stage_overrides: not a mapping but a int"),
        (
            ["a", "--stage-overrides", '{"takler": {}}'],
            "stage_overrides.takler: no such stage (allowed: thinker, talker, code2wav)",
        ),
        (["a", "-o", "missing/a.wav"], "output: can't write 'missing/a.wav': No such file or directory"),
        (["a", "-o", "."], "output: can't write '.': a folder, not a file"),
        (["a", "--trace", "missing/t.json"], "trace: can't write 'missing/t.json': No such file or directory"),
        (["a", "-o", "a.wav", "--trace", "./a.wav"], "trace: the same file as the output's"),
    ],
)
def test_bad_input_is_one_line_and_starts_no_engine(say, fake_model, tmp_path, argv, message):
    code, out, err = say(*argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"stagevox: error: {message}") and err.count("\n") == 1
    assert fake_model.started == []
    assert files(tmp_path) == []


def test_stdin_that_is_not_utf8(say, fake_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, _, err = say("-")
    assert (code, err) == (2, "stagevox: error: text: not valid UTF-8\n")
    assert fake_model.started == []


def test_a_disk_that_is_full_is_one_line(say, fake_model):
    assert say("a", "-o", "/dev/full") == (1, "", "stagevox: error: can't write: No space left on device\n")
    assert say("a", "-o", "/dev/null", "--trace", "/dev/null")[0] == 0


def test_a_folder_that_is_gone_is_one_line(say, fake_model, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = say("a", "-o", str(tmp_path / "a.wav"))
    assert (code, err) == (2, "stagevox: error: current folder: can't be used: No such file or directory\n")
    assert fake_model.started == []


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_crash(tmp_path, closed):
    script = f'"$0" -m stagevox.cli.main say - -o a.wav {closed}'
    env = {**os.environ, "PYTHONPATH": SRC}
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], capture_output=True, text=True, input="", env=env, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == (0 if "2>" in closed else 1) and "Traceback" not in done.stderr


def test_the_command_line_is_utf8_whatever_the_locale():
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = "import sys; from stagevox.cli.say import _text; print(ascii(_text(sys.argv[1])))"
    for text in ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}"):
        done = subprocess.run(
            [sys.executable, "-c", script, text.encode()],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": SRC, **env},
        )
        assert done.stdout == ascii(text) + "\n", done.stderr


@pytest.mark.parametrize(
    "argv", [[], ["say"], ["sing", "a"], ["say", "a", "b"], ["say", "a", "--sede", "1"], ["say", "a", "--see", "1"]]
)
def test_a_wrong_command_line_is_one_line(argv, capfd):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capfd.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("stagevox: error: ") and err.count("\n") == 1


def test_a_failure_while_it_speaks_leaves_no_file(say, fake_model, tmp_path):
    fake_model.stages["talker"].die_at = 3
    code, out, err = say("hello", "--json")
    assert (code, out) == (1, "")
    assert err == "stagevox: error: talker: the engine died: RuntimeError: out of memory\n"
    assert files(tmp_path) == []


def command(*argv, **options):
    env = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, env=env, timeout=60, **options)


@pytest.mark.parametrize("module", ["stagevox", "stagevox.cli.main"])
def test_version_and_help(module):
    done = command(module, "--version")
    assert done.returncode == 0 and done.stdout.startswith("stagevox ")
    done = command(module, "say", "--help")
    assert done.returncode == 0 and "--stage-overrides" in done.stdout and "engines loaded" in done.stdout


def test_help_imports_neither_torch_nor_vllm():
    code = """
import sys
from stagevox.cli.main import main
try:
    main(["say", "--help"])
except SystemExit:
    print([name for name in ("torch", "vllm", "numpy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SRC}, timeout=60
    )
    assert done.stdout.endswith("[]\n"), done.stderr


def spawn(tmp_path, body, argv=("hello",), **options):
    """The command in a process of its own, with ``body`` run over the fake ``model`` before it."""
    code = f"""
import importlib.util, os, sys, time
import pytest
where = importlib.util.spec_from_file_location("fakes", {str(CONFTEST)!r})
fakes = importlib.util.module_from_spec(where)
where.loader.exec_module(fakes)
import stagevox.omni
from stagevox.cli.main import main
model = fakes.make_fake_model(pytest.MonkeyPatch())
{body}
sys.argv = ["stagevox", "say", "--model", "fake", *{list(argv)!r}]
main()
"""
    env = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


SLOW_STEP = """
def slow(stage):
    sys.stderr.write("stepping\\n"); sys.stderr.flush()
    time.sleep(30)
model.stages["talker"].on_step = slow
"""
SLOW_LOAD = """
def slow(spec, overrides, record):
    sys.stderr.write("loading\\n"); sys.stderr.flush()
    time.sleep(30)
stagevox.omni.start_stage = slow
"""
SLOW_WRITE = """
fsync = os.fsync
def slow(descriptor):
    sys.stderr.write("writing\\n"); sys.stderr.flush()
    time.sleep(0.5)
    fsync(descriptor)
os.fsync = slow
"""


@pytest.mark.parametrize(
    "body, number",
    [(SLOW_STEP, signal.SIGINT), (SLOW_LOAD, signal.SIGTERM), (SLOW_WRITE, signal.SIGINT), (SLOW_STEP, signal.SIGTERM)],
)
def test_an_interrupt_ends_it_within_two_seconds(tmp_path, body, number):
    with spawn(tmp_path, body) as process:
        assert process.stderr.readline() in ("stepping\n", "loading\n", "writing\n")
        started = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert time.monotonic() - started < 2.0
    assert (process.returncode, out, err) == (130, "", "")
    assert files(tmp_path) == (["speech.wav"] if body is SLOW_WRITE else [])


def test_nobody_reads(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with spawn(tmp_path, f"os.dup2({writer}, 1)", pass_fds=[writer]) as process:
        os.close(writer)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")
    assert files(tmp_path) == ["speech.wav"]


@pytest.mark.covers("MS-1")
@pytest.mark.parametrize("given", ["-1", "1", "17", "eight", "2.5"])
def test_a_number_of_merged_steps_that_can_t_be(say, fake_model, given):
    code, out, err = say("hello", f"--multi-step-decode-steps={given}")
    assert (code, out) == (2, "")
    assert err.startswith("stagevox: error: --multi-step-decode-steps: ") and err.count("\n") == 1
    assert fake_model.started == []


@pytest.mark.covers("MS-1")
def test_an_environment_that_can_t_be(say, fake_model, monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_MULTI_STEP_STEPS", "1")
    code, out, err = say("hello")
    assert (code, out) == (2, "")
    assert err.startswith("stagevox: error: VLLM_OMNI_MULTI_STEP_STEPS: ")
    assert fake_model.started == []


@pytest.mark.covers("MS-1")
def test_the_number_of_merged_steps_reaches_the_stages(say, fake_model):
    assert say("hello", "--multi-step-decode-steps", "12")[0] == 0
    assert {stage.asked_steps for stage in fake_model.stages.values()} == {12}
