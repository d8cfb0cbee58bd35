from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdpsgd.data.images import load_folder, load_npz
from pdpsgd.errors import PdpsgdError

PIXELS = np.arange(5 * 4 * 6, dtype=np.uint8).reshape(5, 4, 6)
TARGETS = np.array([0, 1, 2, 1, 0])


def npz(folder: Path, **arrays: object) -> Path:
    path = folder / "pictures.npz"
    np.savez(path, **arrays)
    return path


def test_pixels_are_scaled_by_fixed_numbers(tmp_path: Path) -> None:
    data = load_npz(npz(tmp_path, inputs=PIXELS, targets=TARGETS))
    assert data.inputs.shape == (5, 1, 4, 6)
    assert data.inputs.dtype == torch.float32
    np.testing.assert_allclose(data.inputs[:, 0].numpy(), PIXELS / 127.5 - 1, atol=1e-6)
    assert data.targets.tolist() == TARGETS.tolist()
    assert data.ids.tolist() == [0, 1, 2, 3, 4]


def test_other_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    values = np.linspace(-3, 7, 10).reshape(5, 2)
    data = load_npz(npz(tmp_path, inputs=values, targets=TARGETS))
    np.testing.assert_allclose(data.inputs.numpy(), values.astype(np.float32))


@pytest.mark.parametrize("shape", [(5, 3, 8, 9), (5, 8, 9, 3)])
def test_channels_may_come_first_or_last(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.zeros(shape)
    data = load_npz(npz(tmp_path, inputs=values, targets=TARGETS))
    assert data.inputs.shape == (5, 3, 8, 9)


def test_ids_classes_and_test_people_are_taken_from_the_file(tmp_path: Path) -> None:
    path = npz(
        tmp_path,
        inputs=PIXELS,
        targets=TARGETS[:, None],
        ids=np.array(list("abcde")),
        classes=np.array(["cat", "dog", "owl", "fox"]),
        test_inputs=PIXELS[:2],
        test_targets=TARGETS[:2],
    )
    data = load_npz(path)
    assert data.ids.tolist() == list("abcde")
    assert data.classes == ("cat", "dog", "owl", "fox")
    assert data.test_inputs is not None
    assert data.test_inputs.shape == (2, 1, 4, 6)
    assert data.notes == ()


def test_a_number_of_classes_read_from_the_data_is_said(tmp_path: Path) -> None:
    data = load_npz(npz(tmp_path, inputs=PIXELS, targets=TARGETS))
    assert data.classes == ("0", "1", "2")
    assert "read from the targets" in data.notes[0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": PIXELS}, r"array 'targets' in .*pictures.npz. Its arrays are 'inputs'"),
        ({"inputs": np.zeros(5), "targets": TARGETS}, r"people first, in inputs .*float64 \(5,\)"),
        ({"inputs": PIXELS, "targets": TARGETS[:3]}, r"5 whole numbers in targets.*int64 \(3,\)"),
        ({"inputs": PIXELS, "targets": TARGETS * 0.5}, r"5 whole numbers in targets.*float64"),
        ({"inputs": PIXELS, "targets": TARGETS - 1}, r"counted from 0 .*Got -1"),
        ({"inputs": PIXELS, "targets": TARGETS, "classes": np.array(["a", "b"])}, r"below 2.*Got 2"),
        ({"inputs": PIXELS, "targets": TARGETS, "ids": np.arange(4)}, "one id for each of the 5 inputs"),
        ({"inputs": PIXELS, "targets": TARGETS, "test_inputs": PIXELS}, "both test_inputs and test_targets"),
        (
            {"inputs": PIXELS, "targets": TARGETS, "test_inputs": PIXELS[:, 1:], "test_targets": TARGETS},
            r"Got \(1, 3, 6\) and \(1, 4, 6\)",
        ),
        ({"inputs": np.array([[1.0], [np.nan]]), "targets": TARGETS[:2]}, r"finite numbers.*record 1"),
    ],
)
def test_what_is_wrong_with_the_arrays_is_said(arrays, message: str, tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match=message):
        load_npz(npz(tmp_path, **arrays))


