"""`fit` with people who have many records: what is learned, promised, tested and written down."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError
from pdpsgd.reporting import write_run_report
from pdpsgd.training.components import LOSSES, summed_loss
from pdpsgd.training.evaluation import evaluate
from pdpsgd.training.fitting import TrainingResult, fit

COUNTS = np.random.default_rng(0).choice([0, 1, 1, 2, 9], 300)
WHOSE = np.repeat(np.arange(300), COUNTS)
TESTED = np.repeat(np.arange(20), np.arange(1, 21))


def data(records: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(records, 5, generator=generator)
    return inputs, (inputs @ truth).argmax(1)


def trained(folder: Path | None = None, **options: object) -> TrainingResult:
    torch.manual_seed(0)
    settings = {
        "records_per_person": 4, "record_ids": WHOSE, "steps": 40, "batch_size": 60, "seed": 1, "progress": False,
        "test_data": data(len(TESTED), 3), "test_ids": TESTED, "run_folder": folder, "accountant": "rdp",
    }  # fmt: skip
    model = nn.Linear(5, 3)
    return fit(model, data(len(WHOSE), 2), Budgets([8.0] * 300), **(settings | options))  # type: ignore[arg-type]


def test_people_with_many_records_are_learned_from_and_tested_by_record_and_by_person() -> None:
    result = trained()
    assert (result.accuracy or 0) > 0.8
    assert result.evaluation is not None
    assert result.evaluation.people == 20
    right = result.model(data(len(TESTED), 3)[0]).argmax(1) == data(len(TESTED), 3)[1]
    of_people = [right.numpy()[person == TESTED].mean() for person in range(20)]
    assert result.evaluation.accuracy == pytest.approx(float(right.float().mean()))
    assert result.evaluation.accuracy_per_person == pytest.approx(float(np.mean(of_people)))
    assert sum(share.people for share in result.evaluation.by_class.values()) >= 20


def test_physical_batches_and_the_users_own_mean_loss_change_nothing() -> None:
    whole, cut = trained(max_physical_batch_size=4096), trained(max_physical_batch_size=16)
    own = trained(loss=nn.functional.cross_entropy)
    for other in (cut, own):
        assert torch.allclose(whole.model.weight, other.model.weight, atol=1e-6)


def test_nothing_that_is_published_says_how_many_records_anybody_has(tmp_path: Path) -> None:
    """Files of two runs, in one of which nobody who is sampled has records, hold the same but for what was learned."""
    trained(tmp_path / "run")
    settings = json.loads((tmp_path / "run/public/settings.json").read_text())
    assert settings["records_per_person"] == 4
    page = write_run_report(tmp_path / "run").read_text()
    assert "all of a person's records together" in page.replace("&#x27;", "'").replace("&#39;", "'")
    assert "2 epsilon" in page
    assert "per person" in page or "each person counts once" in page
    told = {str(len(WHOSE)), f"{len(WHOSE):,}"}
    for file in (tmp_path / "run/public").iterdir():
        if file.suffix in (".json", ".html"):
            words = set(file.read_text().replace('"', " ").replace("<", " ").replace(">", " ").split())
            assert not told & words, file.name


def test_repeated_ids_without_k_are_refused_and_one_each_is_accepted() -> None:
    with pytest.raises(PdpsgdError, match="one record per person"):
        trained(records_per_person=None)
    with pytest.raises(PdpsgdError, match="records_per_person to be a whole number"):
        trained(records_per_person=0)
    assert trained(records_per_person=1).accuracy is not None


def test_a_run_is_resumed_with_the_same_k(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    assert json.loads((tmp_path / "run/public/settings.json").read_text())["sources"]["records_per_person"]


@pytest.mark.parametrize("name", LOSSES)
def test_summed_losses_are_means_times_the_number_of_examples(name: str) -> None:
    outputs = torch.randn(7, 3) if name == "cross-entropy" else torch.randn(7)
    targets = torch.randint(2, (7,))
    summed = summed_loss(name)
    assert summed is not None
    assert torch.allclose(summed(outputs, targets), 7 * LOSSES[name](outputs, targets), rtol=1e-5)
    assert summed_loss(LOSSES[name]) is None  # the user's own stays what it is


def test_evaluation_by_person_wants_one_id_per_record() -> None:
    with pytest.raises(PdpsgdError, match="person of each of the 6 test records"):
        evaluate(nn.Linear(5, 3), data(6, 1), ids=[1, 2])
