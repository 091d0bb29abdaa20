"""The result store and its files among processes that race, die, and read while others write."""

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
from store_runs import RECORD, config, fresh

from dpngd.errors import UsageError
from dpngd.suite.store import Store


@pytest.fixture
def store(tmp_path):
    return Store("quick", root=tmp_path / "store", results=tmp_path / "results")


def test_a_claim_excludes_others_and_ends_with_its_block(store):
    with store.claim("k") as mine:
        assert mine
        assert store.claimed("k")
        with fresh(store).claim("k") as second:
            assert not second
        assert store.claimed("k"), "a failed claim must not free the one that holds"
        with store.claim("other") as other:
            assert other
    assert not store.claimed("k")
    assert not list(store.folder.glob("*.lock"))


@pytest.mark.parametrize("taken", [True, False])
def test_a_lock_file_that_was_removed_in_the_meantime_is_no_lock(store, monkeypatch, taken):
    """Its holder removes it between our open and our lock; then another process may make and lock a new one."""
    path, flock, others = store.folder / "k.lock", fcntl.flock, []

    def removed_first(handle, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        if taken:
            others.append(os.open(path, os.O_RDWR | os.O_CREAT))
            flock(others[0], fcntl.LOCK_EX)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with store.claim("k") as mine:
        assert mine is not taken
        assert path.exists(), "what is held must be seen by others"
    for handle in others:
        os.close(handle)


HOLD = """
import sys, time
from dpngd.errors import UsageError
from dpngd.suite.store import Store
with Store("quick", root=sys.argv[1]).claim("k") as mine:
    print(mine, flush=True)
    time.sleep(3600)
"""


def test_a_lock_that_is_a_symbolic_link_is_refused(store, tmp_path):
    """It would be followed, and the file behind it emptied."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    path = store._lock_path("abc")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim)
    with pytest.raises(UsageError, match="is a symbolic link, not a lock: remove it"), store.claim("abc"):
        pass
    assert victim.read_text() == "kept"


def test_the_claim_of_a_killed_process_is_free(store):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, store.folder.parent], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "True\n"
        assert store.claimed("k")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with store.claim("k") as mine:
        assert mine


RACE = """
import os, sys
from dpngd.errors import UsageError
from dpngd.suite.store import Store
store, out = Store("quick", root=sys.argv[1]), sys.argv[2]
for i in range(int(sys.argv[3])):
    for n in range(200):
        with store.claim(f"k{i}") as mine:
            if mine:
                try:
                    handle = os.open(f"{out}/{i}", os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    sys.exit("two processes hold one claim")
                os.close(handle)
                os.unlink(f"{out}/{i}")
"""


def test_two_processes_never_hold_one_claim(store, tmp_path):
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, "-c", RACE, store.folder.parent, tmp_path / "out", "3"]
    racers = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for racer in racers:
        assert racer.communicate()[1] == ""
        assert racer.returncode == 0


WRITE = """
import sys
from dpngd.training.config import RunConfig
from dpngd.errors import UsageError
from dpngd.suite.store import Store
store = Store("quick", root=sys.argv[1])
config = RunConfig.from_dict({config!r})
print("ready", flush=True)
while True:
    store.put(config, {{"status": "ok", "numbers": [float(sys.argv[2])] * 20000}})
"""


def test_readers_never_see_half_an_entry_even_when_writers_are_killed(store):
    code = WRITE.format(config=config().canonical())
    writers = [
        subprocess.Popen([sys.executable, "-c", code, store.folder.parent, str(i)], stdout=subprocess.PIPE)
        for i in range(2)
    ]
    try:
        for writer in writers:
            writer.stdout.readline()
        seen, reads, deadline = set(), 0, time.monotonic() + 300
        while (len(seen) < 2 or reads < 60) and time.monotonic() < deadline:  # each writer's entry, and many reads
            record = store.get(config())
            if record is not None:
                reads += 1
                seen.add(tuple(set(record["numbers"])))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    assert seen == {(0.0,), (1.0,)}
    assert store.damaged == {}
    assert store.get(config()) is not None
    leftovers = list(store.folder.glob(".tmp-*"))
    store.tidy(older_than=3600)
    assert list(store.folder.glob(".tmp-*")) == leftovers, "young files may belong to a living process"
    store.tidy(older_than=-1)
    assert not list(store.folder.glob(".tmp-*"))


def test_a_store_can_be_sent_to_another_process_without_its_records(store):
    store.put(config(), RECORD)
    store.export()
    assert store.get(config()) is not None
    sent = pickle.dumps(store)
    assert b"accuracy" not in sent
    assert pickle.loads(sent).get(config()) == store.get(config())
