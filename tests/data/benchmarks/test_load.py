from __future__ import annotations

import gzip
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pdpsgd.data import benchmarks as datasets
from pdpsgd.data.benchmarks.catalog import CATALOG
from pdpsgd.errors import PdpsgdError

from .conftest import mat_bytes


def test_digits_are_there_without_files_or_network() -> None:
    digits = datasets.load("digits", download=False)
    assert digits.train_inputs.shape == (1437, 1, 8, 8)
    assert digits.test_inputs.shape == (360, 1, 8, 8)
    assert digits.train_inputs.dtype == torch.float32
    assert digits.train_targets.dtype == torch.int64
    assert digits.train_inputs.min() == -1
    assert digits.train_inputs.max() == 1
    assert digits.source == "scikit-learn"


def test_the_split_of_digits_never_changes() -> None:
    digits = datasets.load("digits")
    assert digits.test_targets.bincount().tolist() == [36, 32, 36, 41, 33, 34, 37, 35, 31, 45]
    assert digits.test_targets[:12].tolist() == [8, 9, 9, 5, 0, 2, 2, 8, 2, 0, 6, 3]
    everything = torch.cat([digits.train_inputs, digits.test_inputs])
    assert len(torch.unique(everything.flatten(1), dim=0)) == 1797  # nobody is in both parts


def test_constants_of_normalisation_do_not_depend_on_the_data(small, tmp_path: Path) -> None:
    miniature = small("mnist")
    miniature.write(tmp_path / "mnist")
    data = datasets.load("mnist", folder=tmp_path)
    raw = np.frombuffer(gzip.decompress(miniature.files["train-images-idx3-ubyte.gz"])[16:], np.uint8)
    expected = (raw.reshape(30, 1, 28, 28) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(data.train_inputs.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert data.normalization.mean == (0.1307,)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "svhn"])
def test_a_data_folder_has_a_subfolder_for_each_benchmark(name: str, small, tmp_path: Path) -> None:
    small(name).write(tmp_path / name)
    data = datasets.load(name, folder=tmp_path, download=False)
    assert data.input_shape == CATALOG[name].input_shape
    assert len(data.train_inputs) == len(data.train_targets)
    assert data.source == str(tmp_path / name)
    assert data.notes == ()


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw"), ("svhn", ".")]
)
def test_files_are_found_where_torchvision_leaves_them(name: str, folder: str, small, tmp_path: Path) -> None:
    miniature = small(name)
    miniature.write(tmp_path / folder)
    for path in (tmp_path / folder).glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(datasets.load(name, folder=tmp_path, download=False).test_targets) in (10, 20)


def test_a_folder_named_for_the_benchmark_may_be_given_itself(small, tmp_path: Path) -> None:
    small("mnist").write(tmp_path / "mnist")
    assert datasets.load("mnist", folder=tmp_path / "mnist").source == str(tmp_path / "mnist")


def test_folders_are_searched_in_the_documented_order(small, tmp_path: Path, monkeypatch) -> None:
    miniature = small("fashion-mnist")
    places = [tmp_path / n for n in ("debian", "cache", "here/data", "variable", "argument")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("pdpsgd.data.benchmarks.folders.DEBIAN", places[0])
    monkeypatch.setattr("pdpsgd.data.benchmarks.folders.cache_place", lambda: places[1])
    monkeypatch.setenv("PDPSGD_DATA", str(places[3]))
    for place in places:
        miniature.write(place / "fashion-mnist")
        found = datasets.load("fashion-mnist", folder=tmp_path / "argument", download=False).source
        assert Path(found).resolve() == place / "fashion-mnist"


def test_the_same_content_compressed_otherwise_is_the_same_file(small, tmp_path: Path) -> None:
    miniature = small("fashion-mnist")
    folder = miniature.write(tmp_path / "fashion-mnist")
    for path in folder.iterdir():
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1, mtime=99))
    assert datasets.load("fashion-mnist", folder=tmp_path, download=False).notes == ()


def test_svhn_from_elsewhere_is_accepted_by_shape_and_counts_and_says_so(small, tmp_path: Path) -> None:
    small("svhn").write(tmp_path / "svhn")
    other = np.full((32, 32, 3, 40), 7, np.uint8)
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(mat_bytes(other, np.arange(40) % 10))
    data = datasets.load("svhn", folder=tmp_path, download=False)
    assert len(data.notes) == 1
    assert "train_32x32.mat is not the published file" in data.notes[0]
    assert data.train_targets.tolist() == [i % 10 for i in range(40)]  # the file's 10 is the digit 0


def test_svhn_keeps_its_pixels_in_their_places(small, tmp_path: Path) -> None:
    small("svhn").write(tmp_path / "svhn")
    images = np.zeros((32, 32, 3, 40), np.uint8)
    images[4, 9, 2, 11] = 255  # row 4, column 9, blue, picture 11
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(mat_bytes(images, np.arange(40) % 10))
    data = datasets.load("svhn", folder=tmp_path, download=False)
    assert torch.nonzero(data.train_inputs > 0).tolist() == [[11, 2, 4, 9]]


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def damage_content(path: Path) -> None:
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(gzip.compress(content))


