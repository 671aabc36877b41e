"""Builds what each request carries, and writes down what became of those that ask for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_beacon import policies
from sglang_beacon.config import REQUEST_KEYS, ConfigError, KVPolicyConfig
from sglang_beacon.policies.base import Policy
from sglang_beacon.runtime.request import RequestState
from sglang_beacon.runtime.tracer import Tracer
from sglang_beacon.srt import reporting
from sglang_beacon.srt.admission import Limits
from sglang_beacon.srt.metrics import Counters, Exporter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


class PolicyFactory:
    """Builds request states; equal configurations share one policy object.

    Attributes
    ----------
    config : KVPolicyConfig
        Of requests that do not choose their own.
    default : Policy
        Of that configuration.
    limits : Limits
        Of this scheduler, handed to every request.
    counters : Counters
    exporter : Exporter or None
        None without ``--enable-metrics``.

    Of the ranks that share a model's heads, the first one writes traces.
    """

    def __init__(
        self,
        config: KVPolicyConfig,
        default: Policy,
        page_size: int,
        limits: Limits,
        exporter: Exporter | None,
        is_first_rank: bool,
    ) -> None:
        self.config = config
        self.default = default
        self.page_size = page_size
        self.limits = limits
        self.counters = Counters()
        self.exporter = exporter
        self._is_first_rank = is_first_rank

    def state_for(self, custom_params: Any, rid: str) -> RequestState:
        """State of a new request; `ConfigError` if its ``custom_params`` ask for nonsense."""
        asked = isinstance(custom_params, Mapping) and any(k in custom_params for k in REQUEST_KEYS)
        if not asked:
            return RequestState(self.config, self.default, self.page_size)
        config = self.config.with_request(custom_params)
        policy = policies.create(config, self.page_size)
        if policy is not None and policy.signals is not None and self.default.signals is None:
            raise ConfigError(
                f"kv_policy {config.policy!r} needs a server that was started with a policy of its "
                f"kind: use --kv-policy {config.policy}."
            )
        state = RequestState(config, policy, self.page_size)
        state.tracer = self._tracer(custom_params.get("kv_trace", False), rid)
        return state

    def _tracer(self, asked: Any, rid: str) -> Tracer | None:
        if not isinstance(asked, bool):
            raise ConfigError(f"kv_trace must be true or false, not {asked!r}.")
        if not asked:
            return None
        if self.config.trace_directory is None:
            raise ConfigError(
                "kv_trace needs a server that may write: start it with trace_directory in "
                "--kv-policy-config."
            )
        return Tracer(Path(self.config.trace_directory), rid) if self._is_first_rank else None


def write_trace(req: Req) -> None:
    """Write the file of a finished request that asked for it."""
    tokens = [*req.origin_input_ids, *req.output_ids]
    tokenizer = req.tokenizer
    words = None if tokenizer is None else [tokenizer.decode([token]) for token in tokens]
    tracer: Tracer = req.kv_policy.tracer
    try:
        tracer.write(tokens, len(req.origin_input_ids), words, reporting.summary(req))
    except OSError as error:
        logger.warning("The trace of request %s is lost: %s", req.rid, error)
