"""Own images: a folder with a subfolder for each class, or arrays in an `.npz` file.

Size and scale are fixed and public: every image is brought to the size that the user names, and pixels from
0 to 255 become numbers from -1 to 1. Nothing is computed from the images.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdpsgd.budgets.readers import open_table, read_columns
from pdpsgd.errors import check_positive, fail

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images as tensors; inputs (people, channels, height, width), targets and ids are aligned.

    `ids` say whose record each is: as given, else the file's path, else the position, and then `named` is
    false. `classes_declared` is false where the number of classes was read from the targets.
    `pixels` is false where inputs were other numbers than bytes. `notes` are what a reader of any result must be told.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    ids: Array
    classes: tuple[str, ...]
    test_inputs: torch.Tensor | None = None
    test_targets: torch.Tensor | None = None
    notes: tuple[str, ...] = ()
    named: bool = True
    classes_declared: bool = True
    pixels: bool = True

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.inputs.shape[1:])


MOST_CLASSES = 1000
"""Classes without names that targets may tell of, where there are not more records than that."""


def load_npz(path: str | Path) -> ImageData:
    """Read arrays `inputs` and `targets` from an `.npz` file; also `ids`, `classes` and `test_...` if any.

    Inputs of bytes are pixels and become numbers from -1 to 1; other numbers are taken as they are. Images
    may have their channels first, last, or none; targets are whole numbers from 0. Without `classes` (their
    names), the number of classes is read from the targets, and a note says so.
    """
    arrays = _npz_arrays(Path(path))
    inputs = _inputs(arrays["inputs"], f"inputs in {path}")
    targets = _targets(arrays["targets"], len(inputs), f"targets in {path}")
    tests = [arrays.get("test_inputs"), arrays.get("test_targets")]
    if (tests[0] is None) != (tests[1] is None):
        fail(f"Expected both test_inputs and test_targets in {path}, or neither. Got one of them.")
    test_inputs = test_targets = None
    if tests[0] is not None:
        test_inputs = _inputs(tests[0], f"test_inputs in {path}")
        test_targets = _targets(tests[1], len(test_inputs), f"test_targets in {path}")
        if test_inputs.shape[1:] != inputs.shape[1:]:
            got = f"{tuple(test_inputs.shape[1:])} and {tuple(inputs.shape[1:])}"
            fail(f"Expected test_inputs and inputs of one shape in {path}. Got {got}.")
    classes, notes = _class_names(arrays.get("classes"), [targets, test_targets], path)
    ids = arrays.get("ids", np.arange(len(inputs)))
    if ids.shape != (len(inputs),):
        fail(f"Expected one id for each of the {len(inputs)} inputs in {path}. Got shape {ids.shape}.")
    if ids.dtype.kind not in "iuUS":
        fail(f"Expected ids in {path} that are whole numbers or text. Got {ids.dtype}.")
    return ImageData(
        inputs,
        targets,
        ids,
        classes,
        test_inputs,
        test_targets,
        notes,
        named="ids" in arrays,
        classes_declared="classes" in arrays,
        pixels=arrays["inputs"].dtype == np.uint8 and inputs.dim() == 4,
    )


def load_folder(
    folder: str | Path,
    *,
    size: tuple[int, int] = (32, 32),
    color: bool = True,
    people: str | Path | None = None,
) -> ImageData:
    """Read images from `FOLDER/CLASS/*.png` (jpg and others, too), or from `FOLDER/train` and `FOLDER/test`.

    Every image is brought to `size` (height, width), in color or gray. A record's id is its path inside
    the folder, or what a CSV file `people` with the columns `file` and `id` says (where there is but one column
    beside `file`, whatever its name). The names of the class folders are taken to be public.
    """
    root = Path(folder)
    if not root.is_dir():
        fail(f"Expected a folder of images at {str(root)!r}. There is none.")
    check_positive(height=size[0], width=size[1])
    split = (root / "train").is_dir()
    classes = class_folders(root / "train" if split else root)
    inputs, targets, files = _read_folder(root / "train" if split else root, classes, size, color)
    test_inputs = test_targets = None
    if split and (root / "test").is_dir():
        test_inputs, test_targets, _ = _read_folder(root / "test", classes, size, color)
    paths = [file.relative_to(root).as_posix() for file in files]
    return ImageData(inputs, targets, _ids(paths, people), classes, test_inputs, test_targets)


def npz_declares(path: Path) -> tuple[tuple[int, ...], bool, tuple[str, ...]]:
    """Read what an `.npz` file declares of its records: their shape, whether they are bytes, and names of classes.

    Guarantee: of `inputs` the header is read, which has their shape, and of targets and ids nothing.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open("inputs.npy") as file:
            shape, _, dtype = array_header(file)
        with np.load(path, allow_pickle=False) as arrays:
            classes = arrays["classes"] if "classes" in arrays.files else None
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        fail(f"Expected an array 'inputs' in {str(path)!r}, whose shape can be read. Got: {error}.")
    if classes is None:
        fail(
            f"Expected an array 'classes' with the names of the classes in {path}: without it they are read from the "
            "targets of people."
        )
    one = arranged(np.zeros((1, *shape[1:]), dtype=dtype), f"inputs in {path}")
    return tuple(one.shape[1:]), dtype == np.uint8 and one.dim() == 4, _class_names(classes, [], path)[0]


