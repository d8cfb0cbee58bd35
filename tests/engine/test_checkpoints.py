"""A checkpoint is whole or absent, its owner's alone, and refused where it is not what was saved."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pdpsgd.engine import checkpoints
from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.source import name_of_key

KEY = bytes(range(32))
TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(7)}
STATE = {"step": 7, "plan": "0123abcd", "rates": [0.1, 1e-300]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.checkpoint"
    checkpoints.save(path, TENSORS, STATE, KEY)
    return path


def assert_is_as_saved(path: Path, key: bytes | None = KEY) -> None:
    loaded = checkpoints.load(path)
    assert loaded.state == STATE
    assert loaded.key == key
    assert set(loaded.tensors) == set(TENSORS)
    assert all(torch.equal(loaded.tensors[name], TENSORS[name]) for name in TENSORS)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_was_saved_is_loaded(path: Path) -> None:
    assert_is_as_saved(path)


def test_tensors_of_all_kinds_come_back_bit_for_bit(tmp_path: Path) -> None:
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    tensors = {
        "tied a": weight,
        "tied b": weight,
        "permuted": weight.t(),
        "a part": weight[1:3, ::2],
        "bfloat16": weight.bfloat16(),
        "double": weight.double() / 3,
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3, dtype=torch.int64),
        "needs gradients": torch.nn.Parameter(weight),
    }
    checkpoints.save(tmp_path / "c", tensors, {}, None)
    loaded = checkpoints.load(tmp_path / "c").tensors
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        same = torch.equal(loaded[name].nan_to_num(9.0), tensor.detach().nan_to_num(9.0))
        assert same, name
        loaded[name].add_(1) if tensor.is_floating_point() else None  # a run goes on from it in place


def test_state_comes_back_with_its_types(tmp_path: Path) -> None:
    state = {
        "tuple": (1, (2.0, None)),
        "infinite": -float("inf"),
        "keys": {1: "a", "$tuple": [2]},
        "yes": True,
    }
    checkpoints.save(tmp_path / "c", {}, state, None)
    assert checkpoints.load(tmp_path / "c").state == state


def test_keys_and_states_that_look_like_a_checksum_do_no_harm(tmp_path: Path) -> None:
    state = {"text": '"checksum":"' + "0" * 64 + '"', "checksum": "0" * 64}
    for _ in range(20):  # the order of a header's entries is not always the same
        checkpoints.save(tmp_path / "c", {"checksum": torch.ones(1)}, state, bytes(32))
        loaded = checkpoints.load(tmp_path / "c")
        assert loaded.state == state
        assert loaded.key == bytes(32)


def test_a_checkpoint_is_an_ordinary_safetensors_file(path: Path) -> None:
    assert torch.equal(safetensors.torch.load_file(path)["weight"], TENSORS["weight"])


def test_only_its_owner_can_read_it_whatever_the_umask_and_the_file_before(path: Path) -> None:
    path.chmod(0o666)
    before = os.umask(0)
    try:
        checkpoints.save(path, TENSORS, STATE, KEY)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_erased_key_is_nowhere_in_the_file_and_the_rest_is_kept(path: Path) -> None:
    assert KEY.hex().encode() in path.read_bytes()
    checkpoints.erase_key(path)
    assert_is_as_saved(path, key=None)
    assert KEY.hex().encode() not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_on_a_full_disk_the_key_is_erased_where_it_stands(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_replace", full)
    checkpoints.erase_key(path)
    assert_is_as_saved(path, key=None)
    assert KEY.hex().encode() not in path.read_bytes()


def test_another_runs_key_is_left_alone(path: Path) -> None:
    checkpoints.erase_key(path, only=name_of_key(bytes(32)))
    assert_is_as_saved(path)
    checkpoints.erase_key(path, only=name_of_key(KEY))
    assert_is_as_saved(path, key=None)


def test_the_replaced_file_loses_its_key_on_the_disk_too(path: Path) -> None:
    with path.open("rb") as old:
        checkpoints.erase_key(path)
        assert KEY.hex().encode() not in old.read()


def test_the_replaced_file_is_whole_until_the_new_name_is_on_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until then a power failure can bring the old file back under its name.
    with path.open("rb") as old:
        before = old.read()

        def unsure(folder: Path) -> bool:
            old.seek(0)
            assert old.read() == before
            return False

        monkeypatch.setattr(checkpoints, "_force_to_disk", unsure)
        save_other(path)
        old.seek(0)
        assert old.read() == before


def test_a_copy_under_another_name_is_left_alone(path: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").hardlink_to(path)
    checkpoints.erase_key(path)
    assert checkpoints.load(tmp_path / "kept").key == KEY


def test_the_key_is_not_shown(path: Path) -> None:
    assert KEY.hex() not in repr(checkpoints.load(path))
    assert str(KEY) not in repr(checkpoints.load(path))


# --- damage ------------------------------------------------------------------------------------------------


def test_a_change_of_any_byte_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for place in range(len(content)):
        for change in (0x01, 0x80):
            damaged = bytearray(content)
            damaged[place] ^= change
            path.write_bytes(damaged)
            with pytest.raises(PdpsgdError, match=r"run\.checkpoint"):
                checkpoints.load(path)


def test_a_file_cut_off_anywhere_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(PdpsgdError, match=r"run\.checkpoint"):
            checkpoints.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(PdpsgdError, match="checksum does not fit"):
        checkpoints.load(path)


def test_a_model_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(PdpsgdError, match=r"Expected a checkpoint of pdpsgd at .*model\.safetensors"):
        checkpoints.load(tmp_path / "model.safetensors")


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.pt")
    with pytest.raises(PdpsgdError, match="Expected a checkpoint of pdpsgd"):
        checkpoints.load(tmp_path / "model.pt")


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "VERSION", 2)
    checkpoints.save(tmp_path / "c", TENSORS, STATE, KEY)
    monkeypatch.undo()
    with pytest.raises(PdpsgdError, match=r"checkpoint of version 1 at .* Got version 2"):
        checkpoints.load(tmp_path / "c")


def test_a_file_of_another_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum fits, and its version is a number that this one has, too."""
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "FORMAT", "somebody else's")
        checkpoints.save(path, TENSORS, STATE, KEY)
    with pytest.raises(PdpsgdError, match=r"Expected format 'pdpsgd[^']*' at .* Got \"somebody else's\""):
        checkpoints.load(path)
    checkpoints.save(path, TENSORS, STATE, KEY)
    assert_is_as_saved(path)


