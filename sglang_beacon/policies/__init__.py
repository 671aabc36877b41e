"""Eviction policies: one method per module, and the registry that names them."""

from __future__ import annotations

import importlib

from sglang_beacon.config import ConfigError, KVPolicyConfig, reject_unknown
from sglang_beacon.policies.base import Policy
from sglang_beacon.policies.beacon import BeaconPolicy
from sglang_beacon.policies.beacon_recas import BeaconRecasPolicy
from sglang_beacon.policies.expected_attention import ExpectedAttentionPolicy
from sglang_beacon.policies.h2o import H2OPolicy
from sglang_beacon.policies.initial_recent import InitialRecentPolicy
from sglang_beacon.policies.keydiff import KeyDiffPolicy
from sglang_beacon.policies.lazy_eviction import LazyEvictionPolicy
from sglang_beacon.policies.quest import QuestPolicy
from sglang_beacon.policies.random import RandomPolicy
from sglang_beacon.policies.recas import RecasPolicy
from sglang_beacon.policies.rkv import RKVPolicy
from sglang_beacon.policies.rpc import RPCPolicy
from sglang_beacon.policies.scissorhands import ScissorhandsPolicy
from sglang_beacon.policies.snapkv import SnapKVPolicy
from sglang_beacon.policies.streaming import StreamingPolicy
from sglang_beacon.policies.tova import TOVAPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        BeaconPolicy,
        RecasPolicy,
        BeaconRecasPolicy,
        ExpectedAttentionPolicy,
        H2OPolicy,
        InitialRecentPolicy,
        KeyDiffPolicy,
        LazyEvictionPolicy,
        QuestPolicy,
        RKVPolicy,
        RPCPolicy,
        ScissorhandsPolicy,
        SnapKVPolicy,
        StreamingPolicy,
        TOVAPolicy,
        RandomPolicy,
    )
}
POLICY_NAMES = ("none", *POLICIES)


def create(config: KVPolicyConfig, page_size: int = 1) -> Policy | None:
    """Build the policy a configuration names; None for ``"none"``.

    A name with a colon, ``module:Class``, is a policy of somebody else's.

    Raises
    ------
    ConfigError
        If the policy or one of its options is unknown, or the budget is below what it needs.
    """
    if not config.enabled:
        if config.options:
            raise ConfigError(
                "--kv-policy-config has settings of a policy: name it by --kv-policy."
            )
        return None
    return _find(config.policy)(config, page_size)


def _find(name: str) -> type[Policy]:
    if ":" not in name:
        if name not in POLICIES:
            raise reject_unknown(name, POLICY_NAMES, "--kv-policy")
        return POLICIES[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--kv-policy {name} cannot be imported: {error}.") from error
    if not isinstance(found, type) or not issubclass(found, Policy):
        raise ConfigError(f"--kv-policy {name} is not a subclass of sglang_beacon.policies.Policy.")
    return found


__all__ = ["POLICIES", "POLICY_NAMES", "Policy", "create"]