def array_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order and kind of an array, before its numbers."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    return tuple(shape), bool(by_columns), dtype


def _npz_arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as stream:  # numpy leaves a damaged file open if it opens it
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                fail(f"Expected an .npz file with several arrays at {str(path)!r}. Got a single array.")
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        fail(f"Cannot read {str(path)!r} as .npz: {getattr(error, 'strerror', None) or error}.")
    except ValueError as error:
        fail(f"Cannot read {str(path)!r} as .npz of plain arrays: {error}.")
    for name in ("inputs", "targets"):
        if name not in arrays:
            known = ", ".join(map(repr, arrays)) or "none"
            fail(f"Expected an array {name!r} in {path}. Its arrays are {known}.")
    return arrays


def _inputs(values: Array, place: str) -> torch.Tensor:
    inputs = arranged(values, place)
    return _scaled(inputs) if values.dtype == np.uint8 else inputs


def arranged(values: Array, place: str) -> torch.Tensor:
    """Return numbers as float32, images with their channels first; what is not finite is refused."""
    import torch

    if values.ndim < 2 or values.dtype.kind not in "uif":
        fail(f"Expected numbers, people first, in {place}. Got {values.dtype} {values.shape}.")
    if values.ndim == 3:
        values = values[:, None]  # gray images
    elif values.ndim == 4 and values.shape[3] in (1, 3) and values.shape[1] not in (1, 3):
        values = values.transpose(0, 3, 1, 2)
    inputs = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    wrong = torch.nonzero(~torch.isfinite(inputs.flatten(1)).all(1))
    if len(wrong):
        fail(f"Expected finite numbers in {place}. Got something else in record {int(wrong[0, 0])}.")
    return inputs


def _scaled(pixels: torch.Tensor) -> torch.Tensor:
    """Bring pixels from 0 to 255 into -1 to 1."""
    return pixels.div_(127.5).sub_(1)


def _targets(values: Any, records: int, place: str) -> torch.Tensor:
    import torch

    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (records,) or values.dtype.kind not in "ui":
        fail(f"Expected {records} whole numbers in {place}, one a record. Got {values.dtype} {values.shape}.")
    if records and values.min() < 0:
        fail(f"Expected classes counted from 0 in {place}. Got {values.min()}.")
    if records and values.max() > np.iinfo(np.int64).max:
        fail(
            f"Expected classes counted from 0, at most {np.iinfo(np.int64).max}, in {place}. Got {values.max()}."
        )
    return torch.from_numpy(values.astype(np.int64))


