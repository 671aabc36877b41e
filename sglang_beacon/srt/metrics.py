"""Counters of a scheduler's evictions, for ``/server_info`` and ``/metrics``.

All start at 0 and are there from the start, so that a policy that never evicts is seen to be idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sglang_beacon.runtime.retention import Drop


def _counter(text: str) -> Any:
    """A field of `Counters`, with what it counts."""
    return field(default=0, metadata={"help": text})


@dataclass
class Counters:
    """What happened since the start."""

    requests_compressed: int = _counter("Requests that were evicted from at least once.")
    requests_copied: int = _counter("Requests that left the prefix tree, their prompt copied.")
    requests_seeded: int = _counter("Requests that started from the beacons of a cached prefix.")
    evictions: int = _counter("Evictions of all requests.")
    evicted_tokens: int = _counter("Tokens evicted from all requests.")
    budget_expansions: int = _counter("Times that a budget grew because a bound was threatened.")
    evictions_above_target: int = _counter("Evictions whose bound on the error met no target.")


# From what nobody notices to bounds that say nothing.
BOUND_BUCKETS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Exporter:
    """Publishes counters, bounds, and what the running requests hold, to Prometheus.

    Parameters
    ----------
    labels : mapping
        SGLang's own labels of this scheduler; the policy is added to them.
    policy : str
    """

    def __init__(self, labels: Mapping[str, Any], policy: str) -> None:
        # Not before PROMETHEUS_MULTIPROC_DIR is set, which the launcher does.
        from prometheus_client import Counter, Gauge, Histogram

        labels = {**labels, "kv_policy": policy}
        self._counters = {
            each.name: Counter(
                f"sglang:kv_policy_{each.name}", each.metadata["help"], labels.keys()
            ).labels(**labels)
            for each in fields(Counters)
        }
        for counter in self._counters.values():
            counter.inc(0)
        self._published = asdict(Counters())
        self._mass, self._error = (
            Histogram(
                f"sglang:kv_policy_{name}", text, labels.keys(), buckets=BOUND_BUCKETS
            ).labels(**labels)
            for name, text in (
                ("delta_bar", "Bound on the attention mass that an eviction drops, mean of heads."),
                ("error_bound", "Bound on the relative error of an eviction, worst layer."),
            )
        )
        self._held, self._seen = (
            Gauge(
                f"sglang:kv_policy_{name}_tokens",
                f"Tokens that the running requests {text}.",
                labels.keys(),
                multiprocess_mode="mostrecent",
            ).labels(**labels)
            for name, text in (("held", "hold"), ("seen", "have seen"))
        )

    def publish(self, counters: Counters, held: int, seen: int) -> None:
        """Bring what Prometheus sees up to date."""
        for name, value in asdict(counters).items():
            if value > self._published[name]:
                self._counters[name].inc(value - self._published[name])
                self._published[name] = value
        self._held.set(held)
        self._seen.set(seen)

    def observe(self, bound: Drop) -> None:
        """Publish what an eviction drops at the most."""
        self._mass.observe(bound.mean)
        self._error.observe(bound.error)
