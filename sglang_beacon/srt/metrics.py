"""Counters of a scheduler's evictions, for ``/server_info`` and ``/metrics``.

All start at 0 and are there from the start, so that a policy that never evicts is seen to be idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HELP = {
    "requests_compressed": "Requests that were evicted from at least once.",
    "requests_copied": "Requests that left the prefix tree, their prompt copied.",
    "requests_seeded": "Requests that started from the beacons of a cached prefix.",
    "evictions": "Evictions of all requests.",
    "evicted_tokens": "Tokens evicted from all requests.",
}


@dataclass
class Counters:
    """What happened since the start; see `HELP`."""

    requests_compressed: int = 0
    requests_copied: int = 0
    requests_seeded: int = 0
    evictions: int = 0
    evicted_tokens: int = 0


class Exporter:
    """Publishes counters, and what the running requests hold, to Prometheus.

    Parameters
    ----------
    labels : mapping
        SGLang's own labels of this scheduler; the policy is added to them.
    policy : str
    """

    def __init__(self, labels: Mapping[str, Any], policy: str) -> None:
        # Not before PROMETHEUS_MULTIPROC_DIR is set, which the launcher does.
        from prometheus_client import Counter, Gauge

        labels = {**labels, "kv_policy": policy}
        self._counters = {
            name: Counter(f"sglang:kv_policy_{name}", text, labels.keys()).labels(**labels)
            for name, text in HELP.items()
        }
        for counter in self._counters.values():
            counter.inc(0)
        self._published = asdict(Counters())
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
