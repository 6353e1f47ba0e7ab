"""A pipeline without stages: what an ``OmniClient`` says is a function of the request, made by asyncio alone.

The Thinker repeats the prompt: a token a byte of its UTF-8, so that characters come in pieces. The Talker makes ``FRAMES`` frames
a token, Code2Wav ``SAMPLES`` samples a frame; the samples depend on text, voice and seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import numpy as np

from stagevox.config.blueprint import Blueprint
from stagevox.config.effective import merge
from stagevox.config.topology import StageSpec, Topology
from stagevox.contract import CODES, SAMPLE_RATE, WAVEFORM, StageExecutionType
from stagevox.errors import (
    BadRequestError,
    EmptyTextError,
    RequestFailedError,
    StageDiedError,
    TextTooLongError,
    UnknownVoiceError,
    VocabularyError,
)
from stagevox.pipeline.client import StageHealth
from stagevox.pipeline.events import EmitOutput, FinishRequest
from stagevox.pipeline.request import StageStats, Timing
from stagevox.stage.messages import Gauges
from stagevox.stage.payload import StageOutput, StageRequest

STAGES = ("thinker", "talker", "code2wav")
RATE = 16_000
FRAMES = 2
SAMPLES = 320
MAX_BYTES = 2000


class ScriptedFrontEnd:
    """Takes a text of up to ``MAX_BYTES`` bytes; knows no emoji and two voices."""

    voices = ("slt", "kal")
    sample_rate = RATE
    fields: tuple[str, ...] = ("text", "voice")

    def __init__(self, checkpoint=None):
        pass

    def admit(self, req_id, prompt):
        voice = prompt.get("voice")
        if voice is not None and voice not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        text = self.text(prompt)
        if not text.strip():
            raise EmptyTextError("text", "nothing to say")
        if "\N{GRINNING FACE}" in text:
            raise VocabularyError("text", "the voice can't say '\N{GRINNING FACE}'")
        ids = list(text.encode())
        if len(ids) > MAX_BYTES:
            raise TextTooLongError("text", f"{len(ids)} bytes", [f"up to {MAX_BYTES}"])
        return StageRequest(req_id, ids, options={"voice": voice or self.voices[0], "prompt": prompt})

    def text(self, prompt):
        return prompt["text"]

    def reply_text(self, token_ids, prompt):
        return bytes(token_ids).decode(errors="replace")


class MediaFrontEnd(ScriptedFrontEnd):
    """Takes a conversation with sounds and images; repeats the last message and counts the media."""

    fields = ("messages", "voice", "audios", "images")

    def text(self, prompt):
        parts = prompt["messages"][-1]["content"]
        return " ".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts)


def make_blueprint(front_end=None, text_stage="thinker", name="scripted"):
    specs = tuple(StageSpec(stage, StageExecutionType.AR, Path("/nowhere")) for stage in STAGES)
    topology = Topology(name, specs, "nowhere:FrontEnd", Path("/nowhere"), text_stage=text_stage)
    return Blueprint(topology, front_end or ScriptedFrontEnd(), {}, merge(topology, []), topology, {})


def samples_of(text_bytes, voice="slt", seed=None, frames=None):
    """What Code2Wav makes of a whole reply: float32 ``[samples]``."""
    frames = len(text_bytes) * FRAMES if frames is None else frames
    state = int.from_bytes(hashlib.sha256(f"{bytes(text_bytes)!r} {voice} {seed}".encode()).digest()[:8], "little")
    noise = np.random.default_rng(state).uniform(-0.4, 0.4, frames * SAMPLES)
    return noise.astype(np.float32)


class Ended(Exception):
    """The pipeline ends a request."""


class ScriptedStream:
    """One request; iterating makes its events."""

    def __init__(self, client, request):
        self._client, self._request = client, request
        self._closed = False

    def __aiter__(self):
        return self._events()

    async def _events(self):
        client, request = self._client, self._request
        started = time.monotonic()
        error = None
        try:
            async for event in client.script(request):
                yield event
            reason = client.reasons[request.req_id]
        except Ended:
            reason = "abort"
        except (BadRequestError, RequestFailedError) as failure:
            reason, error = "error", failure
        except BaseException:
            await self.aclose()
            raise
        self._closed = True
        client.drop(request.req_id)
        now = time.monotonic()
        yield FinishRequest(request.req_id, reason, error, Timing(started, None, now))

    async def aclose(self):
        if not self._closed:
            self._closed = True
            self._client.aborted.append(self._request.req_id)
            self._client.drop(self._request.req_id)


class ScriptedClient:
    """An ``OmniClient``.

    ``pause`` seconds pass before each output. ``hold``: an event that all outputs after the first wait for, so that a test holds
    requests in flight. ``fail`` maps a text to an error and the number of outputs before it; ``kill`` makes a stage die.
    """

    def __init__(self, pause=0.0):
        self.pause = pause
        self.hold = None
        self.fail = {}
        self.live = {}
        self.submitted, self.aborted = [], []
        self.reasons = {}
        self.stages = dict.fromkeys(STAGES, StageHealth.READY)
        self.most_live = 0
        self.watchers = []
        self.died, self.ended = asyncio.Event(), asyncio.Event()

    async def start(self):
        pass

    def submit(self, request):
        if request.req_id in self.live:
            raise BadRequestError("req_id", "in flight")
        road = STAGES[: STAGES.index(request.last_stage) + 1] if request.last_stage else STAGES
        for stage in road:
            if self.stages[stage] is StageHealth.DEAD:
                raise StageDiedError(f"{stage}: the engine died")
        self.live[request.req_id] = request
        self.most_live = max(self.most_live, len(self.live))
        self.submitted.append(request)
        return ScriptedStream(self, request)

    def drop(self, req_id):
        self.live.pop(req_id, None)
        self.reasons.pop(req_id, None)

    async def script(self, request):
        req_id, made = request.req_id, 0
        ids = request.first.prompt_token_ids
        error, after = self.fail.get(bytes(ids).decode(errors="replace"), (None, 0))

        async def emit(stage, tokens, multimodal):
            nonlocal made
            if error is not None and made >= after:
                raise error
            if made and self.hold is not None:
                await self._wait(self.hold.wait())
            if self.pause:
                await self._wait(asyncio.sleep(self.pause))
            if self.ended.is_set():
                raise Ended
            for name, health in self.stages.items():
                if health is StageHealth.DEAD and (name == "thinker" or request.last_stage is None):
                    raise StageDiedError(f"{name}: the engine died")
            made += 1
            return EmitOutput(stage, StageOutput(req_id, tokens, multimodal))

        cap = request.sampling.get("thinker", {}).get("max_tokens", len(ids))
        reply = ids[:cap]
        reason = "length" if cap < len(ids) else "stop"
        for token in reply:
            yield await emit("thinker", [token], {})
        if request.last_stage is None:
            frames = len(reply) * FRAMES
            cap = request.sampling.get("talker", {}).get("max_tokens", frames)
            if cap < frames:
                frames, reason = cap, "length"
            seed = request.sampling.get("talker", {}).get("seed")
            samples = samples_of(reply, request.first.options["voice"], seed, frames)
            for first in range(0, frames, 7):
                codes = np.full((min(7, frames - first), 4), first)
                yield await emit("talker", list(range(len(codes))), {CODES: codes})
                part = samples[first * SAMPLES : (first + 7) * SAMPLES]
                yield await emit("code2wav", [], {WAVEFORM: part, SAMPLE_RATE: RATE})
        if error is not None:
            raise error
        self.reasons[req_id] = reason

    async def _wait(self, what):
        """Wait for it, or until a stage dies or the pipeline ends its requests."""
        waits = [asyncio.ensure_future(one) for one in (what, self.died.wait(), self.ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def kill(self, stage):
        self.stages[stage] = StageHealth.DEAD
        self.died.set()

    @property
    def num_requests(self):
        return len(self.live)

    def health(self):
        return dict(self.stages)

    def stats(self):
        return [StageStats(name) for name in STAGES]

    def gauges(self):
        return {name: Gauges(running=len(self.live)) for name in STAGES}

    def watch(self, watcher):
        self.watchers.append(watcher)

    async def drain(self, seconds):
        end = time.monotonic() + seconds
        while self.live and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.ended.set()

    async def close(self):
        pass
