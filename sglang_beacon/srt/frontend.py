"""The backend of SGLang frontend programs, with a policy of its own for their requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams


@dataclass
class PolicySamplingParams(SglSamplingParams):
    """SGLang's sampling parameters, and ``custom_params`` for the server."""

    custom_params: dict[str, Any] | None = None

    def to_srt_kwargs(self) -> dict[str, Any]:
        return {**super().to_srt_kwargs(), "custom_params": self.custom_params}


class PolicyEndpoint(RuntimeEndpoint):
    """A running server, asked to keep the caches of this program in its own way.

    Parameters
    ----------
    base_url : str
    kv_policy : str, optional
        Policy of all requests made through this endpoint; the server's own if not given.
    kv_budget : int, optional
        Budget in tokens of each.
    **kwargs
        As for SGLang's `RuntimeEndpoint`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        kv_policy: str | None = None,
        kv_budget: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(base_url, **kwargs)
        given = {"kv_policy": kv_policy, "kv_budget": kv_budget}
        self.custom_params = {key: value for key, value in given.items() if value is not None}

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Any:
        return super().generate(s, self._with_policy(sampling_params))

    def generate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Iterator:
        return super().generate_stream(s, self._with_policy(sampling_params))

    def _with_policy(self, params: SglSamplingParams) -> PolicySamplingParams:
        return PolicySamplingParams(**vars(params), custom_params=self.custom_params or None)
