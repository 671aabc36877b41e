"""Settings: every mistake is one sentence that names what to change, and what is right survives."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_beacon.config import (
    REQUEST_KEYS,
    SHARED_KEYS,
    ConfigError,
    KVPolicyConfig,
    from_flags,
    kept_tokens,
    least_budget,
    reject_unknown,
)

FLAG_POLICY, FLAG_BUDGET, FLAG_CONFIG = "--kv-policy", "--kv-budget", "--kv-policy-config"


def assert_one_sentence(message: str) -> None:
    assert message
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert len(re.findall(r"[.?!](\s|$)", message)) == 1


def test_defaults() -> None:
    config = from_flags(None, None, None)
    assert config == KVPolicyConfig()
    assert not config.enabled
    assert (config.budget, config.keep_ratio) == (2048, 7 / 8)
    assert (config.n_prefix, config.n_recent, config.shared_prefix) == (4, 16, "auto")
    assert from_flags("beacon", None, None).enabled


@pytest.mark.parametrize(
    ("flags", "names", "culprit"),
    [
        ((7, None, None), FLAG_POLICY, "7"),
        (("beacon", "many", None), FLAG_BUDGET, "'many'"),
        (("beacon", "1.5", None), FLAG_BUDGET, "'1.5'"),
        (("beacon", "", None), FLAG_BUDGET, "''"),
        (("beacon", [64], None), FLAG_BUDGET, "[64]"),
        (("beacon", "0", None), FLAG_BUDGET, "0"),
        (("beacon", -5, None), FLAG_BUDGET, "-5"),
        (("beacon", "-5", None), FLAG_BUDGET, "-5"),
        (("beacon", 2048.9, None), FLAG_BUDGET, "2048.9"),
        (("beacon", True, None), FLAG_BUDGET, "True"),
        (("beacon", 10**5000, None), FLAG_BUDGET, "so large a number"),
        (("beacon", None, "a\0b"), FLAG_CONFIG, "readable"),
        (("beacon", None, '{"keep_ratio": 1}'), FLAG_CONFIG, "keep_ratio"),
        (("beacon", None, '{"keep_ratio": 0}'), FLAG_CONFIG, "keep_ratio"),
        (("beacon", None, '{"keep_ratio": -0.5}'), FLAG_CONFIG, "keep_ratio"),
        (("beacon", None, '{"keep_ratio": NaN}'), FLAG_CONFIG, "keep_ratio"),
        (("beacon", None, '{"keep_ratio": "half"}'), FLAG_CONFIG, "'half'"),
        (("beacon", None, '{"keep_ratio": true}'), FLAG_CONFIG, "True"),
        (("beacon", None, '{"keep_ratio": null}'), FLAG_CONFIG, "None"),
        (("beacon", None, '{"n_prefix": -1}'), FLAG_CONFIG, "n_prefix"),
        (("beacon", None, '{"n_prefix": 1.0}'), FLAG_CONFIG, "1.0"),
        (("beacon", None, '{"n_prefix": false}'), FLAG_CONFIG, "False"),
        (("beacon", None, '{"n_recent": 0}'), FLAG_CONFIG, "n_recent"),
        (("beacon", None, '{"n_recent": "16"}'), FLAG_CONFIG, "'16'"),
        (("beacon", None, '{"shared_prefix": "steal"}'), FLAG_CONFIG, "'steal'"),
        (("beacon", None, '{"shared_prefix": 1}'), FLAG_CONFIG, "shared_prefix"),
        (("beacon", None, '{"n_recent": 16'), FLAG_CONFIG, "JSON"),
        (("beacon", None, "{}{}"), FLAG_CONFIG, "JSON"),
        (("beacon", None, "[1, 2]"), FLAG_CONFIG, "'[1, 2]'"),
        (("beacon", None, ""), FLAG_CONFIG, "''"),
        (("beacon", None, "no/such/file.json"), FLAG_CONFIG, "no/such/file.json"),
    ],
)
def test_every_mistake_names_its_flag(
    flags: tuple[Any, Any, Any], names: str, culprit: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*flags)
    message = str(caught.value)
    assert_one_sentence(message)
    assert names in message.split()[0:3] or names in message
    assert culprit in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("content", ["[1, 2]", "7", '"beacon"', "null"])
def test_a_file_must_hold_an_object(content: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--kv-policy-config must be a JSON object") as caught:
        from_flags("beacon", None, str(path))
    assert_one_sentence(str(caught.value))


def test_a_file_must_hold_json(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text("n_recent: 16")
    with pytest.raises(ConfigError, match="--kv-policy-config is not valid JSON") as caught:
        from_flags("beacon", None, str(path))
    assert_one_sentence(str(caught.value))


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-policy-config"):
        from_flags("beacon", None, str(tmp_path))


def test_file_inline_and_mapping_agree(tmp_path: Path) -> None:
    settings = {"keep_ratio": 0.5, "n_prefix": 2, "n_recent": 8, "n_beacon": 4}
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(settings, indent=2))
    inline = from_flags("beacon", "512", json.dumps(settings))
    assert inline == from_flags("beacon", 512, str(path))
    assert inline == from_flags("beacon", 512, settings)
    assert inline == from_flags("beacon", 512, f"  {json.dumps(settings)}\n")
    assert inline == KVPolicyConfig(
        policy="beacon",
        budget=512,
        keep_ratio=0.5,
        n_prefix=2,
        n_recent=8,
        options={"n_beacon": 4},
    )
    assert settings == json.loads(path.read_text()), "the caller's mapping is left alone"


def test_shared_keys_never_reach_the_policy() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(KVPolicyConfig)}
    assert set(SHARED_KEYS) == set(fields) - {"policy", "budget", "options"}
    config = from_flags("beacon", None, {key: fields[key] for key in SHARED_KEYS})
    assert config.options == {}


def test_unknown_keys_are_left_to_the_policy() -> None:
    assert from_flags("beacon", None, {"n_beacn": 3}).options == {"n_beacn": 3}


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("n_beacn", ["n_beacon", "n_recent"], "did you mean 'n_beacon'?"),
        ("recent", ["n_beacon", "n_recent"], "did you mean 'n_recent'?"),
        ("zzz", ["b", "a"], "it must be one of a, b."),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, known: list[str], expected: str) -> None:
    error = reject_unknown(name, known, "the key")
    assert str(error) == f"the key {name!r} is unknown: {expected}"
    assert_one_sentence(str(error))


# Per request.

SERVER = KVPolicyConfig(
    policy="beacon", budget=1024, n_recent=8, keep_ratio=0.5, options={"n_beacon": 4}
)


def test_a_request_without_wishes_gets_the_servers_policy() -> None:
    assert SERVER.with_request({}) == SERVER
    assert SERVER.with_request({"temperature": 3, "n_recent": 99}) == SERVER


def test_a_request_may_change_policy_and_budget() -> None:
    assert set(REQUEST_KEYS) == {"kv_policy", "kv_budget", "kv_policy_config", "kv_trace"}
    assert SERVER.with_request({"kv_budget": 64}) == dataclasses.replace(SERVER, budget=64)
    same = SERVER.with_request({"kv_policy": "beacon", "kv_budget": 64})
    assert same.options == {"n_beacon": 4}
    other = SERVER.with_request({"kv_policy": "streaming"})
    assert other == dataclasses.replace(SERVER, policy="streaming", options={})
    assert not SERVER.with_request({"kv_policy": "none"}).enabled
    added = SERVER.with_request({"kv_policy_config": {"aggregation": "mean"}})
    assert added.options == {"n_beacon": 4, "aggregation": "mean"}
    replaced = SERVER.with_request({"kv_policy": "random", "kv_policy_config": {"seed": 1}})
    assert replaced.options == {"seed": 1}
    assert SERVER.budget == 1024


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"kv_policy": 3}, "kv_policy"),
        ({"kv_policy": None}, "kv_policy"),
        ({"kv_budget": "64"}, "kv_budget"),
        ({"kv_budget": 64.0}, "kv_budget"),
        ({"kv_budget": True}, "kv_budget"),
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_budget": None}, "kv_budget"),
        ({"kv_policy_config": "n_beacon"}, "kv_policy_config"),
        ({"kv_policy_config": None}, "kv_policy_config"),
    ],
)
def test_a_requests_mistakes_name_its_own_key(params: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SERVER.with_request(params)
    assert_one_sentence(str(caught.value))
    assert str(caught.value).startswith(names)


# Values.


@given(
    policy=st.sampled_from(["none", "beacon", "random"]),
    budget=st.integers(1, 10**6),
    keep_ratio=st.floats(0.01, 0.99),
    n_prefix=st.integers(0, 100),
    n_recent=st.integers(1, 100),
    options=st.dictionaries(st.sampled_from(["n_beacon", "seed"]), st.integers(0, 9)),
)
def test_as_dict_round_trip(options: dict[str, int], **settings: Any) -> None:
    """Through plain values, JSON and pickling, as on the way to another process."""
    config = KVPolicyConfig(**settings, options=options)
    plain = config.as_dict()
    assert KVPolicyConfig(**plain) == config
    assert KVPolicyConfig(**json.loads(json.dumps(plain))) == config
    assert pickle.loads(pickle.dumps(plain)) == plain
    plain["options"]["n_beacon"] = 99
    assert config.options == options


@given(
    budget=st.integers(1, 10**6),
    sixteenths=st.integers(1, 15),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_kept_is_a_share_in_whole_pages(budget: int, sixteenths: int, page_size: int) -> None:
    kept = kept_tokens(budget, sixteenths / 16, page_size)
    share = Fraction(sixteenths * budget, 16)
    assert kept % page_size == 0
    assert kept <= share < kept + page_size


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVPolicyConfig().budget = 3  # type: ignore[misc]


def test_a_binary_settings_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="readable text file"):
        from_flags("beacon", None, str(file))


@given(
    kept=st.integers(1, 500),
    ratio=st.fractions(Fraction(1, 50), Fraction(49, 50)).map(float),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_the_least_budget_is_least(kept: int, ratio: float, page_size: int) -> None:
    budget = least_budget(kept, ratio, page_size)
    assert kept_tokens(budget, ratio, page_size) >= kept
    assert budget == 1 or kept_tokens(budget - 1, ratio, page_size) < kept


def test_a_tiny_ratio_is_answered_at_once() -> None:
    assert least_budget(21, 1e-9, 1) == pytest.approx(21e9, rel=1e-3)


def test_a_decimal_ratio_is_taken_as_written() -> None:
    assert kept_tokens(100, 0.29, 1) == 29