def damage_shorten(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))


def damage_web_page(path: Path) -> None:
    path.write_text("<html>You must log in to this wireless network</html>")


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncate, "it is truncated"),
        (damage_flip, "not intact gzip data|sha256"),
        (damage_content, "its content has sha256"),
        (damage_shorten, "it holds 7,851 bytes, the published file 7,856"),
        (damage_web_page, "not intact gzip data"),
        (damage_empty, "it holds 0 bytes"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_the_way_out(damage, reason, small, tmp_path) -> None:
    folder = small("mnist").write(tmp_path / "mnist")
    damage(folder / "t10k-images-idx3-ubyte.gz")
    with pytest.raises(
        PdpsgdError, match=rf"t10k-images-idx3-ubyte.gz cannot be used for mnist: .*({reason})"
    ):
        datasets.load("mnist", folder=tmp_path)
    with pytest.raises(PdpsgdError, match="pdpsgd data get mnist"):
        datasets.load("mnist", folder=tmp_path)


def test_another_benchmarks_file_is_recognised(small, tmp_path: Path) -> None:
    small("mnist").write(tmp_path / "fashion-mnist")
    small("fashion-mnist")
    with pytest.raises(PdpsgdError, match=r"its content is mnist's train-images-idx3-ubyte.gz"):
        datasets.load("fashion-mnist", folder=tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncate, "truncated or no MATLAB file"),
        (damage_web_page, "truncated or no MATLAB file"),
        (damage_empty, "truncated or no MATLAB file"),
    ],
)
def test_a_damaged_svhn_file_is_refused(damage, reason: str, small, tmp_path: Path) -> None:
    folder = small("svhn").write(tmp_path / "svhn")
    damage(folder / "test_32x32.mat")
    with pytest.raises(PdpsgdError, match=rf"test_32x32.mat cannot be used for svhn: it is {reason}"):
        datasets.load("svhn", folder=tmp_path)


@pytest.mark.parametrize(
    ("shape", "digits", "reason"),
    [
        ((32, 32, 3, 39), np.arange(39) % 10, r"X is uint8 of shape \(32, 32, 3, 39\)"),
        ((32, 32, 3, 40), np.arange(39) % 10, "y has 39 labels for 40 images"),
        ((32, 32, 3, 40), np.arange(40) % 9, "images of the digits 0 to 9"),
        ((32, 32, 3, 40), np.arange(40), "y has labels from 1 to 39"),
    ],
)
def test_svhn_of_another_shape_or_other_counts_is_refused(shape, digits, reason, small, tmp_path) -> None:
    folder = small("svhn").write(tmp_path / "svhn")
    (folder / "train_32x32.mat").write_bytes(mat_bytes(np.zeros(shape, np.uint8), digits))
    with pytest.raises(PdpsgdError, match=reason):
        datasets.load("svhn", folder=tmp_path)


def test_without_download_a_missing_benchmark_says_where_it_was_looked_for(small, tmp_path: Path) -> None:
    small("mnist")
    with pytest.raises(PdpsgdError, match=rf"{tmp_path}.*pdpsgd data get mnist"):
        datasets.load("mnist", folder=tmp_path, download=False)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PdpsgdError, match=r"'digits', 'mnist', 'fashion-mnist', 'svhn'.*'cifar'"):
        datasets.load("cifar")


@pytest.fixture
def published(server, small, monkeypatch):
    miniature = small("mnist")
    monkeypatch.setitem(CATALOG, "mnist", replace(miniature.benchmark, mirrors=(server.address,)))
    server.files.update({f"/{name}": content for name, content in miniature.files.items()})
    return server


def test_what_is_missing_is_downloaded_once(published, tmp_path: Path) -> None:
    first = datasets.load("mnist", folder=tmp_path)
    assert len(published.requests) == 4
    again = datasets.load("mnist", folder=tmp_path)
    assert len(published.requests) == 4
    assert torch.equal(first.train_inputs, again.train_inputs)


def test_getting_repairs_only_what_is_damaged(published, tmp_path: Path) -> None:
    place = datasets.get("mnist", folder=tmp_path)
    damage_truncate(place / "t10k-labels-idx1-ubyte.gz")
    published.requests.clear()
    datasets.get("mnist", folder=tmp_path)
    assert published.requests == [("/t10k-labels-idx1-ubyte.gz", None)]
    assert datasets.verify("mnist", place=place) == ()


def test_downloads_go_to_the_folder_of_the_environment_variable(published, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PDPSGD_DATA", str(tmp_path / "chosen"))
    assert datasets.get("mnist") == tmp_path / "chosen" / "mnist"


def test_downloads_go_to_the_cache_when_nobody_chose(published) -> None:
    assert datasets.get("mnist") == Path.cwd() / "cache" / "mnist"


def test_digits_cannot_be_downloaded_and_need_not_be() -> None:
    with pytest.raises(PdpsgdError, match="comes with scikit-learn"):
        datasets.get("digits")


def test_knowing_the_catalogue_does_not_load_torch() -> None:
    code = "import sys, pdpsgd.data.benchmarks; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
