"""What the documents point at is there."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sglang_beacon import cli
from sglang_beacon.config import SHARED_KEYS
from sglang_beacon.policies import POLICIES
from sglang_beacon.srt import refusals

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tutorials/README.md"]
NAMED = sorted(
    set(re.findall(r"`(tests/\S+?\.py)::(\w+)`", (ROOT / "docs" / "public-bugs.md").read_text()))
)


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_named_tests_exist(path: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / path).read_text()


def test_the_dashboard_asks_for_counters_that_exist() -> None:
    from sglang_beacon.srt.metrics import Counters

    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = re.findall(r"sglang:kv_policy_(\w+)", json.dumps(dashboard))
    counters = {f"{counter.name}_total" for counter in fields(Counters)}
    bounds = {"delta_bar_bucket", "error_bound_bucket"}
    known = counters | bounds | {"held_tokens", "seen_tokens"}
    assert set(asked) == known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert all((page.parent / link).exists() for link in links), links


def test_every_setting_has_its_row() -> None:
    text = (ROOT / "docs" / "flags.md").read_text()
    assert all(f"| `{key}` |" in text for key in SHARED_KEYS)
    for name, policy in POLICIES.items():
        [row] = re.findall(rf"^\| `{re.escape(name)}` \|.*$", text, flags=re.M)
        for key, value in policy.defaults.items():
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            if "recas" not in name:
                assert re.search(rf"`{key}` `?{re.escape(shown)}\b", row), (name, key)
            else:
                assert f"`{key}`" in text, (name, key)


def test_every_refusal_has_its_row() -> None:
    text = (ROOT / "docs" / "refusals.md").read_text()
    for refusal in refusals.SETTINGS:
        assert f"| {refusal.reason.partition(': ')[2]} |" in text, refusal.reason
    for refusal in refusals.MODELS:
        assert f"- {refusal.reason.removeprefix('with ')}" in text, refusal.reason


def test_every_metric_has_its_row() -> None:
    from sglang_beacon.srt.metrics import Counters

    text = (ROOT / "docs" / "requests.md").read_text()
    assert all(f"`{counter.name}_total`" in text for counter in fields(Counters))


def commands(prefix: str) -> list[str]:
    """Lines of shell blocks, and commands within text, that begin so."""
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S))
    # What a line ends with after two spaces is a comment.
    lines = [re.split(r"\s+# ", line.strip())[0] for line in blocks.splitlines()]
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    inline = [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", text)]
    return sorted({line for line in [*lines, *inline] if line.startswith(prefix)})


def test_commands_that_need_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` as written, with the model's configuration at hand; the rest as it stands."""
    config = str(ROOT / "tests" / "data" / "qwen3_4b_config.json")
    ran = set()
    for command in commands("sglang-beacon "):
        words = [config if word == "Qwen/Qwen3-4B" else word for word in shlex.split(command)[1:]]
        if words[0] in ("plan", "doctor"):
            assert cli.main(words) == 0, command
            ran.add(words[0])
        else:
            # The others have tests with a server, a trace, and a download.
            assert words[0] in ("demo-model", "watch", "report"), command
    assert ran == {"plan", "doctor"}
    assert "KV cache" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in commands("python -m benchmarks.") if "--" in c])
def test_benchmarks_have_these_flags(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are long, and their parts have tests of their own."""
    module, *arguments = shlex.split(command)[2:]
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(module).main()
    text = capsys.readouterr().out
    assert not [word for word in arguments if word.startswith("--") and word not in text]
