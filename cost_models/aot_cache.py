"""Compilations kept on disk, so that the same program is compiled for the same target once."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from autoshard.cost_models.calibration import calibration_path

MAX_BYTES = 2**29
"""What the folder may hold [bytes]; those used longest ago go first."""

_SUFFIX = ".aot.gz"


def cache_folder() -> Path:
    """Where compilations are kept: ``autoshard/aot`` in the user's cache folder."""
    return calibration_path().parent / "aot"


def key_of(*parts: bytes) -> str:
    """A name for what is determined by ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def load(folder: Path, key: str) -> Any:
    """What was kept under ``key``; None if nothing was, or it is damaged."""
    path = folder / f"{key}{_SUFFIX}"
    try:
        checksum, _, body = gzip.decompress(path.read_bytes()).partition(b"\n")
    except (OSError, EOFError, zlib.error):
        return None
    if checksum.decode(errors="replace") != key_of(key.encode(), body):
        return None
    with suppress(OSError):
        os.utime(path)
    return json.loads(body)


def save(folder: Path, key: str, value: Any) -> None:
    """Keep ``value``, whole or not at all; a folder that cannot be written to keeps nothing."""
    body = json.dumps(value).encode()
    data = gzip.compress(key_of(key.encode(), body).encode() + b"\n" + body, compresslevel=6)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            file.write(data)
        Path(file.name).replace(folder / f"{key}{_SUFFIX}")
        _shrink(folder)


def _shrink(folder: Path) -> None:
    """Remove what was used longest ago until the folder holds no more than it may."""
    kept = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):  # another process may have removed it
            kept.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= MAX_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size
