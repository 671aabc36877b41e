"""The ``sglang-beacon`` command: plans as text and JSON, errors in one sentence, light imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_beacon import capacity, cli, srt
from sglang_beacon.lab import demo_model

CONFIG = Path(__file__).parent / "data" / "qwen3_4b_config.json"
PLAN = (
    "plan",
    *("--model", str(CONFIG)),
    *("--gpu-memory", "80GB"),
    *("--kv-budget", "2048"),
    *("--generate", "32768"),
)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*PLAN, *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(cli.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, capture_output=True, text=True, check=False
    )


def test_plan_writes_out_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(PLAN) == 0
    out = capsys.readouterr().out
    for line in (
        "KV cache per token: 147,456 B = 2 (K, V) x 36 layers x 8 KV heads x 128 x 2 B",
        "query state per request: 9,437,184 B = "
        "36 layers x 32 query heads x 32 queries x 128 x 2 B",
        "  KV cache      67.65 GB  14 requests x 32,768 tokens x 147,456 B",
        "  KV cache       4.23 GB  14 requests x 2,048 tokens x 147,456 B",
        "  query state    0.13 GB  14 requests x 9,437,184 B",
        "  total         76.76 GB  of 80.00 GB",
        "  total         13.48 GB  of 80.00 GB",
        "Largest batch in 80.00 GB: 14 without a policy, 227 with the budget",
    ):
        assert line in out.splitlines()


def test_plan_json_agrees_with_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "--prompt", "500", "--batch", "3", "--page-size", "16", "--tp", "2")
    shape = capacity.ModelShape.from_config(json.loads(CONFIG.read_text())).shard(2)
    with_policy = capacity.estimate(shape, 3, 500, 32768, 2048, page_size=16)
    one = capacity.estimate(shape, 1, 500, 32768, 2048, page_size=16)
    largest = capacity.largest_batch(one, 80 * 10**9)
    assert result["batch"] == 3
    assert result["kv_bytes_per_token"] == shape.kv_bytes_per_token
    assert result["query_state_bytes_per_request"] == shape.query_state_bytes()
    assert result["with_policy"]["total_bytes"] == with_policy.total_bytes
    assert result["without_policy"]["tokens_per_request"] == 33_280
    assert result["largest_batch_with_policy"] == largest
    assert result["largest_batch_without_policy"] < largest


def test_plan_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--gpu-memory", "4GiB"]) == 0
    out = capsys.readouterr().out
    assert "does not fit in 4.29 GB" in out
    assert "0 without a policy, 0 with the budget" in out


def test_plan_reads_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG.read_text())
    result = run_json(capsys, "--model", str(tmp_path))
    assert result["largest_batch_with_policy"] == 227


def test_plan_asks_transformers_for_a_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class AutoConfig:
        @staticmethod
        def from_pretrained(name: str) -> AutoConfig:
            if name != "some/model":
                raise OSError("long explanation")
            return AutoConfig()

        def to_dict(self) -> dict[str, Any]:
            return dict(json.loads(CONFIG.read_text()))

    transformers = ModuleType("transformers")
    transformers.AutoConfig = AutoConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert run_json(capsys, "--model", "some/model")["largest_batch_without_policy"] == 14
    assert cli.main([*PLAN, "--model", "another/model"]) == 2
    assert "cannot find the model 'another/model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu-memory", "80XB"], "'80XB' is not a positive size"),
        (["--kv-budget", "0"], "KV budget must be positive"),
        (["--batch", "-1"], "batch must not be negative"),
        (["--tp", "5"], "32 query heads cannot be divided over 5 ranks"),
        (["--model", "/no/such/config.json"], "cannot read the model config"),
        (["--model", __file__], "cannot read the model config"),
    ],
)
def test_plan_errors_are_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert cli.main([*PLAN, *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["plan"], ["nothing"], [*PLAN, "--batch", "many"]])
def test_wrong_command_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_module_equals_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(PLAN) == 0
    module = python("-m", "sglang_beacon", *PLAN)
    assert (module.returncode, module.stderr) == (0, "")
    assert module.stdout == capsys.readouterr().out


def test_plan_needs_no_heavy_import() -> None:
    code = (
        "import sys; from sglang_beacon.cli import main; main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'sglang', 'triton', 'numpy'} & set(sys.modules)"
    )
    assert python("-c", code, *PLAN).returncode == 0


def test_demo_model_prints_the_directory_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_model, "ensure", lambda directory: directory or tmp_path)
    assert cli.main(["demo-model"]) == 0
    assert cli.main(["demo-model", str(tmp_path / "here")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path), str(tmp_path / "here")]


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (demo_model.DemoModelError("put it there"), 2, "sglang-beacon: put it there\n"),
        (KeyboardInterrupt(), 130, "sglang-beacon: interrupted\n"),
    ],
)
def test_demo_model_failures(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    sentence: str,
) -> None:
    def fail(directory: Path | None) -> Path:
        raise error

    monkeypatch.setattr(demo_model, "ensure", fail)
    assert cli.main(["demo-model"]) == code
    assert capsys.readouterr().err == sentence


def test_doctor_returns_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = ModuleType("sglang_beacon.srt.doctor")
    doctor.main = lambda hooks: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, doctor.__name__, doctor)
    monkeypatch.setattr(srt, "doctor", doctor, raising=False)
    assert cli.main(["doctor"]) == 1
