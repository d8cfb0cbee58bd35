"""Table 3's page is made from its record alone, and says what was not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.table_3 import run_table_3, write_page
from pdpsgd import PdpsgdError


def test_the_page_shows_means_labels_and_what_was_not_run() -> None:
    run = {"dataset": "mnist", "case": "34/43/23", "system": "pate", "answers": 53, "label_accuracy": 0.96}
    runs = [
        {**run, "seed": seed, "accuracy": a, "processor_seconds": 9, "megabytes": 900}
        for seed, a in ((0, 0.8), (1, 0.9))
    ]
    page = write_page(runs)
    assert "| pate | 85.00 ± 7.07 |  |  | 53 | 96.0 | 9 | 900 | 2 |" in page
    assert "| i-pate-upsample | not run |" in page
    assert "97.24" in page
    assert "SVHN, 34" not in page


def test_runs_without_a_model_on_record_are_linear_and_cnns_have_their_own_table() -> None:
    run = {"dataset": "svhn", "case": "54/37/9", "seed": 0, "processor_seconds": 9, "megabytes": 900}
    linear = {**run, "system": "pdp-sgd-exact", "accuracy": 0.87}
    cnn = {**run, "system": "pdp-sgd-adaptive after public labels", "accuracy": 0.8, "model": "cnn"}
    page = write_page([linear, cnn])
    above, below = page.split("| the paper's CNN with tanh")
    assert "| pdp-sgd-exact | 87.00 |" in above
    assert "| pdp-sgd-adaptive after public labels | 80.00 |" in below


def test_an_unknown_system_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match="i-pate-upsample"):
        run_table_3(tmp_path, systems=["i-pate"])


def test_a_data_set_without_a_public_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match="fashion-mnist"):
        run_table_3(tmp_path, datasets=["fashion-mnist"])
