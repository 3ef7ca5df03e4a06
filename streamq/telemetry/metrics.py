"""All metrics, and their text for Prometheus.

No metric has a request's id as a label: the number of ids has no bound.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Upper bounds (s) of the buckets of a histogram; the last bucket has none.
BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)
CLASSES = len(BOUNDS_S) + 1


class Metric(msgspec.Struct, frozen=True):
    """Kind, labels and help text of a metric."""

    kind: str
    labels: str
    says: str


#: Every metric, by its name.
METRICS: dict[str, Metric] = {
    "streamq_parts_total": Metric(
        "counter",
        "handler, state",
        "Parts this pool ran: done, failed (given up), retried (to run again), crashed (their "
        "process died).",
    ),
    "streamq_records_total": Metric(
        "counter", "handler, state", "Records this pool ran that are done or failed."
    ),
    "streamq_part_duration_seconds": Metric("histogram", "handler", "How long parts ran."),
    "streamq_part_wait_seconds": Metric(
        "histogram",
        "handler",
        "How long parts waited for their first attempt: from when their request was made, or "
        "the end of its delay or snooze, until a worker took them.",
    ),
    "streamq_requests_total": Metric(
        "counter",
        "queue, state",
        "Requests that this process's janitor closed: done, failed, cancelled.",
    ),
    "streamq_worker_slots": Metric("gauge", "", "Slots of this pool."),
    "streamq_worker_slots_busy": Metric("gauge", "", "Slots that hold parts now."),
    "streamq_worker_processes": Metric("gauge", "", "Processes of this pool that are ready."),
    "streamq_process_deaths_total": Metric(
        "counter", "", "Processes that died, or were stopped because of what they ran."
    ),
    "streamq_server_up": Metric("gauge", "", "1 if the server answered the last time."),
    "streamq_server_errors_total": Metric(
        "counter", "kind", "Calls that the server did not answer as it should."
    ),
    "streamq_server_roundtrip_seconds": Metric(
        "histogram", "", "How long the server took to answer heartbeats and renewals."
    ),
    "streamq_janitor_reaped_parts_total": Metric(
        "counter", "", "Parts taken back from holders whose lease had expired."
    ),
    "streamq_janitor_last_success_timestamp_seconds": Metric(
        "gauge", "", "When the janitor last swept to its end."
    ),
    "streamq_queue_requests": Metric(
        "gauge", "queue, state", "Requests that are not finished: loading, open or paused."
    ),
    "streamq_queue_level_requests": Metric(
        "gauge", "queue, levels", "The same requests by level: 0-9, 10-19, to 90-99."
    ),
    "streamq_queue_parts": Metric(
        "gauge", "queue, state", "Parts of these requests: waiting, running, in retry, failed."
    ),
    "streamq_queue_oldest_age_seconds": Metric(
        "gauge", "queue", "Age of the oldest request that is not finished."
    ),
    "streamq_queue_slots_wanted": Metric(
        "gauge", "queue", "Slots that the requests could use now, within their limits."
    ),
    "streamq_queue_workers": Metric("gauge", "queue", "Live worker pools of the queue."),
    "streamq_queue_unserved_requests": Metric(
        "gauge", "queue", "Requests whose handler no live worker has."
    ),
    "streamq_gateway_calls_total": Metric(
        "counter", "route, status", "Calls that this gateway answered, over HTTP and gRPC."
    ),
    "streamq_gateway_call_duration_seconds": Metric(
        "histogram", "route", "How long calls took, with the time that they waited for parts."
    ),
    "streamq_gateway_parts_total": Metric(
        "counter",
        "state",
        "Parts that workers of this gateway got (handed), and what they reported: done, failed, "
        "back (not begun), crashed.",
    ),
    "streamq_gateway_calls_waiting": Metric("gauge", "", "Calls that wait for parts now."),
    "streamq_gateway_streams": Metric("gauge", "", "Workers with an open stream."),
    "streamq_gateway_uploads": Metric("gauge", "", "Files that are being sent now."),
    "streamq_gateway_watchers": Metric("gauge", "", "Browsers that watch the dashboard."),
    "streamq_build_info": Metric("gauge", "version, python", "1."),
}


class MetricSpread(msgspec.Struct, frozen=True):
    """The value of a histogram: the count in each bucket, and the sum."""

    counts: Sequence[int]
    total: float


class StopwatchMetric:
    """A histogram of durations, for one thread, with the buckets of ``BOUNDS_S``."""

    def __init__(self) -> None:
        self._counts = [0] * CLASSES
        self._total = 0.0

    def saw(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._total += seconds

    def spread(self) -> MetricSpread:
        """Return all durations so far."""
        return MetricSpread(tuple(self._counts), self._total)


Sample = tuple[Mapping[str, str], float | MetricSpread]
Samples = dict[str, list[Sample]]


def metrics_text(samples: Samples) -> bytes:
    """Return the samples as Prometheus reads them."""
    lines: list[str] = []
    for name, metric in METRICS.items():
        if name in samples:
            lines += (f"# HELP {name} {metric.says}", f"# TYPE {name} {metric.kind}")
            for labels, value in samples[name]:
                lines += _sample_lines(name, labels, value)
    return ("\n".join(lines) + "\n").encode()


def _sample_lines(
    name: str, labels: Mapping[str, str], value: float | MetricSpread
) -> Iterable[str]:
    if not isinstance(value, MetricSpread):
        yield f"{name}{_labels_in_braces(labels)} {_sample_number(value)}"
        return
    so_far = 0
    for bound, count in zip([*map(_sample_number, BOUNDS_S), "+Inf"], value.counts, strict=True):
        so_far += count
        yield f"{name}_bucket{_labels_in_braces({**labels, 'le': bound})} {so_far}"
    yield f"{name}_sum{_labels_in_braces(labels)} {_sample_number(value.total)}"
    yield f"{name}_count{_labels_in_braces(labels)} {so_far}"


def _labels_in_braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped_label(value)}"' for key, value in labels.items()) + "}"


def _escaped_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _sample_number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(float(value))


def build_info_samples() -> Samples:
    """Return which streamq and which Python this is, as a metric."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"streamq_build_info": [({"version": version("streamq"), "python": python}, 1)]}
