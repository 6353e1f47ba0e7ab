"""Prometheus metrics of a server: requests from their figures, stages from what the pipeline knows when it is asked.

Gauges are read from what is there at the time of the scrape, never counted up and down: they can't drift, and an idle server shows 0.
Every label has few values: endpoints, stages, reasons, and the names of errors, of which there are at most ``MOST_ERRORS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from stagevox.pipeline.client import OmniClient, StageHealth
from stagevox.pipeline.spans import StepSpan
from stagevox.stage.messages import Gauges

from .families import OTHER, Counter, Histogram, Labels, Names, counter, gauge, summary
from .figures import RequestFigures

ENDPOINTS = ("chat", "speech")
REASONS = ("stop", "length", "abort", "error")
RESTS = ("idle", "input", "consumer")
MOST_ERRORS = 64

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 4, 8, 15, 30, 60, 120, 300)
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)
RTF = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 4)

Read = Callable[[Gauges], Iterable[tuple[Labels, float]]]

# What a stage counts in its gauges since it was loaded: (name, what it says, labels beside the stage, how it is read).
# Whoever adds a count to Gauges adds a line here.
STAGE_COUNTS: Sequence[tuple[str, str, Labels, Read]] = (
    ("preemptions", "Requests that lost their KV cache to others", (), lambda g: [((), g.preemptions)]),
    ("replays", "Preempted requests that ran again, computing anew what they had lost", (), lambda g: [((), g.replays)]),
    ("payload_bytes", "Bytes of chunks handed to the next stage", (), lambda g: [((), g.payload_bytes)]),
    ("multi_step_windows", "Rounds that merged several decode steps", (), lambda g: [((), g.windows)]),
    ("multi_step_steps", "Decode steps of merged rounds", (), lambda g: [((), g.window_steps)]),
    ("multi_step_tokens_saved", "Tokens that took no round of their own", (), lambda g: [((), g.tokens_saved)]),
    (
        "multi_step_refusals",
        "Rounds that could have merged steps and did not",
        ("reason",),
        lambda g: [((reason,), count) for reason, count in sorted(g.refusals.items())],
    ),
)


class Metrics(Collector):
    """The metrics of one server; a sink of figures, and a collector of ``registry``."""

    def __init__(self, client: OmniClient, stages: Sequence[str], registry: CollectorRegistry | None = None) -> None:
        """``stages`` are the names of the pipeline's stages. Watches ``client`` from now on."""
        self._client = client
        self._stages = tuple(stages)
        self._live: dict[str, RequestFigures] = {}
        self._errors = Names(MOST_ERRORS)
        ends = [(endpoint,) for endpoint in ENDPOINTS]
        by_endpoint, by_stage = ("endpoint",), ("stage",)
        places = [(stage,) for stage in self._stages]

        def count(name: str, text: str) -> Counter:
            return Counter(name, text, by_endpoint, ends)

        def spread(name: str, text: str, bounds: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(name, text, by_endpoint, bounds, ends)

        self._finished = Counter(
            "requests_finished",
            "Requests that have ended, by why",
            ("endpoint", "reason"),
            [(endpoint, reason) for endpoint in ENDPOINTS for reason in REASONS],
        )
        self._aborted = count("requests_aborted", "Requests whose client left before the end")
        self._failed = Counter("request_errors", "Requests that failed, by the name of the error", ("error",))
        self._prompt_tokens = count("prompt_tokens", "Tokens of prompts")
        self._text_tokens = count("text_tokens", "Tokens of replies' text")
        self._audio_tokens = count("audio_tokens", "Frames of codes of replies' speech")
        self._audio_seconds = count("audio_seconds", "Seconds of audio made")
        self._queue = spread("request_queue_seconds", "From arrival until the request left the queue")
        self._whole = spread("request_seconds", "From arrival to the end")
        self._first_token = spread("time_to_first_token_seconds", "From arrival to the first token of any stage")
        self._first_audio = spread("time_to_first_audio_seconds", "From arrival to the first sample")
        self._rtf = spread("audio_rtf", "From leaving the queue until all was made, over the audio's length", RTF)
        self._gap = spread("audio_chunk_gap_seconds", "Between two pieces of audio of one choice")
        self._stage_wait = Histogram(
            "stage_first_output_seconds",
            "A stage's first output for a request, after that of the stage before (of the first stage: after leaving the queue)",
            by_stage,
            SECONDS,
            places,
        )
        self._step = Histogram("stage_step_seconds", "How long a step took", by_stage, STEP_SECONDS, places)
        self._rest = Counter(
            "stage_wait_seconds",
            "Time a stage slept between steps: idle, for its input, or for the next stage to catch up",
            ("stage", "reason"),
            [(stage, reason) for stage in self._stages for reason in RESTS],
        )
        self._own: tuple[Counter | Histogram, ...] = (
            self._finished,
            self._aborted,
            self._failed,
            self._prompt_tokens,
            self._text_tokens,
            self._audio_tokens,
            self._audio_seconds,
            self._queue,
            self._whole,
            self._first_token,
            self._first_audio,
            self._rtf,
            self._gap,
            self._stage_wait,
            self._step,
            self._rest,
        )
        client.watch(self.stepped)
        if registry is not None:
            registry.register(self)

    # -- what happens -------------------------------------------------------------------------------------------------

    def opened(self, figures: RequestFigures) -> None:
        """A request has come."""
        self._live[figures.record.req_id] = figures

    def audio_gap(self, figures: RequestFigures, seconds: float) -> None:
        """More audio came."""
        self._gap.add(seconds, _endpoint(figures))

    def closed(self, figures: RequestFigures) -> None:
        """A request is over."""
        record, endpoint, reason = figures.record, _endpoint(figures), figures.reason
        self._live.pop(record.req_id, None)
        self._finished.add(1, endpoint, reason if reason in REASONS else OTHER)
        if reason == "abort":
            self._aborted.add(1, endpoint)
        if reason == "error":
            self._failed.add(1, self._errors.of(record.error))
        self._prompt_tokens.add(record.prompt_tokens, endpoint)
        self._text_tokens.add(record.text_tokens, endpoint)
        self._audio_tokens.add(record.audio_tokens, endpoint)
        self._audio_seconds.add(record.audio_seconds, endpoint)
        self._queue.add(figures.queue_seconds, endpoint)
        self._whole.add(figures.seconds, endpoint)
        self._first_token.add(figures.first_token_seconds, endpoint)
        self._first_audio.add(figures.first_audio_seconds, endpoint)
        self._rtf.add(figures.rtf, endpoint)
        for stage, seconds in figures.stage_waits(self._stages).items():
            self._stage_wait.add(seconds, stage)

    def stepped(self, span: StepSpan) -> None:
        """A stage has made a step."""
        self._step.add(span.seconds, span.stage)
        for rest in span.rests:
            self._rest.add(rest.ended - rest.began, span.stage, rest.reason if rest.reason in RESTS else OTHER)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All families, as Prometheus takes them."""
        yield from self._requests()
        for family in self._own:
            yield family.collect()
        yield from self._stages_now(self._client.gauges())

    def _requests(self) -> Iterator[Metric]:
        running, waiting = dict.fromkeys(ENDPOINTS, 0), dict.fromkeys(ENDPOINTS, 0)
        for figures in self._live.values():
            place = waiting if figures.record.admitted_at is None else running
            endpoint = _endpoint(figures)
            place[endpoint] = place.get(endpoint, 0) + 1
        by_endpoint = ("endpoint",)
        yield gauge("requests_running", "Requests being answered", by_endpoint, _by_one(running))
        yield gauge("requests_waiting", "Requests in the queue", by_endpoint, _by_one(waiting))
        yield gauge("pipeline_requests", "Choices that the stages work on or hold", (), [((), self._client.num_requests)])

    def _stages_now(self, now: Mapping[str, Gauges]) -> Iterator[Metric]:
        by_stage = ("stage",)
        health = self._client.health()
        ready = {name: int(health.get(name) is StageHealth.READY) for name in self._stages}
        yield gauge("stage_ready", "1 while the stage serves", by_stage, _by_one(ready))
        standing = {
            (name, state): count
            for name, one in now.items()
            for state, count in (("running", one.running), ("waiting", one.waiting), ("parked", one.parked))
        }
        text = "Requests at a stage: running ones have a slot, waiting ones want one, parked ones wait for input"
        yield gauge("stage_requests", text, ("stage", "state"), standing.items())
        usage = {name: one.kv_usage for name, one in now.items()}
        yield gauge("stage_kv_usage_ratio", "Share of the KV cache in use, 0 to 1", by_stage, _by_one(usage))
        for name, text, labels, read in STAGE_COUNTS:
            values = [((stage, *own), value) for stage, one in now.items() for own, value in read(one)]
            yield counter(f"stage_{name}", f"{text}, since the stage was loaded", (*by_stage, *labels), values)
        stats = self._client.stats()
        yield counter("stage_steps", "Steps", by_stage, (((one.name,), one.steps) for one in stats))
        text = "Milliseconds of stepping (sum) and tokens (count); positions are the tokens of a generation stage"
        yield summary("stage_ms_per_token", text, by_stage, (((one.name,), one.tokens, 1e3 * one.seconds) for one in stats))


def _endpoint(figures: RequestFigures) -> str:
    endpoint = figures.record.endpoint
    return endpoint if endpoint in ENDPOINTS else OTHER


def _by_one(values: Mapping[str, float]) -> Iterator[tuple[Labels, float]]:
    for name, value in values.items():
        yield (name,), value
