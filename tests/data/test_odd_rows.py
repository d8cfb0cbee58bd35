"""Rows that are odd but reasonable, to predict for: read as they are meant, or refused with the remedy."""

from __future__ import annotations

import warnings

import narwhals as nw
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from pdpsgd import PdpsgdError
from pdpsgd.budgets.readers import open_table, table_batches
from pdpsgd.data.images import read_image
from pdpsgd.data.preprocessing import Pixels, Preprocessing
from pdpsgd.data.remarks import Remarks
from pdpsgd.data.rows import read_rows

IMAGES = Preprocessing("images", pixels=Pixels())
SHAPE = (1, 4, 3)
BYTES = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)


def inputs_of(values: object, how: Preprocessing = IMAGES) -> torch.Tensor:
    (rows,) = read_rows(values, how, SHAPE, at_once=100, remarks=Remarks())
    return rows.inputs


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64, np.uint16])
def test_whole_numbers_are_pixels_whatever_their_type(kind):
    assert torch.equal(inputs_of(BYTES.astype(kind)), inputs_of(BYTES))


def test_scaled_pixels_are_taken_as_they_are():
    scaled = BYTES / 127.5 - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(inputs_of(scaled), inputs_of(BYTES), atol=1e-6)


@pytest.mark.parametrize("values", [BYTES.astype(float), BYTES.astype(int) * 2, BYTES.astype(int) - 1000])
def test_numbers_of_another_scale_are_refused(values):
    with pytest.raises(PdpsgdError, match="0 to 255"):
        inputs_of(values)


def test_pixels_from_0_to_1_are_warned_of_where_training_had_negative_ones():
    with pytest.warns(UserWarning, match="-1 to 1 in training"):
        inputs_of(BYTES / 255)


def test_a_model_of_numbers_takes_any():
    numbers = BYTES.astype(float)
    assert torch.equal(inputs_of(numbers, Preprocessing()), torch.from_numpy(numbers[:, None]).float())


def test_gray_images_of_16_bits_are_not_white(tmp_path):
    deep = BYTES[0].astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(BYTES[0]).save(tmp_path / "usual.png")
    deep_read, usual = (
        read_image(tmp_path / f"{name}.png", (4, 3), color=False) for name in ("deep", "usual")
    )
    assert np.array_equal(deep_read, usual)
    Image.fromarray(BYTES[0].astype(np.float32)).save(tmp_path / "decimals.tif")
    with pytest.raises(PdpsgdError, match="8 or 16 bits"):
        read_image(tmp_path / "decimals.tif", (4, 3), color=False)


def test_a_table_of_column_names_alone_has_no_rows(tmp_path):
    (tmp_path / "rows.csv").write_text("age,job\n")
    ((frame, _),) = table_batches(tmp_path / "rows.csv", 10)
    assert frame.columns == ["age", "job"]
    assert len(frame) == 0
    (tmp_path / "rows.csv").write_text("age,job\n1,nurse\n")
    assert [len(frame) for frame, _ in table_batches(tmp_path / "rows.csv", 10)] == [1]


def test_a_frame_with_a_column_twice_is_refused_by_its_name():
    frame = pd.DataFrame([[1, 2, 3]], columns=["age", "job", "age"])
    with pytest.raises(PdpsgdError, match="'age' more than once"):
        open_table(frame)
    assert isinstance(open_table(frame.iloc[:, :2])[0], nw.DataFrame)
