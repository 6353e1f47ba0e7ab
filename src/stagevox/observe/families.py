"""The families of metrics: names, labels, what they say. ``docs/observability.md`` has them all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

OTHER = "other"
"""Takes the place of label values that aren't known, or come after too many others."""

Labels = tuple[str, ...]


class Counter:
    """Only grows. Children of known label values are there from the start, so that rates begin at 0."""

    def __init__(self, name: str, text: str, labels: Sequence[str], known: Iterable[Labels] = ()) -> None:
        self.name, self.text, self.labels = f"stagevox_{name}", text, tuple(labels)
        self.values: dict[Labels, float] = dict.fromkeys(known, 0.0)

    def add(self, amount: float, *labels: str) -> None:
        """Add to a child."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def collect(self) -> Metric:
        """As Prometheus takes it."""
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """Counts values up to each bound, and sums them."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], known: Iterable[Labels] = ()
    ) -> None:
        self.name, self.text, self.labels, self.bounds = f"stagevox_{name}", text, tuple(labels), tuple(bounds)
        self._counts: dict[Labels, list[int]] = {one: self._empty() for one in known}
        self._sums: dict[Labels, float] = dict.fromkeys(self._counts, 0.0)

    def _empty(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    def add(self, value: float | None, *labels: str) -> None:
        """Count a value; None is nothing to count."""
        if value is None:
            return
        self._counts.setdefault(labels, self._empty())[bisect_left(self.bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def collect(self) -> Metric:
        """As Prometheus takes it."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        ends = [*map(str, map(float, self.bounds)), "+Inf"]
        for labels, counts in self._counts.items():
            family.add_metric(labels, list(zip(ends, accumulate(counts), strict=True)), self._sums[labels])
        return family


class Names:
    """Bounds a label whose values come from elsewhere: beyond ``most`` of them all new ones are :data:`OTHER`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: set[str] = set()

    def of(self, name: str | None) -> str:
        """The name, or what stands for it."""
        name = name or OTHER
        if name not in self._seen and len(self._seen) >= self._most:
            return OTHER
        self._seen.add(name)
        return name


def gauge(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    """A gauge, read when it is asked for."""
    family = GaugeMetricFamily(f"stagevox_{name}", text, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    """A counter that somebody else counts."""
    family = CounterMetricFamily(f"stagevox_{name}", text, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family


def summary(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, int, float]]) -> Metric:
    """A count and a sum that somebody else counts."""
    family = SummaryMetricFamily(f"stagevox_{name}", text, labels=labels)
    for given, count, total in values:
        family.add_metric(given, count_value=count, sum_value=total)
    return family
