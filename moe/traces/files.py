"""Opens a file or folder by what it holds, not by its name; never a foreign traceback.

kind      what `content` is
npz       {name: array}
npy       array
torch     {file name: object}; a folder of .pt files has several
json      object
jsonl     {file name: list of dictionaries, a line each}
csv       {file name: list of rows of text}
esft      {file name: bytes} of one folder, plain or inside an archive
trtllm    the folder itself (its files are opened by the reader, safetensors is optional)
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe.traces.rules import TraceError

ESFT_PREFIX = "expert_weights_"
DIGITS = "0123456789"
FOREIGN = (
    OSError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,  # json.JSONDecodeError and UnicodeDecodeError among them
    AttributeError,
    OverflowError,
    RuntimeError,
    MemoryError,
    pickle.UnpicklingError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    csv.Error,
)


@dataclass(frozen=True)
class Opened:
    """path: as the user gave it; kind, content: see the table on top of this file"""

    path: Path
    kind: str
    content: Any


@contextmanager
def one_line_errors(path: Path | str, what: str) -> Iterator[None]:
    """Turn whatever a library raises into one line that names the file."""
    try:
        yield
    except TraceError:
        raise
    except FOREIGN as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, KeyError):
            text = f"{error} is missing"
        raise TraceError(f"{path}: cannot be read as {what}: {text[:200]}") from error


def open_any(path: str | Path) -> Opened:
    """Find out what a path is and load it. Raises TraceError."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _open_folder(path)
    archive, member = _split_archive(path)
    if member and archive.is_file():
        return Opened(path, "esft", _archive(archive, member))
    if not path.is_file():
        raise TraceError(f"{path}: there is no such file or folder")
    with one_line_errors(path, "a file"):
        head = _head(path)
    if not head:
        raise TraceError(f"{path}: is empty")
    if head.startswith(b"\xfd7zXZ\x00"):
        return _open_xz(path)
    if head.startswith(b"\x93NUMPY"):
        return Opened(path, "npy", _npy(path, path))
    if head.startswith(b"PK\x03\x04"):
        return _open_zip(path)
    if head.startswith(b"\x80"):  # a bare pickle, as torch before 1.6 wrote
        return Opened(path, "torch", {path.name: load_torch(path)})
    return _open_text(path)


def load_torch(path: Path) -> Any:
    """A torch.save file, tensors and plain values only: nothing in it is run."""
    import torch

    with one_line_errors(path, "a torch file of tensors and plain values"):
        return torch.load(path, map_location="cpu", weights_only=True)


def load_json(path: Path) -> Any:
    with one_line_errors(path, "JSON"):
        return json.loads(path.read_text(encoding="utf-8"))


