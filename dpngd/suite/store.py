"""The result store: one record per run, under the key of its config.

    results/<profile>.jsonl        shipped records, one per line, read first
    .store/<profile>/<key>.json    records computed here (the root is DPNGD_STORE, where that is set)
    .store/<profile>/<key>.lock    held by the process that is computing the run
    .store/<profile>/<key>.ckpt/   the state of a long run that was interrupted, or is being computed

An entry is the record as plain JSON with a checksum of itself. Entries are written whole or not at all, so
a process may be killed at any moment; one that was damaged afterwards is named, counts as missing, and is set
aside as <key>.json.damaged when its run has been computed again. The lock is the kernel's: it is free as soon
as its process has ended, however it ended: an old lock file never has to be judged by its age.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import numbers
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dpngd.errors import UsageError
from dpngd.files import finite_or_none, write_atomically
from dpngd.suite import paths
from dpngd.training.config import RECORD_VERSION, RunConfig

STATUSES = ("ok", "diverged")
log = logging.getLogger("dpngd.store")


class Damaged(Exception):
    """An entry that cannot be trusted, and why."""


class Store:
    """The records of one profile. Cheap to make and to send away; several may share a folder."""

    def __init__(
        self,
        profile: str = "common",
        *,
        root: Path | str | None = None,
        results: Path | str | None = None,
        read_shipped: bool | None = None,
    ):
        """`root` and `results` replace .store/ and results/. With `read_shipped=False`, or DPNGD_REFRESH=1
        in the environment, shipped records are not read, so that they are computed again."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", profile):
            raise UsageError(f"profile {profile!r}: a name of lower-case letters, digits, - and _")
        if read_shipped is None:
            read_shipped = os.environ.get("DPNGD_REFRESH", "") in ("", "0")
        self.profile = profile
        self.read_shipped = read_shipped
        self.folder = Path(root or paths.STORE).absolute() / profile
        at = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        if not at.is_dir():
            raise UsageError(f"the store {self.folder} cannot be used: {at} is not a folder; set DPNGD_STORE to one")
        self.shipped_path = Path(results or paths.RESULTS).absolute() / f"{profile}.jsonl"
        self.damaged: dict[str, str] = {}  # what this process found damaged: place -> reason

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "shipped"}  # not worth sending

    @cached_property
    def shipped(self) -> dict[str, dict]:
        """The shipped records by key. A damaged line is named and skipped."""
        return self._read_shipped() if self.read_shipped else {}

    def _read_shipped(self) -> dict[str, dict]:
        records: dict[str, dict] = {}
        if not self.shipped_path.exists():
            return records
        # Not splitlines: it would also cut at separators that a JSON text may hold.
        text = self.shipped_path.read_text(encoding="utf-8", errors="replace")  # a bad byte damages its line only
        for number, line in enumerate(text.split("\n"), start=1):
            if not line:
                continue
            try:
                record = decode(line)
            except Damaged as error:
                self._report(f"{self.shipped_path.name} line {number}", str(error))
            else:
                records[record["key"]] = record
        return records

    def get(self, config: RunConfig) -> dict | None:
        """The record of a run, or None where there is none that can be trusted."""
        key = config.key()
        for place, record in ((self.shipped_path.name, self.shipped.get(key)), self._local(key)):
            if record is None:
                continue
            if record["config"] == config.canonical():
                return record
            self._report(place, f"the config of {key} is another run's")
        return None

    def _local(self, key: str) -> tuple[str, dict | None]:
        path = self.path(key)
        try:
            record = decode(path.read_text(encoding="utf-8", errors="replace"))
            if record["key"] != key:
                raise Damaged(f"it holds the record of {record['key']}")
        except FileNotFoundError:
            return path.name, None
        except Damaged as error:
            self._report(path.name, str(error))
            return path.name, None
        return path.name, record

    def put(self, config: RunConfig, record: Mapping[str, Any]) -> dict:
        """Store a run's record; returns it as it will be read. A damaged entry in its place is set aside."""
        key, canonical = config.key(), config.canonical()
        record = jsonable({"config": canonical, "key": key, **record}, "record")
        if (record["key"], record["config"]) != (key, canonical):
            raise UsageError(f"the record of {config.label()} carries the config of another run")
        if record.get("status") not in STATUSES:
            raise UsageError(f"record status {record.get('status')!r}: must be {' or '.join(STATUSES)}")
        path = self.path(key)
        if path.exists() and self._local(key)[1] is None:
            os.replace(path, path.with_name(path.name + ".damaged"))
        write_atomically(path, encode(record) + "\n")
        return record

    def find(self, key: str) -> dict | None:
        """The record under a key, the shipped one first, as `get` has it; None where there is none."""
        return self.shipped.get(key) or self._local(key)[1]

    def stamp(self, keys: Iterable[str]) -> str:
        """Which results the records of `keys` are, in words that follow from the records and not from the work tree.

        Shipped records: their file, the first digits of its SHA-256, and the commits that trained them. Others: how
        many, and their commits. Then the record version. Two drawings of the same records have the same stamp; without
        records it is empty."""
        keys = set(keys)
        parts = []
        if keys & self.shipped.keys():
            digest = hashlib.sha256(self.shipped_path.read_bytes()).hexdigest()[:10]
            parts.append(f"results/{self.shipped_path.name} {digest} trained at {_commits(self.shipped.values())}")
        here = [record for key in keys - self.shipped.keys() if (record := self._local(key)[1])]
        if here:
            parts.append(f"{len(here)} runs trained here at {_commits(here)}")
        return f"{' and '.join(parts)}, record version {RECORD_VERSION}" if parts else ""

    def path(self, key: str) -> Path:
        """Where the record of a run computed here lies."""
        return self.folder / f"{key}.json"

    def checkpoint(self, key: str) -> Path:
        """The folder for the checkpoint of a run that is being computed here."""
        return self.folder / f"{key}.ckpt"

    def records(self) -> list[dict]:
        """Every record there is, one computed here before a shipped one, sorted by config (never by time)."""
        found = self._read_shipped()
        for path in self.folder.glob("*.json"):
            record = self._local(path.stem)[1]
            if record is not None:
                found[record["key"]] = record
        return sorted(found.values(), key=_order)

    def export(self, keys: Iterable[str] | None = None) -> Path:
        """Write results/<profile>.jsonl: all records, or those of `keys`, sorted so that diffs stay small."""
        wanted = None if keys is None else set(keys)
        lines = [encode(r) for r in self.records() if wanted is None or r["key"] in wanted]
        write_atomically(self.shipped_path, "".join(line + "\n" for line in lines))
        self.__dict__.pop("shipped", None)
        return self.shipped_path

    def clear(self, keys: Iterable[str] | None = None) -> int:
        """Forget the records computed here (not the shipped ones) of these runs, or of all, and what of them is half
        done; how many records there were. A record is kept as <key>.json.before. A run that a process is computing
        stays as it is."""
        names = {p.name.partition(".")[0] for p in (*self.folder.glob("*.json"), *self.folder.glob("*.ckpt"))}
        count = 0
        for key in names if keys is None else names & set(keys):
            with self.claim(key) as mine:
                if mine:
                    shutil.rmtree(self.checkpoint(key), ignore_errors=True)
                    if self.path(key).exists():
                        os.replace(self.path(key), self.path(key).with_name(f"{key}.json.before"))
                        count += 1
        return count

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Hold the right to compute a run: True inside the block, or False where another process has it."""
        handle = self._lock(key)
        try:
            yield handle is not None
        finally:
            if handle is not None:
                # Removed while held, so that a process that has opened it finds out in `_lock` that it is gone.
                self._lock_path(key).unlink(missing_ok=True)
                os.close(handle)

    def claimed(self, key: str) -> bool:
        """Whether some process is computing the run now."""
        if not self._lock_path(key).exists():
            return False
        with self.claim(key) as mine:
            return not mine

    def _lock_path(self, key: str) -> Path:
        return self.folder / f"{key}.lock"

    def _lock(self, key: str) -> int | None:
        """An open, locked handle of the lock file, or None where another process holds it."""
        path = self._lock_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                if error.errno == errno.ELOOP:  # it would be emptied, wherever it points
                    raise UsageError(f"{path} is a symbolic link, not a lock: remove it") from None
                raise
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_ino == os.fstat(handle).st_ino:
                    os.truncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())  # for people who wonder; nothing reads it
                    return handle
            except BlockingIOError:
                os.close(handle)
                return None
            except FileNotFoundError:
                pass  # its holder removed it between our open and our lock: once more
            except OSError:  # a full disk
                os.close(handle)
                raise
            os.close(handle)

    def prepare(self) -> None:
        """Make the folder, or a UsageError where nothing can be written there: before a sweep, not once per run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(2**16))  # a full disk still takes an empty file
        except OSError as error:
            raise UsageError(f"the store {self.folder} cannot be written to ({error.strerror}): set DPNGD_STORE to a "
                             "folder that can") from None

    def tidy(self, older_than: float = 3600.0) -> None:
        """Remove the unfinished temporary files of processes that were killed."""
        for path in self.folder.glob(".tmp-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > older_than:
                    path.unlink()

    def _report(self, place: str, reason: str) -> None:
        if place not in self.damaged:
            log.warning("damaged entry %s: %s; its run counts as missing", place, reason)
        self.damaged[place] = reason


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON: the record and the checksum of the rest of the line."""
    body = {k: v for k, v in record.items() if k != "checksum"}
    return _json({**body, "checksum": _checksum(body)})


def decode(line: str) -> dict:
    """The record in a line, without its checksum; raises Damaged."""
    try:
        record = json.loads(line)
        checksum = record.pop("checksum")
        complete = isinstance(record["key"], str) and isinstance(record["config"], dict)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("not a whole record") from None
    if not complete or record.get("status") not in STATUSES:
        raise Damaged("key, config or status is wrong")
    try:
        whole = _is_of_text(checksum, line) or checksum == _checksum(record)
    except ValueError:  # NaN or half a character, which `encode` never writes
        whole = False
    if not whole:
        raise Damaged("its checksum differs")
    return record


def _is_of_text(checksum: Any, line: str) -> bool:
    """Whether it is the checksum of the rest of the line as it is written. Most are `encode`'s own, and then the record
    need not be written out again, which takes longer than reading it."""
    entry = f'"checksum": "{checksum}", '
    head, found, tail = line.strip().partition(entry)
    return bool(found) and hashlib.sha256((head + tail).encode()).hexdigest()[:16] == checksum


def jsonable(value: Any, where: str) -> Any:
    """A value as JSON can hold it: numpy scalars become numbers, tuples lists, NaN and infinities None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(k): jsonable(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return finite_or_none(float(value))
    raise UsageError(f"{where} is a {type(value).__name__}, which no record can hold")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_json(body).encode()).hexdigest()[:16]


def _commits(records: Iterable[Mapping[str, Any]]) -> str:
    """The commits that trained these records, or how many where they would fill a line."""
    found = sorted({record.get("where", {}).get("commit", "unknown") for record in records})
    return ", ".join(found) if len(found) <= 4 else f"{len(found)} commits"


def _order(record: dict) -> tuple:
    config = record["config"]
    return (*(config.get(name, 0) for name in ("data", "method", "epsilon", "T", "seed")), record["key"])