def test_tensors_that_are_cut_off_are_refused_though_the_checksum_fits(path: Path) -> None:
    header, body = checkpoints._split(path.read_bytes())
    checksum = json.loads(header[8:])["__metadata__"]["checksum"]
    blank, rest = checkpoints._with_checksum(header, checksum, checkpoints._NO_CHECKSUM), body[:-8]
    fitting = checkpoints._checksum(blank, rest)
    path.write_bytes(checkpoints._with_checksum(blank, checkpoints._NO_CHECKSUM, fitting) + rest)
    with pytest.raises(PdpsgdError, match=r"Expected tensors in the checkpoint .* Got something else"):
        checkpoints.load(path)


@pytest.mark.parametrize("length", [31, 33])
def test_a_key_of_another_length_is_refused(path: Path, length: int) -> None:
    checkpoints.save(path, TENSORS, STATE, bytes(length))
    with pytest.raises(PdpsgdError, match=r"Expected a key of 32 bytes in the checkpoint .* Got another one"):
        checkpoints.load(path)
    checkpoints.save(path, TENSORS, STATE, bytes(32))
    assert checkpoints.load(path).key == bytes(32)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for place, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(PdpsgdError, match=f"Expected a checkpoint at .* Got: {reason}"):
            checkpoints.load(place)


# --- what goes wrong while saving --------------------------------------------------------------------------


def save_other(path: Path) -> None:
    checkpoints.save(path, {"weight": torch.ones(10_000)}, {"step": 8}, KEY)


def test_a_full_disk_loses_nothing(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(PdpsgdError, match=r"File too large .* The checkpoint saved before is untouched"):
            save_other(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_is_as_saved(path)


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failure_at_any_point_loses_nothing(path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(PdpsgdError, match=r"No space left on device .*saved before is untouched"):
        save_other(path)
    monkeypatch.undo()
    assert_is_as_saved(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for the superuser")
def test_an_unwritable_folder_loses_nothing(path: Path) -> None:
    path.parent.chmod(0o500)
    try:
        with pytest.raises(PdpsgdError, match=r"Permission denied .*saved before is untouched"):
            save_other(path)
        assert_is_as_saved(path)
    finally:
        path.parent.chmod(0o700)


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match=r"No such file or directory .* There was none before"):
        save_other(tmp_path / "missing" / "c")


def test_state_that_cannot_be_saved_is_named_and_loses_nothing(path: Path) -> None:
    with pytest.raises(PdpsgdError, match=r"Expected state\.things\.1 to be a number.*Got set"):
        checkpoints.save(path, {}, {"things": [1, {2}]}, None)
    assert_is_as_saved(path)


# Saves for ever in a child, which is killed: at a chosen system call, or at a random moment. The parent then
# reads the file, and reports what it found. Version k has all weights k.
KILLED = """
import json, os, random, signal, sys, time
import torch
from pdpsgd.engine import checkpoints

path, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
torch.set_num_threads(1)

def save(version):
    tensors = {"weight": torch.full((50_000,), float(version))}
    checkpoints.save(path, tensors, {"version": version}, bytes(32))

def kill_at(name, after):
    original = getattr(os, name)
    def call(*arguments, **options):
        if after:
            original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, call)

save(0)
version, found = 0, []
points = [(name, after) for name in ("open", "fsync", "replace") for after in (False, True)]
for point in points + [None] * 40:
    child = os.fork()
    if child == 0:
        if point:
            kill_at(*point)
        while True:
            version += 1
            save(version)
    if point is None:
        time.sleep(random.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    loaded = checkpoints.load(path)
    weight = loaded.tensors["weight"]
    found.append([version, loaded.state["version"], bool((weight == loaded.state["version"]).all())])
    version = loaded.state["version"]
save(version + 1)
left = [name for name in os.listdir(os.path.dirname(path)) if name.endswith(".partial")]
print(json.dumps({"found": found, "left": left}))
"""


def test_killed_at_any_moment_a_run_leaves_the_old_file_or_the_new_one_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "c"), "1"], check=True, capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert len(report["found"]) == 46
    for before, after, whole in report["found"]:
        assert after >= before
        assert whole
    # At the chosen points: the old file up to the renaming, the new one from then on.
    assert [after - before for before, after, _ in report["found"][:6]] == [0, 0, 0, 0, 0, 1]
    assert report["left"] == []