def load_safetensors(path: Path) -> Mapping[str, np.ndarray]:
    """{key: array}. Raises TraceError, with the command where the package is missing."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError:
        raise TraceError(
            f"{path}: needs the package safetensors: pip install 'wideep[traces]'"
        ) from None
    with one_line_errors(path, "safetensors"):
        try:
            return load_file(path)
        except SafetensorError as error:  # derives from Exception alone
            raise TraceError(f"{path}: cannot be read as safetensors: {error}") from error


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(512)


def _npy(path: Path, file: Any) -> np.ndarray:
    with one_line_errors(path, "a numpy array"):
        return np.load(file, allow_pickle=False)


def _open_zip(path: Path) -> Opened:
    """numpy's .npz and torch's .pt are both zip files."""
    with one_line_errors(path, "a .npz or .pt file"):
        with zipfile.ZipFile(path) as bundle:
            names = bundle.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return Opened(path, "torch", {path.name: load_torch(path)})
        if not any(name.endswith(".npy") for name in names):
            raise TraceError(f"{path}: is a zip file without arrays; give a .npz or .pt file")
        with np.load(path, allow_pickle=False) as saved:
            return Opened(path, "npz", {name: saved[name] for name in saved.files})


def _open_xz(path: Path) -> Opened:
    """An .npy.xz, or a .tar.xz with one folder a task."""
    with one_line_errors(path, "xz"), lzma.open(path) as file:
        magic = file.read(6)
        if magic == b"\x93NUMPY":
            file.seek(0)
            return Opened(path, "npy", _npy(path, io.BytesIO(file.read())))
    return Opened(path, "esft", _archive(path, ""))


def _open_text(path: Path) -> Opened:
    with one_line_errors(path, "text"):
        text = path.read_text(encoding="utf-8")
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        with one_line_errors(path, "CSV"):
            return Opened(path, "csv", {path.name: list(csv.reader(io.StringIO(text)))})
    if path.suffix == ".jsonl":  # one line alone would pass for JSON
        return Opened(path, "jsonl", {path.name: _lines(path, text)})
    try:
        return Opened(path, "json", json.loads(text))
    except (ValueError, RecursionError):
        if start == "[" or "\n" not in text.strip():
            with one_line_errors(path, "JSON"):
                json.loads(text)
    return Opened(path, "jsonl", {path.name: _lines(path, text)})


def _lines(path: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(
                f"{path}: line {number} is no JSON ({error}); a file cut off while it was written"
                " reads once that line is removed"
            ) from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}: line {number} must be an object, not {type(row).__name__}")
        rows.append(row)
    return rows


def _open_folder(path: Path) -> Opened:
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if (path / "meta_info.json").is_file():
        return Opened(path, "trtllm", path)
    if any(name.startswith(ESFT_PREFIX) for name in names):
        with one_line_errors(path, "an ESFT folder"):
            wanted = [name for name in names if _is_esft(name)]
            return Opened(path, "esft", {name: (path / name).read_bytes() for name in wanted})
    if (path / "routing.npz").is_file():
        return open_any(path / "routing.npz")
    for suffix, kind in ((".pt", "torch"), (".jsonl", "jsonl"), (".csv", "csv")):
        files = [path / name for name in names if name.endswith(suffix)]
        if files:
            return Opened(path, kind, _contents(files, kind))
    inside = ", ".join(names[:5]) or "nothing"
    raise TraceError(
        f"{path}: is a folder without a trace (it holds {inside}); give the file, a folder with"
        " meta_info.json, expert_weights_<layer>.txt or routing.npz, or one of .pt, .jsonl or .csv"
        " files"
    )


def _contents(files: list[Path], kind: str) -> dict[str, Any]:
    """One entry a file, in the order of the numbers in their names (rank 2 before rank 10)."""
    load: Callable[[Path], Any] = load_torch if kind == "torch" else _one_text(kind)
    return {file.name: load(file) for file in sorted(files, key=lambda file: by_number(file.name))}


def _one_text(kind: str) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        with one_line_errors(path, kind):
            text = path.read_text(encoding="utf-8")
            return _lines(path, text) if kind == "jsonl" else list(csv.reader(io.StringIO(text)))

    return load


def by_number(name: str) -> tuple[Any, ...]:
    """A sort key that has a2 before a10."""
    parts: list[Any] = [""]
    for char in name:
        if (char in DIGITS) != isinstance(parts[-1], int):
            parts.append(0 if (char in DIGITS) else "")
        parts[-1] = parts[-1] * 10 + int(char) if (char in DIGITS) else parts[-1] + char
    return tuple(parts)


def _is_esft(name: str) -> bool:
    return name == "summary.json" or (name.startswith(ESFT_PREFIX) and name.endswith(".txt"))


def _split_archive(path: Path) -> tuple[Path, str]:
    """(x.tar.xz, "law") for x.tar.xz/law; no member where the archive stands alone."""
    for parent in path.parents:
        if ".tar" in parent.name and parent.is_file():
            return parent, path.relative_to(parent).as_posix()
    return path, ""


def _archive(path: Path, member: str) -> dict[str, bytes]:
    """The ESFT files of one folder of an archive, named by its last part."""
    folders: dict[str, dict[str, bytes]] = {}
    with one_line_errors(path, "a tar archive"), tarfile.open(path, "r:*") as bundle:
        for entry in bundle:
            folder, _, name = entry.name.rpartition("/")
            if entry.isfile() and _is_esft(name):
                within = folder == member or folder.endswith(f"/{member}") or not member
                data = bundle.extractfile(entry) if within else None
                folders.setdefault(folder, {})[name] = data.read() if data else b""
    matches = [f for f in folders if not member or f == member or f.endswith(f"/{member}")]
    if len(matches) == 1:
        return folders[matches[0]]
    tasks = ", ".join(sorted(f.rpartition("/")[2] for f in folders)) or "none"
    what = f"{member!r} is none of" if member else "say which of"
    raise TraceError(
        f"{path}: {what} its folders {tasks}; write {path}/<folder>"
        if folders
        else f"{path}: holds no expert_weights_<layer>.txt"
    )
