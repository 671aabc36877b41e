"""Shared prefixes stay exact, whatever happens to the requests that share them.

Two budgets over the same prompts: a small one, whose requests leave the tree with a copy, and a
large one, whose requests stay attached.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.server import Server, check_decode_steps

from sglang_beacon.lab.random_model import random_prompt as prompt

SLOTS = 4096
SMALL, LARGE = 128, 640
# The random model's end token.
END = 1


# Pages of 16 have servers of their own in most other modules.
PAGES = [1, pytest.param(16, marks=pytest.mark.slow), 64]


@pytest.fixture(scope="module", params=PAGES, ids=lambda page: f"page{page}")
def page(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def server(random_qwen3: Path, page: int):
    with Server(
        "--skip-tokenizer-init", "--dtype", "float32", "--kv-policy", "beacon",
        "--kv-budget", str(SMALL), "--page-size", str(page), "--max-total-tokens", str(SLOTS),
        "--chunked-prefill-size", "256", "--enable-cache-report", model=random_qwen3, threads=1,
    ) as server:  # fmt: skip
        yield server
        assert server.alive
        server.wait_idle()
        check_decode_steps(server.steps())
        server.flush()
        load = server.loads()[0]
        assert load["num_used_tokens"] == 0


@pytest.fixture
def any_page(page: int) -> None:
    """For what depends on the page size little enough to be seen at one."""
    if page != 16:
        pytest.skip("seen at page 16")


@pytest.fixture(scope="module")
def prefixes(page: int) -> list[list[int]]:
    """Around one page and inside the third; one that is itself larger than the small budget."""
    lengths = (page - 1, page, page + 1, 2 * page + page // 2, 300)
    return [prompt(length, length) for length in sorted(set(lengths)) if length > 0]


@pytest.fixture(scope="module")
def exact(server: Server, prefixes: list[list[int]]) -> list[dict]:
    """Answers of a server that never compressed anything."""
    answers = [ask(server, prefix) for prefix in prefixes]
    assert server.info()["internal_states"][0]["kv_policy"]["counters"]["evictions"] == 0
    return answers


def ask(server: Server, prefix: list[int]) -> dict:
    """Put a prefix into an empty tree, and continue it exactly."""
    server.flush()
    server.generate(prefix, 1)
    return follow_up(server, prefix)


def follow_up(server: Server, prefix: list[int]) -> dict:
    reply = server.generate(
        prefix + prompt(9, 1), 40, logprobs=True, custom_params={"kv_policy": "none"}
    )
    return {
        "tokens": reply["tokens"],
        "logprobs": reply["logprobs"],
        "cached": reply["meta_info"]["cached_tokens"],
    }


def sharing(prefix: list[int], count: int, tokens: int = 150) -> list[dict]:
    """Requests over one prefix, of both budgets in turns."""
    return [
        {
            "input_ids": prefix + prompt(5 + n, 50 + n),
            "max_new_tokens": tokens,
            "custom_params": {"kv_budget": (SMALL, LARGE)[n % 2]},
            "rid": f"{len(prefix)}-{n}-{time.monotonic()}",
        }
        for n in range(count)
    ]


def test_after_compression(server: Server, prefixes: list[list[int]], exact: list[dict]) -> None:
    """Some stay and some leave; the next request finds the same prefix, bit for bit."""
    for prefix, expected in zip(prefixes, exact, strict=True):
        server.flush()
        server.generate(prefix, 1)
        replies = server.generate_all(sharing(prefix, 4))
        modes = [reply["meta_info"]["kv_policy"]["prefix"] for reply in replies]
        assert follow_up(server, prefix) == expected
        if len(prefix) == 300:
            assert set(modes) == {"copy", "pin"}
            evictions = [reply["meta_info"]["kv_policy"]["evictions"] for reply in replies]
            assert all(evictions[::2])


def test_held_tokens_are_bounded(server: Server, page: int) -> None:
    """A request that left the tree holds its budget at most, prompt and all."""
    since = len(server.steps())
    server.flush()
    server.generate_all(sharing(prompt(300, 9), 4, tokens=300)[::2])
    settled = [req for req in check_decode_steps(server.steps(since)) if req["decoded"] > 2]
    assert len(settled) > 500
    assert all(req["tree"] == 0 and req["held"] <= SMALL + page for req in settled)


def test_budget_shared_by_the_prefix(server: Server, page: int) -> None:
    """Attached requests keep within their budgets together: the shared part counts once."""
    since = len(server.steps())
    server.flush()
    server.generate(prompt(256, 7), 1)
    jobs = [{**job, "custom_params": {"kv_budget": 160}} for job in sharing(prompt(256, 7), 8)]
    server.generate_at_once(jobs)
    together = [
        step["reqs"]
        for step in server.steps(since)
        if step["mode"] == "DECODE" and len(step["reqs"]) == 8
    ]
    assert len(together) > 100
    for reqs in together:
        # While all are there, each answers for 32 of the 256, and stays.
        assert all(req["tree"] >= 256 for req in reqs)
        private = sum(req["held"] - req["tree"] for req in reqs)
        assert private + 256 <= 8 * (160 + 2 * page)


def test_after_abort(server: Server, prefixes: list[list[int]], exact: list[dict]) -> None:
    """Aborted and asked again at once; somebody else's request meanwhile is not touched."""
    other = {"input_ids": prompt(40, 77), "max_new_tokens": 300}
    alone = server.generate(**other)["tokens"]
    for prefix, expected in zip(prefixes, exact, strict=True):
        server.flush()
        server.generate(prefix, 1)
        jobs = sharing(prefix, 4, tokens=2000)
        threads = [
            threading.Thread(target=server.generate, kwargs=job, daemon=True) for job in jobs
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        with ThreadPoolExecutor(1) as pool:
            unrelated = pool.submit(server.generate, **other)
            while any(thread.is_alive() for thread in threads):
                for job in jobs:
                    server.post("/abort_request", {"rid": job["rid"]})
                time.sleep(0.1)
            server.generate_all(sharing(prefix, 2, tokens=50))
            assert unrelated.result()["tokens"] == alone
        assert follow_up(server, prefix) == expected


def test_after_retraction(server: Server, prefixes: list[list[int]], exact: list[dict]) -> None:
    """All running requests lose their memory at once, twice, and go on."""
    for prefix, expected in zip(prefixes, exact, strict=True):
        server.flush()
        server.generate(prefix, 1)
        since = len(server.steps())
        jobs = sharing(prefix, 3, tokens=200)
        thread = threading.Thread(target=server.generate_all, args=(jobs,))
        thread.start()
        for _ in range(2):
            time.sleep(0.4)
            server.retract_all()
        thread.join()
        assert [step for step in server.steps(since) if step["mode"] == "RETRACT"]
        assert follow_up(server, prefix) == expected


def test_after_tree_eviction(server: Server, prefixes: list[list[int]], exact: list[dict]) -> None:
    """Other requests push the prefix out, while those that share it are compressed."""
    for prefix, expected in zip(prefixes, exact, strict=True):
        server.flush()
        server.generate(prefix, 1)
        flood = [
            {"input_ids": prompt(500, 900 + n), "max_new_tokens": 5, "rid": f"flood-{n}"}
            for n in range(9)
        ]
        server.generate_all(sharing(prefix, 2) + flood)
        assert ask(server, prefix) == expected


def test_what_was_compacted_is_not_found(server: Server, page: int) -> None:
    """After it is done, the tree has a request's exact tokens, and none of the compacted ones."""
    for length, most in ((40, 40), (300, 301)):
        server.flush()
        ids = prompt(length, 5)
        reply = server.generate(ids, 400)
        assert reply["meta_info"]["kv_policy"]["evictions"] > 2
        again = server.generate(ids + reply["tokens"], 1)
        # Until the first eviction it was exact; one in place leaves the tree what it had.
        until = most if length > SMALL / 2 else length
        assert again["meta_info"]["cached_tokens"] <= until
        assert again["meta_info"]["cached_tokens"] >= length // page * page - page


@pytest.mark.usefixtures("any_page")
@pytest.mark.parametrize("said", [30, 200])
def test_stopped_by_a_token(server: Server, said: int) -> None:
    """Before and after the first eviction, one step before the scheduler hears of it."""
    for seed in range(6, 30):
        server.flush()
        ids = prompt(50, seed)
        whole = server.generate(ids, 250)["tokens"]
        if END not in whole:
            break
    first = next(n for n in range(said, 250) if whole[n] not in whole[:n])
    server.flush()
    reply = server.generate(ids, 250, stop_token_ids=[whole[first]], ignore_eos=False)
    assert reply["tokens"] == whole[: first + 1]
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    again = server.generate(ids + reply["tokens"], 20, custom_params={"kv_policy": "none"})
    server.flush()
    fresh = server.generate(ids + reply["tokens"], 20, custom_params={"kv_policy": "none"})
    assert again["tokens"] == fresh["tokens"]


@pytest.mark.usefixtures("any_page")
def test_running_requests_are_compressed_before_the_tree_is_evicted(server: Server) -> None:
    """What they would say does not fit beside a cached prefix; what they hold does."""
    server.flush()
    server.generate(prompt(512, 8), 1)
    jobs = [{"input_ids": prompt(20, 60 + n), "max_new_tokens": 800} for n in range(6)]
    server.generate_all(jobs)
    reply = server.generate([*prompt(512, 8), 5], 1)
    assert reply["meta_info"]["cached_tokens"] == 512
