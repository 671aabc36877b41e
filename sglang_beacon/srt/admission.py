"""Admission that knows the budget: a request reserves what it can still hold, not what it may say.

SGLang reserves room for all that a request may generate, because all of it would stay. Under a
policy it will not, and memory that nobody is admitted into is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder


def still_needed(req: Req) -> int | None:
    """Slots a request may still take; None if it keeps everything.

    Before its first decoded token has been decided on, the tree may not have taken the prompt
    yet, so all of the budget is still to come.
    """
    state = req.kv_policy
    if state.policy is None:
        return None
    settled = req.kv.holds_kv and req.decode_batch_idx >= 1
    private = req.kv.kv_allocated_len - req.kv.cache_protected_len if settled else 0
    return state.tokens_still_needed(private)


def cap_running(reserved: float, adder: PrefillAdder, req: Req) -> float:
    """After `PrefillAdder._get_running_request_total_token_offset`."""
    needed = still_needed(req)
    return reserved if needed is None else min(reserved, needed)


def add_capped(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Around the adder's methods that admit one request."""
    running = adder.running_batch.reqs if adder.running_batch is not None else ()
    with _asking_for_what_they_need((req, *running)):
        return original(adder, req, *args, **kwargs)


@contextmanager
def _asking_for_what_they_need(reqs: Iterable[Req]) -> Iterator[None]:
    """Lower ``max_new_tokens`` to what each request can still hold, for the length of a call.

    The adder reads that number in half a dozen places; it is the one thing they share.
    """
    asked = []
    for req in reqs:
        needed = still_needed(req)
        if needed is not None:
            params = req.sampling_params
            asked.append((params, params.max_new_tokens))
            params.max_new_tokens = min(params.max_new_tokens, len(req.output_ids) + needed)
    try:
        yield
    finally:
        for params, max_new_tokens in asked:
            params.max_new_tokens = max_new_tokens
