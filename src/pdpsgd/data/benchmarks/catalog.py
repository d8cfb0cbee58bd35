"""What is known in advance of each benchmark: its files, their checksums, where they are published.

Everything here is fixed and public. The constants for normalization in particular are the customary ones of
the literature. By custom, those of MNIST, Fashion-MNIST and SVHN were once computed from these very
benchmarks; nothing is computed anew from the data that a model is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdpsgd.errors import check_one_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class IdxFile:
    """One array in the IDX format of MNIST, compressed or not.

    `md5` and `size` (bytes) are those of the published, compressed file. `content_sha256` is that of what is
    inside: packages compress the same content anew, so that is what a local file is compared by.
    """

    name: str
    md5: str
    content_sha256: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class MatFile:
    """SVHN's images and labels in one MATLAB file: X of `shape`, y with so many of each digit from 0 to 9.

    `md5` and `size` (bytes) are those of the published file.
    """

    name: str
    md5: str
    shape: tuple[int, ...]
    class_counts: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Normalization:
    """Constants per channel: inputs become (pixel / largest pixel - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalize_(self, images: Tensor) -> Tensor:
        """Pixels from 0 to 1 (images, channels, height, width) become inputs, in place: SVHN is a gigabyte."""
        mean, std = self._by_channel()
        return images.sub_(mean).div_(std)

    def undone(self, inputs: Tensor) -> Tensor:
        """Return the pixels, from 0 to 1, that inputs were made of."""
        mean, std = self._by_channel()
        return inputs * std + mean

    def _by_channel(self) -> tuple[Tensor, Tensor]:
        import torch

        return torch.tensor(self.mean)[:, None, None], torch.tensor(self.std)[:, None, None]


@dataclass(frozen=True)
class Benchmark:
    """A published data set, as far as it is known without opening it."""

    name: str
    title: str
    train_people: int
    test_people: int
    input_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    normalization: Normalization
    largest_pixel: int = 255
    files: tuple[IdxFile | MatFile, ...] = ()
    mirrors: tuple[str, ...] = ()
    subfolders: tuple[str, ...] = ()
    terms: str = ""

    @property
    def built_in(self) -> bool:
        """Whether an installed package carries the data, so that there are no files to look for."""
        return not self.files


DIGITS = tuple("0123456789")

CATALOG: dict[str, Benchmark] = {
    "digits": Benchmark(
        name="digits",
        title="handwritten digits, small (scikit-learn)",
        train_people=1437,
        test_people=360,
        input_shape=(1, 8, 8),
        classes=DIGITS,
        normalization=Normalization((0.5,), (0.5,)),
        largest_pixel=16,
        terms="part of scikit-learn; UCI, CC BY 4.0",
    ),
    "mnist": Benchmark(
        name="mnist",
        title="handwritten digits",
        train_people=60_000,
        test_people=10_000,
        input_shape=(1, 28, 28),
        classes=DIGITS,
        normalization=Normalization((0.1307,), (0.3081,)),
        files=(
            IdxFile(
                "train-images-idx3-ubyte.gz",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                (60_000, 28, 28),
                9_912_422,
            ),
            IdxFile(
                "train-labels-idx1-ubyte.gz",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                (60_000,),
                28_881,
            ),
            IdxFile(
                "t10k-images-idx3-ubyte.gz",
                "9fb629c4189551a2d022fa330f9573f3",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                (10_000, 28, 28),
                1_648_877,
            ),
            IdxFile(
                "t10k-labels-idx1-ubyte.gz",
                "ec29112dd5afa0611ce80d1b7f02629c",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                (10_000,),
                4_542,
            ),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        subfolders=("mnist", "MNIST/raw"),
        terms="CC BY-SA 3.0",
    ),
    "fashion-mnist": Benchmark(
        name="fashion-mnist",
        title="articles of clothing",
        train_people=60_000,
        test_people=10_000,
        input_shape=(1, 28, 28),
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        normalization=Normalization((0.2860,), (0.3530,)),
        files=(
            IdxFile(
                "train-images-idx3-ubyte.gz",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                (60_000, 28, 28),
                26_421_880,
            ),
            IdxFile(
                "train-labels-idx1-ubyte.gz",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                (60_000,),
                29_515,
            ),
            IdxFile(
                "t10k-images-idx3-ubyte.gz",
                "bef4ecab320f06d8554ea6380940ec79",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                (10_000, 28, 28),
                4_422_102,
            ),
            IdxFile(
                "t10k-labels-idx1-ubyte.gz",
                "bb300cfdad3c16e7a12a480ee83cd310",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                (10_000,),
                5_148,
            ),
        ),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        subfolders=("fashion-mnist", "FashionMNIST/raw"),
        terms="MIT",
    ),
    "svhn": Benchmark(
        name="svhn",
        title="house numbers, cropped digits",
        train_people=73_257,
        test_people=26_032,
        input_shape=(3, 32, 32),
        classes=DIGITS,
        normalization=Normalization((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        files=(
            MatFile(
                "train_32x32.mat",
                "e26dedcc434d2e4c54c9b2d4a06d8373",
                (32, 32, 3, 73_257),
                (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
                182_040_794,
            ),
            MatFile(
                "test_32x32.mat",
                "eb5a983be6a315427106f1b164d9cef3",
                (32, 32, 3, 26_032),
                (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
                64_275_384,
            ),
        ),
        mirrors=("http://ufldl.stanford.edu/housenumbers/",),
        subfolders=("svhn", "SVHN", "."),
        terms="non-commercial use only",
    ),
}


def benchmark(name: str) -> Benchmark:
    """Return the catalogue's entry of that name."""
    check_one_of(tuple(CATALOG), dataset=name)
    return CATALOG[name]