def _class_names(
    names: Array | None, targets: list[torch.Tensor | None], path: str | Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    largest = max((int(t.max()) for t in targets if t is not None and len(t)), default=-1)
    if names is None:
        most = max(MOST_CLASSES, sum(len(t) for t in targets if t is not None))
        if largest >= most:
            fail(
                f"Expected targets in {path} that count classes from 0, below {most:,}, or an array 'classes' that "
                f"names them all. Got {largest:,}. Number the classes 0, 1, 2, ... and store their names as `classes`."
            )
        note = (
            f"The number of classes, {largest + 1}, was read from the targets; store `classes` to declare it."
        )
        return tuple(map(str, range(largest + 1))), (note,)
    if names.ndim != 1:
        fail(f"Expected classes in {path} to be a list of names. Got an array of shape {names.shape}.")
    if largest >= len(names):
        fail(f"Expected targets below {len(names)}, the number of classes in {path}. Got {largest}.")
    return tuple(map(str, names.tolist())), ()


def class_folders(root: Path) -> tuple[str, ...]:
    """Name the classes of a folder of images: its subfolders, sorted."""
    folders = [path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    if len(folders) < 2:
        fail(f"Expected a subfolder for each of at least two classes in {str(root)!r}. Got {folders}.")
    return tuple(sorted(folders))


def _read_folder(
    root: Path, classes: tuple[str, ...], size: tuple[int, int], color: bool
) -> tuple[torch.Tensor, torch.Tensor, list[Path]]:
    import torch

    if unknown := [name for name in class_folders(root) if name not in classes]:
        fail(
            f"Expected only the classes {', '.join(map(repr, classes))} in {str(root)!r}. Got {unknown[0]!r}."
        )
    files = [(path, index) for index, name in enumerate(classes) for path in image_files(root / name)]
    pixels = np.empty((len(files), 3 if color else 1, *size), dtype=np.float32)
    for place, (path, _) in enumerate(files):
        pixels[place] = read_image(path, size, color)
    targets = torch.tensor([index for _, index in files], dtype=torch.int64)
    return _scaled(torch.from_numpy(pixels)), targets, [path for path, _ in files]


def image_files(folder: Path) -> Iterator[Path]:
    """Find all images in a folder and below, sorted."""
    if folder.is_dir():
        yield from sorted(
            path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file()
        )


def read_image(path: Path, size: tuple[int, int], color: bool) -> Array:
    """Read an image as bytes, channels first, brought to a size (height, width)."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        fail("Expected Pillow to read images. Install it: pip install pillow")
    try:
        with Image.open(path) as image:
            upright = _in_bytes(ImageOps.exif_transpose(image), path).convert("RGB" if color else "L")
            if upright.size != (size[1], size[0]):
                upright = upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            pixels = np.asarray(upright)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        fail(f"Cannot read {str(path)!r} as an image: {error}.")
    return pixels.transpose(2, 0, 1) if color else pixels[None]


def _in_bytes(image: Any, path: Path) -> Any:
    """Bring gray images of 16 bits to 8: converted as they are, whatever is brighter than 255 would be white."""
    from PIL import Image

    if image.mode == "F":
        fail(
            f"Expected an image of whole numbers at {str(path)!r}. Got one of decimals: save it with 8 or 16 bits."
        )
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.size and not 0 <= values.min() <= values.max() <= np.iinfo(np.uint16).max:
        fail(f"Expected an image of at most 16 bits at {str(path)!r}. Got values up to {values.max()}.")
    return Image.fromarray((values // 257).astype(np.uint8))


def _ids(paths: list[str], people: str | Path | None) -> Array:
    if people is None:
        return np.array(paths, dtype=np.str_)
    named = open_table(people)[0].columns
    others = [name for name in named if name != "file"]
    id_column = others[0] if len(others) == 1 else "id"
    columns, source = read_columns(people, ["file", id_column])
    person_of = dict(zip(map(str, columns["file"].tolist()), columns[id_column].tolist(), strict=True))
    for path in paths:
        if path not in person_of:
            fail(
                f"Expected every image's person in {source.name}. Got image {path!r}, which has no row there."
            )
    return np.array([person_of[path] for path in paths])
