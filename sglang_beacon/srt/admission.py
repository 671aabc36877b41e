"""Admission that knows the budget: a request reserves what it can still hold, not what it may say.

SGLang reserves room for all that a request may generate, because all of it would stay. Under a
policy it will not, and memory that nobody is admitted into is not saved. For the same reason a
request may say more than the pool has slots.

Only one thing needs the whole length again: a retracted request is computed anew, exactly. One
whose length has outgrown an empty pool is therefore never chosen for it, and reserves all that it
can still need, so that it need not be. No request can then wait for room that cannot come: what is
taken back is admitted again as soon as others finish, and reserves its whole budget before it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler


class Limits(NamedTuple):
    """What a scheduler has for all its requests; each request knows them as ``req.kv_limits``.

    ``capacity`` is the KV pool in tokens; ``most_observing`` requests can have queries or signals
    at a time.
    """

    capacity: int
    most_observing: int


def still_needed(req: Req) -> int | None:
    """Slots a request may still take; None if it keeps everything.

    Before its first decoded token has been decided on, the tree may not have taken the prompt
    yet, so all of the budget is still to come.
    """
    state = req.kv_policy
    if not state.is_bounded:
        return None
    settled = req.kv.holds_kv and req.decode_batch_idx >= 1
    private = req.kv.kv_allocated_len - req.kv.cache_protected_len if settled else 0
    return _at_most(req, private)


def reserved(reqs: Iterable[Req]) -> int:
    """Slots that running requests may still take, if nobody's budget grows."""
    needs = ((still_needed(req), _still_to_say(req)) for req in reqs)
    return sum(to_say if needed is None else needed for needed, to_say in needs)


def cap_running(reserved: float, adder: PrefillAdder, req: Req) -> float:
    """After `PrefillAdder._get_running_request_total_token_offset`."""
    needed = still_needed(req)
    if needed is None:
        return reserved
    return min(reserved, needed) if can_come_back(req) else needed


def add_capped(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Around the adder's methods that admit one request."""
    with _asking_for_what_they_need((req, *_running(adder))):
        return original(adder, req, *args, **kwargs)


def add_with_room_for_queries(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Around `PrefillAdder.add_one_req`: its queries and signals have to fit as well."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    others = (*_running(adder), *adder.can_run_list)
    observing = sum(other.kv_policy.has_state for other in others)
    if req.kv_policy.has_state and observing >= req.kv_limits.most_observing:
        return AddReqResult.NO_TOKEN
    return add_capped(original, adder, req, *args, **kwargs)


def note_asked(
    original: Callable[..., None], scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any
) -> None:
    """Around `Scheduler.init_req_max_new_tokens`: SGLang lowers it to what an empty pool holds."""
    asked = req.sampling_params.max_new_tokens
    original(scheduler, req, *args, **kwargs)
    if not hasattr(req, "asked_new_tokens"):
        req.asked_new_tokens = 2**30 if asked is None else asked


def restore_asked(scheduler: Scheduler, req: Req) -> None:
    """Let a request say all that it asked for, if what it may hold meanwhile fits the pool."""
    if not req.kv_policy.is_bounded:
        return
    prompt = len(req.origin_input_ids)
    most = min(
        req.asked_new_tokens,
        scheduler.max_new_tokens_limit or req.asked_new_tokens,
        scheduler.model_config.context_len - prompt - 2,
    )
    needed = min(req.kv_policy.tokens_still_needed(0), most)
    if most > 0 and _fits(prompt, needed, scheduler.page_size, req.kv_limits.capacity):
        req.sampling_params.max_new_tokens = most


def can_come_back(req: Req) -> bool:
    """Whether the request, retracted now, could be computed again in an empty pool."""
    state = req.kv_policy
    if not state.is_bounded:
        return True  # SGLang has seen to it that all it may say fits.
    return _fits(req.seqlen, _at_most(req, 0), state.page_size, req.kv_limits.capacity)


def keep_order(order: list[int], reqs: Sequence[Req]) -> list[int]:
    """After `ScheduleBatch._get_decode_retraction_order`: whom to keep, from first to last.

    The one that gives back most slots goes first, of equals the one that has said least; SGLang's
    own order, which knows priorities, decides between those that are alike.
    """
    from sglang.srt.runtime_context import get_schedule

    by_priority = get_schedule().retraction_policy == "priority"
    rank = {index: place for place, index in enumerate(order)}

    def key(index: int) -> tuple[Any, ...]:
        req = reqs[index]
        private = req.kv.kv_allocated_len - req.kv.cache_protected_len
        own = () if by_priority else (private,)
        return (can_come_back(req), *own, rank[index])

    return sorted(order, key=key)


def _running(adder: PrefillAdder) -> Sequence[Req]:
    return adder.running_batch.reqs if adder.running_batch is not None else ()


def _at_most(req: Req, private: int) -> int:
    """Slots a request may take beyond ``private`` ones, by its budget and by what it may say."""
    return min(req.kv_policy.tokens_still_needed(private), _still_to_say(req))


def _still_to_say(req: Req) -> int:
    return max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)


def _fits(computed: int, needed: int, page_size: int, capacity: int) -> bool:
    """SGLang's own condition for admitting into an empty pool, with a page to spare."""
    pages = -(-computed // page_size) * page_size
    return pages + needed + 2 * page_size < capacity


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
