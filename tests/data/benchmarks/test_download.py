from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from pdpsgd.data.benchmarks.download import download
from pdpsgd.errors import PdpsgdError

CONTENT = bytes(range(256)) * 2000
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def address(server) -> str:
    server.files["/data.bin"] = CONTENT
    return server.address + "data.bin"


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "data.bin"


def part_of(destination: Path) -> Path:
    return destination.with_name("data.bin.part")


def test_a_file_arrives_complete_and_leaves_no_part(address, destination) -> None:
    seen = []
    download([address], destination, md5=MD5, report=lambda done, total: seen.append((done, total)))
    assert destination.read_bytes() == CONTENT
    assert not part_of(destination).exists()
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_broken_connection_is_resumed_where_it_broke(server, address, destination) -> None:
    server.break_after += [100_000, 50_000]
    download([address], destination, md5=MD5)
    assert destination.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_download_given_up_is_continued_by_the_next_one(server, address, destination) -> None:
    server.break_after += [70_000, 0, 0, 0]
    with pytest.raises(PdpsgdError, match=r"70,000 of 512,000 bytes.*70,000 bytes that arrived are kept"):
        download([address], destination, md5=MD5)
    assert not destination.exists()
    assert part_of(destination).read_bytes() == CONTENT[:70_000]
    download([address], destination, md5=MD5)
    assert destination.read_bytes() == CONTENT
    assert server.requests[-1] == ("/data.bin", "bytes=70000-")


def test_a_server_that_cannot_resume_sends_everything_again(server, address, destination) -> None:
    server.ranges = False
    server.break_after += [100_000]
    download([address], destination, md5=MD5)
    assert destination.read_bytes() == CONTENT


def test_a_complete_part_is_only_checked(server, address, destination) -> None:
    destination.parent.mkdir()
    part_of(destination).write_bytes(CONTENT)
    download([address], destination, md5=MD5)
    assert destination.read_bytes() == CONTENT
    assert server.requests == [("/data.bin", "bytes=512000-")]


@pytest.mark.parametrize("stale", [b"of an older version" * 10, CONTENT + b"too long"])
def test_a_part_of_something_else_is_fetched_afresh(stale: bytes, address, destination) -> None:
    destination.parent.mkdir()
    part_of(destination).write_bytes(stale)
    download([address], destination, md5=MD5)
    assert destination.read_bytes() == CONTENT


def test_a_file_with_the_wrong_checksum_never_gets_its_name(address, destination) -> None:
    with pytest.raises(PdpsgdError, match=rf"what arrived has md5 {MD5}, not the published 0000"):
        download([address], destination, md5="0000")
    assert list(destination.parent.iterdir()) == []


def test_a_file_that_is_already_there_survives_a_failed_download(address, destination) -> None:
    destination.parent.mkdir()
    destination.write_bytes(b"before")
    with pytest.raises(PdpsgdError):
        download([address], destination, md5="0000")
    assert destination.read_bytes() == b"before"


def test_an_address_that_is_gone_is_named_and_the_next_one_tried(server, address, destination) -> None:
    download([server.address + "gone", address], destination, md5=MD5)
    assert destination.read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/gone", "/data.bin"]


def test_when_all_addresses_fail_each_is_named_with_its_reason(server, destination) -> None:
    with pytest.raises(PdpsgdError, match=r"/gone: the server answered 404.*nowhere:.*put it into"):
        download([server.address + "gone", "http://127.0.0.1:1/nowhere"], destination, md5=MD5)
    assert list(destination.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(address, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(PdpsgdError, match=r"Could not write .*file.*Choose another data folder"):
        download([address], tmp_path / "file" / "data.bin", md5=MD5)


@pytest.mark.skipif(sys.platform == "win32", reason="no advisory locks")
def test_two_downloads_of_one_file_do_not_mix(address, destination) -> None:
    import fcntl

    destination.parent.mkdir()
    with part_of(destination).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PdpsgdError, match="by another process"):
            download([address], destination, md5=MD5)
