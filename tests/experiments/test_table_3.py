"""Table 3's page is made from its record alone, and says what was not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.table_3 import SYSTEMS, run_table_3, write_page
from pdpsgd import PdpsgdError


def test_the_page_shows_means_labels_and_what_was_not_run() -> None:
    run = {"dataset": "mnist", "case": "34/43/23", "system": "pate", "answers": 53, "label_accuracy": 0.96}
    runs = [
        {**run, "seed": seed, "accuracy": a, "processor_seconds": 9, "megabytes": 900}
        for seed, a in ((0, 0.8), (1, 0.9))
    ]
    page = write_page(runs)
    assert "| pate | 85.00 ± 7.07 |  |  |  | 53 | 96.0 | 9 | 900 | 2 |" in page
    assert "The paper's CNN throughout" not in page
    assert "| i-pate-upsample | not run |" in page
    assert "97.24" in page
    assert "SVHN, 34" not in page


def test_networks_have_a_table_of_their_own() -> None:
    run = {"dataset": "svhn", "case": "54/37/9", "seed": 0, "processor_seconds": 9, "megabytes": 900}
    linear_run = {**run, "system": "pdp-sgd-exact after public labels", "accuracy": 0.5}
    others = [
        {**run, "network": "cnn", "system": system, "accuracy": 0.7, "at_start": 0.6} for system in SYSTEMS
    ]
    assert "CNN throughout" not in write_page([linear_run, *others[1:]]), "half-run"
    page = write_page([linear_run, *others])
    linear, networks = page.split("The paper's CNN throughout:")
    assert "| pdp-sgd-exact after public labels | 50.00 |  |" in linear
    assert "| pdp-sgd-exact after public labels | 70.00 | 60.00 |" in networks


def test_a_data_set_without_a_public_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match="fashion-mnist"):
        run_table_3(tmp_path, datasets=["fashion-mnist"])
