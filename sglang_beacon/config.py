"""The configuration of a policy: frozen, small, validated where it is built."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DEFAULT_BUDGET = 2048
SHARED_PREFIX_MODES = ("auto", "pin", "copy")
# A bound for every count of tokens: far above any context, far below any overflow.
MAX_TOKENS = 2**30
# The keys of `custom_params` that a request may use to override the server's policy.
REQUEST_KEYS = ("kv_policy", "kv_budget", "kv_policy_config", "kv_trace")


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that names what to change."""


@dataclass(frozen=True)
class KVPolicyConfig:
    """How much of its KV cache a request may keep, and who decides what stays.

    Parameters
    ----------
    policy : str
        Name in the registry of `sglang_beacon.policies`, or ``module:Class``; ``"none"`` keeps
        everything.
    budget : int
        Tokens at which an eviction is due (``B_max``), per request, layer and KV head.
    keep_ratio : float
        Share of the budget that an eviction leaves (``B_min / B_max``), in (0, 1).
    n_prefix : int
        First tokens of a request that are never evicted.
    n_recent : int
        Newest tokens that are never evicted; also how many recent queries observe.
    shared_prefix : str
        How the part of the prompt that the prefix tree owns is counted: not at all and never
        evicted (``"pin"``), in full and evicted like the rest (``"copy"``), or at the request's
        share, as long as that is small (``"auto"``); see `sglang_beacon.runtime.allowance`.
    prefix_beacons_mb : int
        MiB of host memory for the beacons of cached prompts, which requests that share them
        start from; 0 keeps none.
    query_memory_mb : int or None
        MiB of device memory for the query buffers of running requests; None takes what is free
        on a GPU once the KV pool stands.
    trace_directory : str or None
        Where requests that ask for ``kv_trace`` are written down, for debugging; None refuses them.
    options : Mapping[str, object]
        The policy's own settings, checked by the policy.

    Raises
    ------
    ConfigError
        If a value has the wrong type or lies outside its range.
    """

    policy: str = "none"
    budget: int = DEFAULT_BUDGET
    keep_ratio: float = 7 / 8
    n_prefix: int = 4
    n_recent: int = 16
    shared_prefix: str = "auto"
    prefix_beacons_mb: int = 256
    query_memory_mb: int | None = None
    trace_directory: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise ConfigError(f"--kv-policy must be a policy's name, not {self.policy!r}.")
        _require_int("--kv-budget", self.budget, at_least=1)
        _require_int("n_prefix in --kv-policy-config", self.n_prefix, at_least=0)
        _require_int("n_recent in --kv-policy-config", self.n_recent, at_least=1)
        _require_int("prefix_beacons_mb in --kv-policy-config", self.prefix_beacons_mb, at_least=0)
        if self.query_memory_mb is not None:
            _require_int("query_memory_mb in --kv-policy-config", self.query_memory_mb, at_least=1)
        if self.trace_directory is not None and not isinstance(self.trace_directory, str):
            raise ConfigError(
                "trace_directory in --kv-policy-config must be a path, "
                f"not {self.trace_directory!r}."
            )
        ratio = self.keep_ratio
        if not _is_number(ratio) or not 0 < ratio < 1:
            raise ConfigError(
                f"keep_ratio in --kv-policy-config must lie between 0 and 1, not {ratio!r}."
            )
        if self.shared_prefix not in SHARED_PREFIX_MODES:
            raise ConfigError(
                f"shared_prefix in --kv-policy-config must be one of "
                f"{', '.join(SHARED_PREFIX_MODES)}, not {self.shared_prefix!r}."
            )

    @property
    def enabled(self) -> bool:
        return self.policy != "none"

    def with_request(self, params: Mapping[str, Any]) -> KVPolicyConfig:
        """Return the configuration of one request, from its ``custom_params``.

        A request that names another policy starts from that policy's own defaults. Its
        ``kv_policy_config`` may have the policy's own options only.
        """
        policy = params.get("kv_policy", self.policy)
        budget = params.get("kv_budget", self.budget)
        if not isinstance(policy, str):
            raise ConfigError(f"kv_policy must be a policy's name, not {policy!r}.")
        if ":" in policy and policy != self.policy:
            raise ConfigError(
                f"kv_policy {policy!r} would import code: "
                f"start the server with --kv-policy {policy}."
            )
        _require_int("kv_budget", budget, at_least=1)
        given = params.get("kv_policy_config", {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"kv_policy_config must be a JSON object, not {given!r}.")
        options = {**(self.options if policy == self.policy else {}), **given}
        return replace(self, policy=policy, budget=budget, options=options)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for pickling to child processes and for ``/server_info``."""
        return {
            "policy": self.policy,
            "budget": self.budget,
            "keep_ratio": self.keep_ratio,
            "n_prefix": self.n_prefix,
            "n_recent": self.n_recent,
            "shared_prefix": self.shared_prefix,
            "prefix_beacons_mb": self.prefix_beacons_mb,
            "query_memory_mb": self.query_memory_mb,
            "trace_directory": self.trace_directory,
            "options": dict(self.options),
        }


def kept_tokens(budget: int, keep_ratio: float, page_size: int) -> int:
    """Tokens left of a budget, in whole pages."""
    # The ratio is a decimal that somebody wrote: 0.29 of 100 is 29.
    return int(budget * keep_ratio + 1e-9) // page_size * page_size


def least_budget(kept: int, keep_ratio: float, page_size: int) -> int:
    """The smallest budget whose eviction leaves at least ``kept`` tokens."""
    pages = -(-kept // page_size) * page_size
    budget = max(math.ceil(pages / keep_ratio) - 1, 1)
    while kept_tokens(budget, keep_ratio, page_size) < kept:
        budget += 1
    return budget


SHARED_KEYS = (
    "keep_ratio",
    "n_prefix",
    "n_recent",
    "shared_prefix",
    "prefix_beacons_mb",
    "query_memory_mb",
    "trace_directory",
)


def from_flags(
    policy: str | None,
    budget: str | int | None,
    extra: str | Mapping[str, Any] | None,
) -> KVPolicyConfig:
    """Build a configuration from the three flags.

    Parameters
    ----------
    policy : str or None
        ``--kv-policy``.
    budget : str, int or None
        ``--kv-budget`` in tokens.
    extra : str, mapping or None
        ``--kv-policy-config``: a JSON object, or the path of a file that holds one.

    Raises
    ------
    ConfigError
        In one sentence that names the flag. Unknown keys are left in ``options`` for the policy
        to judge, since only it knows its own.
    """
    settings = _read_settings(extra)
    shared = {key: settings.pop(key) for key in SHARED_KEYS if key in settings}
    return KVPolicyConfig(
        policy=policy or "none",
        budget=DEFAULT_BUDGET if budget is None else _parse_budget(budget),
        options=settings,
        **shared,
    )


def reject_unknown(name: str, known: Iterable[str], what: str) -> ConfigError:
    """The error for a misspelt name, with the nearest valid one."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(known)}."
    return ConfigError(f"{what} {name!r} is unknown: {hint}")


def _read_settings(extra: str | Mapping[str, Any] | None) -> dict[str, Any]:
    flag = "--kv-policy-config"
    if extra is None:
        return {}
    if isinstance(extra, Mapping):
        return dict(extra)
    text = extra.strip()
    if not text.startswith("{"):
        try:
            text = Path(extra).read_text()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "not text"
            raise ConfigError(
                f"{flag} {extra!r} is neither a JSON object nor a readable text file ({why})."
            ) from None
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{flag} must be a JSON object, not {type(settings).__name__}.")
    return settings


def _parse_budget(value: str | int) -> int:
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        return int(value)
    if isinstance(value, str | float | bool):
        raise ConfigError(f"--kv-budget must be a whole number of tokens, not {value!r}.")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_int(what: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{what} must be an integer, not {value!r}.")
    if not at_least <= value <= MAX_TOKENS:
        # Python refuses to print integers of thousands of digits.
        shown = value if abs(value) < 2**63 else "so large a number"
        raise ConfigError(
            f"{what} must be an integer between {at_least} and {MAX_TOKENS}, not {shown}."
        )
