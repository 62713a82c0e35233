"""Counters, gauges and histograms for one thread, and Prometheus' text format.

`prometheus_client` takes a lock and searches a histogram's buckets in each call, which takes several microseconds: a
tenth of what a token costs the server. These types are used in the event loop's thread only, without a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.utils import floatToGoString

__all__ = ["MAX_HISTOGRAMS", "MAX_SERIES", "Family", "Histogram", "Labels", "Value", "escape_label", "format_value"]

# Label values never come from clients. These limits bound them in any case.
MAX_SERIES = 1000
MAX_HISTOGRAMS = 200
_OTHER = "other"

Labels = tuple[str, ...]


class Value:
    """One series of a counter or gauge.

    Attributes:
        value: the current value.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add."""
        self.value += amount

    def set(self, value: float) -> None:
        """Set a gauge."""
        self.value = value


class Histogram:
    """One series of a histogram.

    Args:
        bounds: upper bounds of the buckets, ascending, without infinity.

    Attributes:
        counts: observations of each bucket, not cumulative; the last one counts values above all bounds.
        total: sum of all observed values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value once or several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class Family:
    """All series of one metric.

    Args:
        name: with prefix, and without the `_total` of a counter.
        text: help text.
        kind: counter, gauge or histogram.
        labels: names of the labels.
        bounds: of a histogram's buckets.
    """

    def __init__(
        self, name: str, text: str, kind: str, labels: Sequence[str] = (), bounds: tuple[float, ...] = ()
    ) -> None:
        self.name = f"{name}_total" if kind == "counter" else name
        self.text = text
        self.kind = kind
        self.label_names = tuple(labels)
        self._bounds = bounds
        self._values: dict[Labels, Value] = {}
        self._histograms: dict[Labels, Histogram] = {}

    def labels(self, *values: str) -> Value:
        """The series of these label values. Beyond `MAX_SERIES`, one series counts all others."""
        series = self._values.get(values)
        if series is None:
            values = self._bounded(values, self._values, MAX_SERIES)
            series = self._values.setdefault(values, Value())
        return series

    def histogram(self, *values: str) -> Histogram:
        """The histogram of these label values. Beyond `MAX_HISTOGRAMS`, one counts all others."""
        series = self._histograms.get(values)
        if series is None:
            values = self._bounded(values, self._histograms, MAX_HISTOGRAMS)
            series = self._histograms.setdefault(values, Histogram(self._bounds))
        return series

    def inc(self, amount: float = 1) -> None:
        """Add to the only series of a metric without labels."""
        self.labels().value += amount

    def drop(self, matches: Callable[[Labels], bool]) -> None:
        """Remove the series with matching label values. Later writes to them are lost."""
        for known in (self._values, self._histograms):
            for values in [values for values in known if matches(values)]:
                del known[values]

    def clear(self) -> None:
        """Remove all series."""
        self._values.clear()
        self._histograms.clear()

    def _bounded(self, values: Labels, known: Mapping[Labels, object], limit: int) -> Labels:
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, not {values}")
        return values if len(known) < limit else (_OTHER,) * len(values)

    def render(self, name: str | None = None) -> Iterable[str]:
        """Lines of the text format, version 0.0.4; empty without series.

        Args:
            name: show it under this name instead.
        """
        name = name or self.name
        if not self._values and not self._histograms:
            return
        text = self.text.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {name} {text}\n# TYPE {name} {self.kind}\n"
        for values, series in self._values.items():
            yield f"{name}{_braces(self._pairs(values))} {format_value(series.value)}\n"
        for values, histogram in self._histograms.items():
            pairs = self._pairs(values)
            before, total = f'{name}_bucket{{{pairs}{"," if pairs else ""}le="', 0
            for bound, count in zip((*map(format_value, self._bounds), "+Inf"), histogram.counts, strict=True):
                total += count
                yield f'{before}{bound}"}} {format_value(total)}\n'
            braces = _braces(pairs)
            yield f"{name}_sum{braces} {format_value(histogram.total)}\n{name}_count{braces} {format_value(total)}\n"

    def _pairs(self, values: Labels) -> str:
        return ",".join(
            f'{label}="{escape_label(value)}"' for label, value in zip(self.label_names, values, strict=True)
        )


def _braces(pairs: str) -> str:
    return f"{{{pairs}}}" if pairs else ""


def escape_label(value: str) -> str:
    """A label's value, escaped for quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_value(value: float) -> str:
    """A value or a bucket's bound in the notation of Prometheus' clients."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]
