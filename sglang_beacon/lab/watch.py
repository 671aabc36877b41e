"""``sglang-beacon watch``: what a running server's requests hold, live in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import requests
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

KEY = "kv_policy"
BAR_CELLS = 24
TIMEOUT_S = 10


class WatchError(RuntimeError):
    """A server cannot be watched; says in one sentence why."""


def snapshot(url: str) -> Mapping[str, Any]:
    """What the server says of its policy and its running requests, of its first rank.

    Raises
    ------
    WatchError
        When it does not answer, or has no policy.
    """
    try:
        response = requests.get(f"{url.rstrip('/')}/server_info", timeout=TIMEOUT_S)
        response.raise_for_status()
        states = response.json()["internal_states"]
        return dict(states[0][KEY])
    except requests.RequestException as error:
        raise WatchError(f"{url} does not answer ({type(error).__name__})") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise WatchError(f"{url} is no SGLang server with a --kv-policy") from error


def render(state: Mapping[str, Any]) -> Group:
    """Draw one snapshot."""
    counters = state.get("counters", {})
    title = (
        f"{state['policy']}, budget {state['budget']:,}   "
        f"evictions {counters.get('evictions', 0):,}   "
        f"evicted tokens {counters.get('evicted_tokens', 0):,}"
    )
    if counters.get("budget_expansions"):
        title += f"   budgets grown {counters['budget_expansions']:,}"
    running = state.get("requests", [])
    if not running:
        return Group(Text(title, style="bold"), Text("no request is running"))
    table = Table(box=None, pad_edge=False)
    for name in ("request", "policy", "seen", "held", "", "evictions", "error bound"):
        table.add_column(name, justify="left" if name in ("request", "policy", "") else "right")
    longest = max(request["logical_tokens"] for request in running)
    for request in running:
        seen, held = request["logical_tokens"], request["held_tokens"]
        table.add_row(
            str(request["rid"])[:12], request["policy"], f"{seen:,}", f"{held:,}",
            bar(held, seen, longest), f"{request['evictions']:,}", bound(request),
        )  # fmt: skip
    more = state.get("requests_in_all", len(running)) - len(running)
    rest = [Text(f"and {more:,} more")] if more > 0 else []
    return Group(Text(title, style="bold"), table, *rest)


def bar(held: int, seen: int, longest: int) -> Text:
    """Held tokens as full cells, evicted ones as dots; a row is as long as the longest request."""
    scale = BAR_CELLS / max(longest, 1)
    full = round(held * scale)
    return Text("█" * full + "·" * max(round(seen * scale) - full, 0))


def bound(request: Mapping[str, Any]) -> str:
    """The largest bound on the error of what was evicted, where the policy knows one."""
    error = request.get("recas", {}).get("retention", {}).get("error_largest")
    return "" if error is None else f"{error:.3g}"


def watch(
    url: str, every_s: float, times: int | None = None, console: Console | None = None
) -> None:
    """Show a server until interrupted, or so many times.

    Raises
    ------
    WatchError
        When it cannot be watched any more.
    """
    state = snapshot(url)
    with Live(render(state), console=console, auto_refresh=False) as live:
        while times is None or times > 1:
            times = None if times is None else times - 1
            time.sleep(every_s)
            live.update(render(snapshot(url)), refresh=True)