def test_arrays_that_could_run_code_are_refused(tmp_path: Path) -> None:
    path = npz(tmp_path, inputs=PIXELS, targets=np.array([object()] * 5, dtype=object))
    with pytest.raises(PdpsgdError, match=r"plain arrays"):
        load_npz(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"text"])
def test_a_file_that_is_no_npz_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    with pytest.raises(PdpsgdError, match=r"Cannot read .*broken.npz"):
        load_npz(path)


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    path = npz(tmp_path, inputs=PIXELS, targets=TARGETS)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(PdpsgdError, match=r"Cannot read .*pictures.npz"):
        load_npz(path)


def picture(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (20, 10)) -> None:
    Image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    picture(root / "cat" / "one.png", (255, 0, 0))
    picture(root / "cat" / "two.jpg", (255, 255, 255), size=(7, 7))
    picture(root / "owl" / "one.png", (0, 0, 0))
    (root / "owl" / "Thumbs.db").write_text("not a picture")
    return root


def test_a_folder_of_classes_becomes_images_of_the_size_named(folder: Path) -> None:
    data = load_folder(folder, size=(6, 8))
    assert data.inputs.shape == (3, 3, 6, 8)
    assert data.classes == ("cat", "owl")
    assert data.targets.tolist() == [0, 0, 1]
    assert data.ids.tolist() == ["cat/one.png", "cat/two.jpg", "owl/one.png"]
    assert data.inputs[0, :, 0, 0].tolist() == [1, -1, -1]
    assert data.test_inputs is None


def test_images_may_be_read_in_grey(folder: Path) -> None:
    data = load_folder(folder, size=(6, 8), color=False)
    assert data.inputs.shape == (3, 1, 6, 8)
    assert data.inputs[1].min() == 1


def test_train_and_test_folders_are_kept_apart(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("cat", "owl"):
            picture(tmp_path / split / name / "one.png", (1, 2, 3))
    data = load_folder(tmp_path)
    assert data.ids.tolist() == ["train/cat/one.png", "train/owl/one.png"]
    assert data.test_targets is not None
    assert data.test_targets.tolist() == [0, 1]


def test_a_class_that_only_the_test_folder_has_is_refused(tmp_path: Path) -> None:
    for name in ("train/cat", "train/owl", "test/cat", "test/fox"):
        picture(tmp_path / name / "one.png", (1, 2, 3))
    with pytest.raises(PdpsgdError, match=r"Expected only the classes 'cat', 'owl' .*Got 'fox'"):
        load_folder(tmp_path)


def test_a_table_may_say_whose_picture_is_whose(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "people.csv"
    table.write_text("file,id\nowl/one.png,ann\ncat/one.png,bob\ncat/two.jpg,cy\n")
    assert load_folder(folder, people=table).ids.tolist() == ["bob", "cy", "ann"]
    table.write_text("file,donor\nowl/one.png,ann\ncat/one.png,bob\ncat/two.jpg,cy\n")
    assert load_folder(folder, people=table).ids.tolist() == ["bob", "cy", "ann"]
    table.write_text("file,donor,age\nowl/one.png,ann,30\n")
    with pytest.raises(PdpsgdError, match=r"Expected a column 'id' in people.csv"):
        load_folder(folder, people=table)
    table.write_text("file,id\nowl/one.png,ann\n")
    with pytest.raises(PdpsgdError, match=r"people.csv. Got image 'cat/one.png'"):
        load_folder(folder, people=table)


def test_a_picture_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "owl" / "bad.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(PdpsgdError, match=r"Cannot read '.*bad.png' as an image"):
        load_folder(folder)


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match="subfolder for each of at least two classes"):
        load_folder(tmp_path)
    with pytest.raises(PdpsgdError, match="There is none"):
        load_folder(tmp_path / "nowhere")
