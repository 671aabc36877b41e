"""The flags: declared, validated, and carried to every process on the server's own arguments.

`ServerArgs` is a sealed record, so the configuration rides beside its fields as a plain dict in
``_kv_policy``: it survives resolution and the pickling to child processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_beacon import policies
from sglang_beacon.config import DEFAULT_BUDGET, ConfigError, KVPolicyConfig, from_flags
from sglang_beacon.srt import compat, refusals, tree_eviction

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ATTRIBUTE = "_kv_policy"
FLAGS = ("kv_policy", "kv_budget", "kv_policy_config")


def config_of(server_args: ServerArgs) -> KVPolicyConfig:
    """The configuration a server was started with; policy "none" if it was given none."""
    carried = getattr(server_args, ATTRIBUTE, None)
    return KVPolicyConfig(**carried) if carried else KVPolicyConfig()


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: declare the flags, once per parser.

    They are declared as strings: argparse would answer a bad value with SGLang's whole usage text
    where one sentence is due.
    """
    if any("--kv-policy" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group("KV cache compression (sglang-beacon)")
    group.add_argument(
        "--kv-policy",
        default=None,
        help=f"Which method bounds each request's KV cache: {', '.join(policies.POLICY_NAMES)}, "
        "or module:Class for one of your own. Default: none.",
    )
    group.add_argument(
        "--kv-budget",
        metavar="TOKENS",
        default=None,
        help=f"Private tokens of KV cache each request may hold. Default: {DEFAULT_BUDGET}.",
    )
    group.add_argument(
        "--kv-policy-config",
        metavar="JSON",
        default=None,
        help="Further settings of the policy: a JSON object, or the path of a file with one.",
    )


def attach_flags(server_args: ServerArgs, cls: type, args: argparse.Namespace) -> None:
    """After `ServerArgs.from_cli_args`: validate the flags and carry them on the record."""
    try:
        attach(server_args, *(getattr(args, flag, None) for flag in FLAGS))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


def make_engine_args(**kwargs: Any) -> ServerArgs:
    """Build `ServerArgs` from `sglang.Engine`'s keywords, ours among them."""
    from sglang.srt.server_args import ServerArgs

    ours = [kwargs.pop(flag, None) for flag in FLAGS]
    server_args = ServerArgs(**kwargs)
    attach(server_args, *ours)
    return server_args


def attach(server_args: ServerArgs, policy: Any, budget: Any, extra: Any) -> None:
    """Validate the three settings and carry them on the record.

    Raises
    ------
    ConfigError
        In one sentence that names the flag.
    """
    config = from_flags(policy, budget, extra)
    # The page size is not resolved yet; `resolve` looks again once it is.
    policies.create(config)
    setattr(server_args, ATTRIBUTE, config.as_dict())


def resolve(
    launcher_hooks: Sequence[compat.Hook],
    policy_hooks: Sequence[compat.Hook],
    server_args: ServerArgs,
    previous: Callable[[Any], None],
) -> None:
    """Around SGLang's last validation step: refuse what cannot work, before any model loads."""
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    config = config_of(server_args)
    resolved = resolving_view(server_args)
    if needs_prefix_cache(config, resolved) and resolved.radix_cache_backend is not None:
        _refuse(
            server_args,
            f"--kv-policy and --radix-eviction-policy {tree_eviction.NAME} bring their own prefix "
            "cache: remove --radix-cache-backend.",
        )
    if not config.enabled:
        return
    try:
        policies.create(config, resolved.page_size or 1)
    except ConfigError as error:
        _refuse(server_args, str(error))
    if reason := refusals.reason(server_args, resolved):
        _refuse(server_args, reason)
    try:
        compat.check(policy_hooks)
        compat.install(launcher_hooks)
    except compat.IncompatibleError as error:
        _refuse(server_args, str(error))


def needs_prefix_cache(config: KVPolicyConfig, settings: Any) -> bool:
    """Whether a server with these settings runs `srt.prefix.PrefixCache`."""
    return config.enabled or settings.radix_eviction_policy == tree_eviction.NAME


def check_schedulers(infos: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
    """After the launcher heard from all schedulers: each must run the policy that was asked for.

    A scheduler process that did not load the plugin (an ``SGLANG_PLUGINS`` list without it, a
    broken installation) would serve the whole cache and say nothing.
    """
    from sglang.srt.runtime_context import get_server_args

    expected = config_of(get_server_args()).as_dict()
    if any(info.get("kv_policy") != expected for info in infos):
        raise RuntimeError(
            f"a scheduler process does not run --kv-policy {expected['policy']}: the sglang-beacon "
            "plugin did not load there (is SGLANG_PLUGINS set without 'beacon'?)."
        )


def _refuse(server_args: ServerArgs, message: str) -> NoReturn:
    """End the launch: an exit with one sentence for a command, a ValueError for the Engine."""
    if (server_args.launch_command or "").startswith("Engine("):
        raise ValueError(message)
    raise SystemExit(f"error: {message}")
