"""How a row of a table is read depends on that row alone: nobody's odd cell moves the rows of others."""

from __future__ import annotations

import numpy as np
import pytest

from pdpsgd import PdpsgdError
from pdpsgd.data.people import load_people

SCHEMA = """confirmed = true
label = "kind"
id_column = "person"
classes = ["0", "1"]
[columns.code]
kind = "categorical"
categories = {categories}
"""


def encoded(folder, schema, rows):
    file = folder / "people.csv"
    file.write_bytes(b"person,code,kind\n" + b"".join(rows))
    return load_people(file, schema=schema).inputs.numpy()[:4]


@pytest.mark.parametrize(
    ("categories", "cells", "odd"),
    [
        ('["01", "02"]', ["01", "02", "01", "02"], b"unknown"),
        ('["1.0", "1.50"]', ["1.0", "1.50", "1.0", "1.50"], b"n/a"),
        ('["1", "2"]', ["1", "2", "1", "2"], b"1.5"),
        ('["true", "false"]', ["true", "false", "true", "false"], b"maybe"),
        ('["Caf\u00e9", "Bar"]', ["Caf\u00e9", "Bar", "Caf\u00e9", "Bar"], b"Jos\xe9"),
    ],
)
def test_an_odd_cell_leaves_the_rows_of_others_as_they_are(tmp_path, categories, cells, odd):
    place = tmp_path / "schema.toml"
    place.write_text(SCHEMA.format(categories=categories), encoding="utf-8")
    rows = [f"p{i},{cell},{i % 2}\n".encode() for i, cell in enumerate(cells)]
    alone = encoded(tmp_path, place, rows)
    among = encoded(tmp_path, place, [*rows, b"p9," + odd + b",1\n"])
    assert alone[:, :2].any(axis=1).all()
    assert np.array_equal(alone, among)


def test_two_ways_to_write_one_number_are_no_two_categories(tmp_path):
    place = tmp_path / "schema.toml"
    place.write_text(SCHEMA.format(categories='["01", "1"]'))
    with pytest.raises(PdpsgdError, match=r"differ as numbers, too\. Got '01' and '1'"):
        encoded(tmp_path, place, [b"p0,1,0\n"])


NUMBERS = """confirmed = true
label = "kind"
id_column = "person"
classes = ["0", "1"]
[columns.size]
kind = "numeric"
low = 0
high = 10
[columns.code]
kind = "categorical"
categories = ["1.5", "2"]
"""


@pytest.mark.parametrize("odd", ["2.5", "2,5", "3", "", "1,5e0"])
@pytest.mark.parametrize("comma", [True, False])
def test_how_somebody_writes_decimals_leaves_the_numbers_of_others_as_they_are(tmp_path, odd, comma):
    place, file = tmp_path / "schema.toml", tmp_path / "people.csv"
    place.write_text(NUMBERS)
    cells = [cell.replace(".", "," if comma else ".") for cell in ("1.5", "2.25", "7.5", "1.5")]
    lines = [f"p{i};{cell};{cells[0]};{i % 2}\n" for i, cell in enumerate(cells)]
    found = []
    for rows in (lines, [f"p9;{odd};{odd};1\n", *lines]):  # the odd one first, where it used to be looked at
        file.write_text("person;size;code;kind\n" + "".join(rows))
        found.append(load_people(file, schema=place).inputs.numpy()[-4:])
    assert np.array_equal(*found)
    assert np.unique(found[0][:, 0]).size == 3
    assert found[0][:, 1:].any(axis=1).all()


def test_a_comma_inside_a_cell_between_commas_is_no_decimal(tmp_path):
    place, file = tmp_path / "schema.toml", tmp_path / "people.csv"
    place.write_text(NUMBERS)
    file.write_text('person,size,code,kind\np0,"1,500",2,0\np1,3,2,1\n')
    with pytest.raises(PdpsgdError, match="Expected a number in column 'size'"):
        load_people(file, schema=place)
