"""``stagevox say``: one text, one WAV file."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stagevox.errors import BadParameterError, BadRequestError, ConfigError

from .deploy_options import add_deploy_options, blueprint_of

if TYPE_CHECKING:
    from stagevox.omni import OmniResult

DESCRIPTION = """\
Speak a text and write it to a WAV file.

The times that are reported count from the prompt's submission to the last sample, with the engines loaded; the
real-time factor is that time over the length of the audio, so below 1 is faster than speech."""


def add_parser(commands: Any) -> None:
    """Add ``say`` to the subcommands."""
    parser = commands.add_parser(
        "say",
        help="speak a text into a WAV file",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", help="what to say; - reads it from stdin")
    parser.add_argument("-o", "--output", metavar="FILE", default="speech.wav", help="the WAV file (default: %(default)s)")
    parser.add_argument(
        "--model", metavar="NAME|PATH", default="mini", help="a packaged model or a folder (default: %(default)s)"
    )
    parser.add_argument("--voice", help="one of the model's voices (default: its first)")
    parser.add_argument("--seed", metavar="N", help="the same seed gives the same speech")
    parser.add_argument("--temperature", metavar="T", help="of the Talker; 0 always takes the likeliest sound")
    parser.add_argument("--trace", metavar="FILE", help="write the step log of every stage, and a timeline for Perfetto, as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
    add_deploy_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, load the model, speak, write, report."""
    from stagevox.config.env import hush_libraries, prepare_inline_process
    from stagevox.stage.version import check_vllm_version

    check_vllm_version()
    check_folder()
    prepare_inline_process()
    hush_libraries()
    from stagevox.audio.wav import check_writable, wav_bytes, write_whole

    prompt = {"text": _text(args.text), "voice": args.voice}
    sampling = {"seed": _seed(args.seed), "temperature": _temperature(args.temperature)}
    output, trace = Path(args.output), Path(args.trace) if args.trace is not None else None
    with _uninterrupted():
        check_writable("output", output)
        if trace is not None:
            check_writable("trace", trace)
            if os.path.realpath(trace) == os.path.realpath(output) and not (output.exists() and not output.is_file()):
                raise ConfigError("trace", "the same file as the output's")
    with only_ours_on_stdout() as stdout:
        blueprint = blueprint_of(args.model, args)
        blueprint.admit("check", prompt, sampling)
        blueprint.effective.check_one_process()
        blueprint.check_overrides()

        from stagevox.omni import Omni

        args.omni = omni = Omni(blueprint, record_trace=trace is not None)  # lives as long as args: see main
        from stagevox.observe.recording import Recording

        recording = Recording(blueprint.stages, name=blueprint.topology.name)
        with _progress() as show:

            def on_event(event: Any) -> None:
                if trace is not None:
                    recording.happened(event)
                if show is not None:
                    show(event)

            on_step = None if trace is None else recording.stepped
            (result,) = omni.generate(prompt, sampling, on_event=on_event, on_step=on_step)
        if result.error is not None:
            raise result.error
        rows = {stage: [row._asdict() for row in rows] for stage, rows in omni.trace().items()}
        with _uninterrupted():
            if trace is not None:
                write_whole(trace, recording.document(rows))
            write_whole(output, wav_bytes(result.audio, result.sample_rate))
        report = make_report(result, output)
        print(json.dumps(report) if args.json else _as_text(report), file=stdout, flush=True)
    return 0


def make_report(result: OmniResult, output: Path) -> dict[str, Any]:
    """What ``--json`` prints. Numbers that don't exist, such as the real-time factor of no audio, are null."""
    audio_seconds = len(result.audio) / result.sample_rate
    return {
        "text": result.text,
        "file": str(output),
        "sample_rate": result.sample_rate,
        "audio_seconds": round(audio_seconds, 6),
        "wall_seconds": round(result.seconds, 6),
        "rtf": round(result.seconds / audio_seconds, 6) if audio_seconds else None,
        "finish_reason": result.finish_reason,
        "stages": [
            {
                "name": stage.name,
                "steps": stage.steps,
                "tokens": stage.tokens,
                "ms_per_token": None if math.isnan(stage.ms_per_token) else round(stage.ms_per_token, 4),
            }
            for stage in result.stages
        ],
    }


def _as_text(report: dict[str, Any]) -> str:
    rtf = "" if report["rtf"] is None else f", real-time factor {report['rtf']:.2f}"
    cut = " (cut short: a stage reached its cap)" if report["finish_reason"] == "length" else ""
    lines = [f"{report['file']}: {report['audio_seconds']:.2f} s of speech in {report['wall_seconds']:.2f} s{rtf}{cut}"]
    for stage in report["stages"]:
        each = "" if stage["ms_per_token"] is None else f", {stage['tokens']} tokens, {stage['ms_per_token']:.2f} ms each"
        lines.append(f"  {stage['name']}: {stage['steps']} steps{each}")
    return "\n".join(lines)


def _text(given: str) -> str:
    try:
        if given != "-":
            return os.fsencode(given).decode()  # the bytes of the command line are UTF-8, whatever the locale says
        if sys.stdin is None:
            raise BadRequestError("text", "stdin is closed")
        return sys.stdin.buffer.read().decode()
    except OSError as error:
        raise BadRequestError("text", f"can't read stdin: {error.strerror}") from None
    except UnicodeError:
        raise BadRequestError("text", "not valid UTF-8") from None


def _seed(given: str | None) -> int | None:
    if given is None:
        return None
    try:
        return int(given)
    except ValueError:
        raise BadParameterError("seed", f"not an integer: {given!r}") from None


def _temperature(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        raise BadParameterError("temperature", f"not a number: {given!r}") from None


def check_folder() -> None:
    """Refuse a current folder that is gone; raises :class:`ConfigError`."""
    try:
        os.getcwd()
    except OSError as error:  # torch's libraries can't be loaded there
        raise ConfigError("current folder", f"can't be used: {error.strerror}") from None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM while a file is written: an interrupt leaves it whole or absent, and no temporary one."""
    held = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


@contextmanager
def only_ours_on_stdout() -> Iterator[TextIO]:
    """Send what libraries print to stderr, C code included; yields the real stdout."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with (
            os.fdopen(real, "w", encoding=sys.stdout.encoding, errors="backslashreplace", closefd=False) as stdout,
            redirect_stdout(sys.stderr),
        ):
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal that grows with the speech; yields what sees the outputs."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    from stagevox.contract import WAVEFORM
    from stagevox.pipeline.events import EmitOutput

    with tqdm(desc="speaking", unit=" samples", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def show(event: Any) -> None:
            if isinstance(event, EmitOutput) and WAVEFORM in event.output.multimodal:
                bar.update(len(event.output.multimodal[WAVEFORM]))

        yield show
