"""What the host remembers of one request's compression."""

from __future__ import annotations

from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.core import EvictionPlan, ObservationPhase, RequestLengths, RequestPlan
from sglang_beacon.policies.base import Policy
from sglang_beacon.runtime import allowance as allowances
from sglang_beacon.runtime import phase as phases
from sglang_beacon.runtime.allowance import Allowance
from sglang_beacon.runtime.beacon_store import Beacons
from sglang_beacon.runtime.planner import plan_token
from sglang_beacon.runtime.query_buffer import QueryBuffer


class RequestState:
    """Policy, query buffer and counters of one request, from admission to release.

    Attributes
    ----------
    config : KVPolicyConfig
    policy : Policy or None
        None: the request keeps everything.
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
        self.evictions = 0
        self.evicted_tokens = 0
        self.beacons_reused = 0
        self.newest, self.prefix = RequestLengths(0, 0, 0), "none"
        self.life = 0
        self._clear()

    def reset(self) -> None:
        """Forget the cache: the request was released, or will be computed again."""
        self.life += 1
        self._clear()

    def _clear(self) -> None:
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

    def plan(self, lengths: RequestLengths, allowance: Allowance) -> RequestPlan:
        """Plan what is due before the next token, and take it as done."""
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

    def tokens_still_needed(self, private: int) -> int:
        """Slots the request may still take beyond ``private`` held ones."""
        return allowances.tokens_still_needed(private, self.config, self.page_size)

    def _count(self, eviction: EvictionPlan) -> None:
        self.evictions += 1
        self.evicted_tokens += eviction.freed
        self.freed += eviction.freed
        self.detached |= eviction.detach
        # Prompt tokens come first, and a policy that prefers them keeps all that fit besides the
        # newest tokens, which may be of the prompt themselves.
        generated = eviction.lengths.held - self.prompt_tokens
        newest = min(self.config.n_recent, generated)
        self.prompt_tokens = min(self.prompt_tokens, eviction.held_after - newest)
