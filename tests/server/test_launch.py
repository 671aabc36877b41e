"""The door: what cannot work ends the launch in one sentence, before any model loads."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.server import launch_error
from transformers import AutoConfig

from sglang_beacon import cli
from sglang_beacon.srt import compat, refusals, server_args


@pytest.fixture(scope="module")
def prepare():
    """SGLang's own path from an argument list to resolved arguments, with the plugin loaded."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()

    def resolve(*argv: str):
        args = prepare_server_args(list(argv))
        args.resolve_once()
        return args

    return resolve


def refusal(prepare, model: Path, *argv: str) -> str:
    """The one sentence a launch ends with."""
    with pytest.raises(SystemExit) as exit_info:
        prepare("--model-path", str(model), "--skip-tokenizer-init", *argv)
    message = str(exit_info.value)
    assert message.startswith("error: ")
    assert "\n" not in message
    assert message.count(". ") == 0
    return message


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--kv-policy", "becon"], "did you mean 'beacon'?"),
        (["--kv-policy", "zzz"], "it must be one of beacon, beacon+recas, expected_attention"),
        (["--kv-policy", "beacon", "--kv-budget", "20"], "it needs at least 24 tokens"),
        (["--kv-policy", "beacon", "--kv-budget", "many"], "must be a whole number of tokens"),
        (["--kv-policy", "beacon", "--kv-budget", "-3"], "--kv-budget must be an integer"),
        (["--kv-policy", "beacon", "--kv-policy-config", "{oops"], "is not valid JSON"),
        (
            ["--kv-policy", "beacon", "--kv-policy-config", "nowhere.json"],
            "nor a readable text file",
        ),
        (["--kv-policy", "beacon", "--kv-policy-config", '{"n_becon": 8}'], "'n_beacon'"),
        (["--kv-policy", "beacon", "--kv-policy-config", '{"aggregation": "sum"}'], "one of"),
        (["--kv-policy", "streaming", "--kv-policy-config", '{"n_beacon": 8}'], "is unknown"),
        (["--kv-policy", "recas", "--kv-policy-config", '{"alpha": 1}'], "alpha in --kv-policy"),
        (["--kv-policy", "recas", "--kv-policy-config", '{"epsilon": -1}'], "epsilon in --kv"),
        (["--kv-policy", "recas", "--kv-policy-config", '{"ladder": [9, 9]}'], "ladder in --kv"),
    ],
)
def test_bad_flags(prepare, random_qwen3: Path, argv: list[str], expected: str) -> None:
    assert expected in refusal(prepare, random_qwen3, *argv)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--enable-mixed-chunk"], "--enable-mixed-chunk"),
        (["--pp-size", "2"], "--pp-size"),
        (["--enable-torch-compile"], "--enable-torch-compile"),
        (["--disaggregation-mode", "decode"], "--disaggregation-mode"),
        (["--enable-streaming-session"], "--enable-streaming-session"),
        (["--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
        (["--enable-hisparse"], "--enable-hisparse"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype"),
        (["--attention-backend", "flex_attention"], "--attention-backend"),
        (["--page-size", "64", "--kv-budget", "64"], "--kv-budget"),
    ],
)
def test_unsupported_combinations(prepare, random_qwen3: Path, argv: list[str], flag: str) -> None:
    assert flag in refusal(prepare, random_qwen3, "--kv-policy", "beacon", *argv)


# One way to meet each row of the table, by the attribute SGLang resolves the flag to.
OFFENDING_SETTINGS = {
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "--enable-dp-attention": {"enable_dp_attention": True},
    "--pp-size": {"pp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--disaggregation-mode": {"disaggregation_mode": "prefill"},
    "--disaggregation-decode-enable-offload-kvcache": {
        "disaggregation_decode_enable_offload_kvcache": True
    },
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--enable-page-major-kv-layout": {"enable_page_major_kv_layout": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--enable-session-radix-cache": {"enable_session_radix_cache": True},
    "--kv-canary": {"kv_canary": "log"},
    "--enable-return-routed-experts": {"enable_return_routed_experts": True},
    "--enable-return-indexer-topk": {"enable_return_indexer_topk": True},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--enable-torch-compile": {"enable_torch_compile": True},
    "--kv-cache-dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--attention-backend": {"decode_attention_backend": "fa3"},
}
OFFENDING_MODELS = {
    "an embedding model": {"is_generation": False},
    "MLA": {"attention_arch": SimpleNamespace(name="MLA")},
    "sliding-window": {"is_hybrid_swa": True},
    "chunked local attention": {"attention_chunk_size": 8192},
    "multimodal rotary": {"model_is_mrope": True},
    "encoder-decoder": {"is_encoder_decoder": True},
}


class Changed:
    """An object of SGLang's with some attributes of ours."""

    def __init__(self, original: object, changes: dict) -> None:
        self.original, self.changes = original, changes

    def __getattr__(self, name: str):
        return self.changes[name] if name in self.changes else getattr(self.original, name)


@pytest.fixture(scope="module")
def accepted(prepare, random_qwen3: Path):
    """Resolved settings, and the model they load, of a launch that is not refused."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    args = prepare("--model-path", str(random_qwen3), "--kv-policy", "beacon")
    assert refusals.reason(args, resolved_view(args)) is None
    return resolved_view(args), model_config_of(args)


def test_each_refused_setting(accepted) -> None:
    """Every row of the table is met by what it is for, names its flag, and by nothing else."""
    settings, _ = accepted
    assert len(OFFENDING_SETTINGS) == len(refusals.SETTINGS)
    for flag, changes in OFFENDING_SETTINGS.items():
        met = [row for row in refusals.SETTINGS if row.applies(Changed(settings, changes))]
        assert len(met) == 1, flag
        assert flag in met[0].reason


def test_each_refused_model(accepted) -> None:
    _, model = accepted
    assert len(OFFENDING_MODELS) == len(refusals.MODELS)
    for kind, changes in OFFENDING_MODELS.items():
        met = [row for row in refusals.MODELS if row.applies(Changed(model, changes))]
        assert len(met) == 1, kind
        assert kind in met[0].reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
             "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "sliding-window",
        ),
        ({"architectures": ["LlamaEmbeddingModel"]}, "embedding"),
    ],
)  # fmt: skip
def test_unsupported_models(
    prepare, random_qwen3: Path, tmp_path: Path, changes: dict, expected: str
) -> None:
    config = {**AutoConfig.from_pretrained(random_qwen3).to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert expected in refusal(prepare, tmp_path, "--kv-policy", "beacon")


def test_configuration_travels(prepare, random_qwen3: Path, tmp_path: Path) -> None:
    settings = tmp_path / "policy.json"
    settings.write_text('{"n_recent": 8, "aggregation": "mean"}')
    args = prepare(
        "--model-path", str(random_qwen3), "--skip-tokenizer-init", "--kv-policy", "beacon",
        "--kv-budget", "512", "--kv-policy-config", str(settings),
    )  # fmt: skip
    import pickle

    config = server_args.config_of(pickle.loads(pickle.dumps(args)))
    assert (config.policy, config.budget, config.n_recent) == ("beacon", 512, 8)
    assert config.options == {"aggregation": "mean"}


def test_yaml_config_file(prepare, random_qwen3: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        f"model-path: {random_qwen3}\nskip-tokenizer-init: true\n"
        "kv-policy: streaming\nkv-budget: 300\n"
    )
    config = server_args.config_of(prepare("--config", str(file)))
    assert (config.policy, config.budget) == ("streaming", 300)


def test_engine_keywords(prepare, random_qwen3: Path) -> None:
    args = server_args.make_engine_args(
        model_path=str(random_qwen3), kv_policy="random", kv_budget=99, kv_policy_config={"seed": 3}
    )
    config = server_args.config_of(args)
    assert (config.policy, config.budget, config.options) == ("random", 99, {"seed": 3})
    with pytest.raises(ValueError, match="did you mean 'random'"):
        server_args.make_engine_args(model_path=str(random_qwen3), kv_policy="rondom")


def test_command_line_prints_one_sentence(random_qwen3: Path) -> None:
    result = launch_error("--kv-policy", "becon", model=random_qwen3)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: --kv-policy 'becon'")
    assert "Traceback" not in result.stderr


def test_unsupported_combination_prints_one_sentence(random_qwen3: Path) -> None:
    result = launch_error(
        "--skip-tokenizer-init", "--kv-policy", "beacon", "--enable-mixed-chunk", model=random_qwen3
    )
    assert result.returncode == 1
    assert "error: --kv-policy does not work with mixed chunks" in result.stderr
    assert "Traceback" not in result.stderr


def test_plugin_missing_in_the_scheduler(random_qwen3: Path, tmp_path: Path) -> None:
    """The launcher has the plugin, its child process has not: it must not serve."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import os, sys
            if "--multiprocessing-fork" in sys.orig_argv:
                os.environ["SGLANG_PLUGINS"] = "beacon_torch_cpu"
        """)
    )
    result = launch_error(
        "--skip-tokenizer-init", "--kv-policy", "beacon", "--max-total-tokens", "512",
        model=random_qwen3, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode != 0
    assert "a scheduler process does not run --kv-policy beacon" in result.stderr


def test_hooks_reach_our_functions(prepare) -> None:
    """Each target exists with the parameters used, and a call of it goes through our function."""
    from sglang_beacon.plugin import ALL_HOOKS, ENTRY_HOOKS

    everything = [hook for group in ALL_HOOKS.values() for hook in group]
    assert compat.problems(everything) == []
    compat.verify(ENTRY_HOOKS)
    late = [hook for hook in everything if hook not in ENTRY_HOOKS]
    compat.install(late)
    compat.verify(everything)


def test_a_changed_target_is_noticed() -> None:
    from sglang_beacon.plugin import POLICY_HOOKS

    hook = POLICY_HOOKS[0]
    gone = hook._replace(target="sglang.srt.managers.scheduler.Scheduler.no_such_method")
    renamed = hook._replace(parameters=("no_such_parameter",))
    assert "has no" in (compat.problem_of(gone.target, gone.parameters) or "")
    assert "no_such_parameter" in (compat.problem_of(renamed.target, renamed.parameters) or "")
    with pytest.raises(compat.IncompatibleError, match="was not installed"):
        compat.verify([hook._replace(function=lambda: None)])


def test_doctor(prepare, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It lists every hook, and its exit code says whether a server would start."""
    from sglang_beacon.plugin import ALL_HOOKS

    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    for group in ALL_HOOKS.values():
        for hook in group:
            assert hook.target.removeprefix("sglang.srt.") in output
    assert "would start" in output
    monkeypatch.setenv("SGLANG_PLUGINS", "something_else")
    assert cli.main(["doctor"]) == 1
    assert "refuse to start" in capsys.readouterr().out
    monkeypatch.delenv("SGLANG_PLUGINS")
    monkeypatch.setattr(compat, "SGLANG_VERSION", "0.0.0")
    assert cli.main(["doctor"]) == 1


def test_fields_are_there() -> None:
    assert [compat.missing_fields(target) for target in compat.FIELDS] == [None] * len(
        compat.FIELDS
    )
