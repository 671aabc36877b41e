"""What the host remembers of one request's compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang_beacon.config import KVPolicyConfig, kept_tokens
from sglang_beacon.core import EvictionPlan, ObservationPhase, RequestLengths, RequestPlan
from sglang_beacon.policies.base import Policy
from sglang_beacon.runtime import allowance as allowances
from sglang_beacon.runtime import phase as phases
from sglang_beacon.runtime.allowance import Allowance
from sglang_beacon.runtime.beacon_store import Beacons
from sglang_beacon.runtime.memory import Memory
from sglang_beacon.runtime.planner import plan_token
from sglang_beacon.runtime.query_buffer import QueryBuffer
from sglang_beacon.runtime.retention import Drop
from sglang_beacon.runtime.tracer import Tracer


class RequestState:
    """Policy, query buffer and counters of one request, from admission to release.

    Attributes
    ----------
    config : KVPolicyConfig
        Its budget may grow.
    policy : Policy or None
        None: the request keeps everything.
    recas : RecasSettings or None
        Of the policy.
    memory : Memory or None
        Signals, bounds and active set, for policies that need them.
    tracer : Tracer or None
        Of a request that asked to be written down.
    shape : BufferShape or None
        Of the query buffer; None when the policy does not observe.
    buffer : QueryBuffer or None
        Allocated by whoever computes the request, when the policy observes.
    phase : ObservationPhase
        Of the buffer, once all that was launched has run.
    observed_prompt : int
        Prompt queries in the buffer or merged into it, beacons it was seeded with among them.
    beacons : Beacons or None
        Of the whole prompt, until the prefix tree has taken them.
    freed : int
        Tokens evicted in this life; what the request has seen is what it holds plus these.
    detached : bool
        Whether the request left the prefix tree in this life, its prompt copied.
    life : int
        Counts how often the cache was lost; work planned in an earlier life must not run.
    bound : Drop
        On what the latest eviction dropped, for policies that know.
    evictions, evicted_tokens : int
        Since the start, across retractions.
    beacons_reused : int
        Queries per head that the request started from, of those remembered of a cached prefix.
    newest, prefix : RequestLengths, str
        As last noted, since the request may hold nothing any more. ``prefix`` says what became of
        its part of the tree: ``"none"``, ``"pin"`` or ``"copy"``.
    """

    def __init__(self, config: KVPolicyConfig, policy: Policy | None, page_size: int) -> None:
        self.config = config
        self.policy = policy
        self.shape = policy.observes if policy is not None else None
        self.page_size = page_size
        self.recas = policy.recas if policy is not None else None
        self.tracer: Tracer | None = None
        self.memory: Memory | None = None
        if policy is not None and policy.signals is not None:
            self.memory = Memory(policy.signals, policy.recas, config)
        self.evictions = 0
        self.evicted_tokens = 0
        self.beacons_reused = 0
        self.newest, self.prefix = RequestLengths(0, 0, 0), "none"
        self.life = 0
        self._clear()

    @property
    def is_bounded(self) -> bool:
        """Whether the request is held to its budget."""
        return self.policy is not None and self.policy.evicts

    @property
    def has_state(self) -> bool:
        """Whether the request takes device memory besides its cache."""
        return self.shape is not None or self.memory is not None

    def reset(self) -> None:
        """Forget the cache: the request was released, or will be computed again."""
        self.life += 1
        if self.memory is not None:
            self.memory.restart()
        if self.tracer is not None:
            self.tracer.restart()
        self._clear()

    def _clear(self) -> None:
        self.bound = Drop()
        self._next_probe = 0
        self.buffer: QueryBuffer | None = None
        self.phase = ObservationPhase()
        self.observed_prompt = 0
        self.beacons: Beacons | None = None
        self.prompt_tokens = 0
        self.freed = 0
        self.detached = False

    def seed(self, buffer: QueryBuffer, beacons: Beacons | None) -> None:
        """Start observing, from what is remembered of a cached prefix if anything is."""
        self.buffer = buffer
        if beacons is not None:
            buffer.seed(beacons)
            self.observed_prompt = self.beacons_reused = beacons.per_head

    def after_prefill(self, computed: int, pinned: int, held: int) -> int:
        """Note a stretch of ``computed`` prompt tokens.

        Parameters
        ----------
        computed : int
            Tokens computed in this stretch; less than ``held`` when a prefix was cached.
        pinned, held : int
            The row once the tree has taken its part of the prompt.

        Returns
        -------
        int
            How many of the newest queries the buffer must keep as recent ones.
        """
        self.prompt_tokens = held
        if self.shape is None:
            return 0
        self.observed_prompt += computed
        # Who shares the prompt will be seen at the first decision; alone is the tightest case.
        alone = self.allowance(RequestLengths(held, pinned, held), share=pinned)
        self.phase = phases.after_prefill(
            self.shape, self.observed_prompt, computed, alone.counted, alone.budget
        )
        return self.phase.recent

    def prompt_beacons(self) -> Beacons:
        """A copy, in host memory, of what the prompt's queries were folded to."""
        assert self.shape is not None
        assert self.buffer is not None
        return self.buffer.beacons(min(self.observed_prompt, self.shape.n_beacon)).to("cpu")

    def after_token(self) -> int:
        """Note a decoded token; return the buffer row its query goes to."""
        assert self.shape is not None
        row = self.phase.filled
        self.phase = phases.after_token(self.shape, self.phase)
        return row

    def lengths(self, pinned: int, held: int) -> RequestLengths:
        """All lengths, from those of the row."""
        return RequestLengths(held + self.freed, pinned, held)

    def note(self, pinned: int, held: int) -> None:
        """Remember the row for who asks once it is gone."""
        self.newest = self.lengths(pinned, held)
        self.prefix = "copy" if self.detached else "pin" if pinned else "none"

    def allowance(self, lengths: RequestLengths, share: int) -> Allowance:
        """How the request stands against its budget; see `runtime.allowance`."""
        assert self.policy is not None
        return allowances.allowance(lengths, share, self.config, self.policy.least_budget)

    def settle(
        self,
        lengths: RequestLengths,
        share: int,
        has_room: Callable[[int], bool] = lambda tokens: True,
        agreed: Callable[[float], float] = lambda error: error,
    ) -> Allowance:
        """Like `allowance`, once the budget has grown if that is due.

        Parameters
        ----------
        lengths, share
            See `allowance`.
        has_room : callable
            Whether the pool could give the request so many tokens more.
        agreed : callable
            The largest error of all ranks, from this one's.
        """
        allowance = self.allowance(lengths, share)
        retention = None if self.memory is None else self.memory.retention
        if retention is None or not self.is_bounded or not allowance.is_used_up:
            return allowance
        bound = retention.bound(lengths.logical)
        self.bound = bound._replace(error=agreed(bound.error))
        while allowance.is_used_up and self.bound.error > retention.settings.epsilon:
            budget = retention.larger(self.config.budget)
            if budget is None or not has_room(budget - self.config.budget):
                break
            self.config = replace(self.config, budget=budget)
            retention.expansions += 1
            allowance = self.allowance(lengths, share)
        return allowance

    def plan(self, lengths: RequestLengths, allowance: Allowance) -> RequestPlan:
        """Plan what is due before the next token, and take it as done."""
        if not self.is_bounded:
            return RequestPlan()
        plan, self.phase = plan_token(
            lengths,
            allowance,
            self.phase,
            self.config,
            self.shape,
            self.page_size,
            self.prompt_tokens,
        )
        if plan.eviction is not None:
            self._count(plan.eviction)
            return plan
        probe = self._probe(lengths, allowance)
        return plan if probe is None else replace(plan, probe=probe)

    def _probe(self, lengths: RequestLengths, allowance: Allowance) -> EvictionPlan | None:
        """What an eviction at this moment would leave, if it is time to ask."""
        if self.recas is None or lengths.logical < self._next_probe:
            return None
        assert self.policy is not None
        pinned = 0 if allowance.detach else lengths.pinned
        kept = kept_tokens(allowance.counted, self.config.keep_ratio, self.page_size)
        if not self.policy.least_kept <= kept < lengths.held - pinned:
            return None
        self._next_probe = lengths.logical + self.recas.probe_interval
        return EvictionPlan(lengths, kept, self.prompt_tokens, allowance.detach)

    def tokens_still_needed(self, private: int) -> int:
        """Slots the request may still take beyond ``private`` held ones."""
        return allowances.tokens_still_needed(private, self.config, self.page_size)

    def _count(self, eviction: EvictionPlan) -> None:
        if self.memory is not None and self.memory.retention is not None:
            self.memory.retention.count(self.bound)
        self.evictions += 1
        self.evicted_tokens += eviction.freed
        self.freed += eviction.freed
        self.detached |= eviction.detach
        # Prompt tokens come first, and a policy that prefers them keeps all that fit besides the
        # newest tokens, which may be of the prompt themselves.
        generated = eviction.lengths.held - self.prompt_tokens
        newest = min(self.config.n_recent, generated)
        self.prompt_tokens = min(self.prompt_tokens, eviction.held_after - newest)
