"""One call: plan, train, evaluate, and leave a folder that can be published."""

from __future__ import annotations

import csv
import dataclasses
import json
import stat

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pdpsgd
from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plans import Plan


def test_budgets_in_trained_model_out(problem):
    """The whole way, with a plan made on the way."""
    result = pdpsgd.fit(
        problem.model(),
        (problem.inputs.numpy(), problem.targets.numpy()),
        np.where(np.arange(100) < 60, 4.0, 8.0),
        steps=60,
        batch_size=30,
        learning_rate=1.0,
        test_data=problem.test,
        test_tiers=problem.test_tiers,
        seed=1,
        progress=False,
    )
    assert result.accuracy > 0.6
    assert [level.epsilon for level in result.plan.levels] == [4.0, 8.0]
    for level, spent in zip(result.plan.levels, result.spent, strict=True):
        assert level.proven_epsilon == spent.epsilon <= level.epsilon
    assert set(result.accuracy_by_tier) == {"1", "2"}
    assert result.versions["torch"] == torch.__version__
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.seconds = 0.0


def test_a_seeded_result_says_that_it_is_not_for_release(problem):
    assert "not for release" in problem.fit().release_note
    assert problem.fit(seed=None).release_note is None


def test_history_holds_public_figures_only(problem):
    result = problem.fit(test_data=problem.test, test_tiers=problem.test_tiers, evaluate_every=10)
    assert [record["step"] for record in result.history] == [10, 20, 30]
    assert set(result.history[0]) == {"step", "test_loss", "test_accuracy", "by_tier"}
    assert result.history[-1]["test_accuracy"] == result.accuracy


def test_evaluating_does_not_change_the_training(problem, flat):
    plain = problem.fit()
    watched = problem.fit(test_data=problem.test, evaluate_every=1)
    assert torch.equal(flat(plain), flat(watched))


def test_test_people_can_bring_their_budgets(problem):
    budgets = pdpsgd.Budgets(problem.test_tiers)
    result = problem.fit(test_data=problem.test, test_budgets=budgets)
    assert {name: share.people for name, share in result.evaluation.by_tier.items()} == {"1": 25, "2": 25}
    assert sum(share.people for share in result.evaluation.by_class.values()) == 50


def test_the_model_that_was_given_is_the_model_that_is_trained(problem):
    model = problem.model()
    result = problem.fit(model=model)
    assert result.model is model
    assert model.training
    assert "forward" not in model[0].__dict__


def test_the_run_folder_keeps_apart_what_is_public_what_is_each_person_s_and_what_is_private(
    problem, tmp_path
):
    result = problem.fit(
        run_folder=tmp_path / "run", test_data=problem.test, evaluate_every=15, checkpoint_every=10
    )
    folder = tmp_path / "run"
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == [
        "people/promises.csv",
        "private/checkpoint.safetensors",
        "public/history.jsonl",
        "public/model.json",
        "public/model.safetensors",
        "public/plan.json",
        "public/result.json",
        "public/settings.json",
    ]
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in ("people", "private")} == {0o700}
    text = "".join(
        path.read_text() for path in (folder / "public").iterdir() if path.suffix != ".safetensors"
    )
    assert not any(word in text for word in ("batch_sizes", "training_loss", "non_finite"))
    assert (
        Plan.from_json((folder / "public" / "plan.json").read_text(), verify=False).digest
        == result.plan.digest
    )
    summary = json.loads((folder / "public" / "result.json").read_text())
    assert summary["evaluation"]["accuracy"] == result.accuracy
    assert "not for release" in summary["release_note"]
    assert json.loads((folder / "public" / "settings.json").read_text())["learning_rate"] == 0.3
    assert [
        json.loads(line)["step"] for line in (folder / "public" / "history.jsonl").read_text().splitlines()
    ] == [
        15,
        30,
    ]


def test_everybody_can_be_told_what_they_got(problem, tmp_path):
    plan = problem.plan()
    levels = tuple(dataclasses.replace(level, proven_epsilon=level.epsilon * 0.99) for level in plan.levels)
    problem.fit(plan=dataclasses.replace(plan, levels=levels).remember_proof(), run_folder=tmp_path)
    with (tmp_path / "people" / "promises.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 100
    assert rows[0] == {
        "id": "p0",
        "asked_epsilon": "1.0",
        "asked_delta": "1e-05",
        "proven_epsilon": "0.99",
        "proven_delta": "1e-05",
        "level": "0",
    }
    assert rows[99]["id"] == "p99"
    assert float(rows[99]["proven_epsilon"]) <= float(rows[99]["asked_epsilon"])


def test_sensitive_things_are_written_only_when_asked_for_and_say_so(problem, tmp_path):
    problem.fit(run_folder=tmp_path, sensitive=True, checkpoint_every=7)
    path = tmp_path / "private" / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(30))
    assert all(record["batch_size"] > 0 and record["training_loss"] > 0 for record in records)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_batch_in_pieces_is_one_line_of_the_sensitive_log(problem, tmp_path):
    logs = []
    for name, limit in (("whole", None), ("pieces", 7)):
        folder = tmp_path / name
        problem.fit(run_folder=folder, sensitive=True, max_physical_batch_size=limit)
        lines = (folder / "private" / "steps.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
    whole, pieces = logs
    assert [r["batch_size"] for r in pieces] == [r["batch_size"] for r in whole]
    assert len({r["step"] for r in pieces}) == len(pieces) == 30


def test_a_run_is_resumed_with_the_physical_batches_it_was_begun_with(problem, tmp_path, monkeypatch):
    from pdpsgd.training import fitting as training

    with pytest.raises(RuntimeError, match="stop here"):
        problem.fit(run_folder=tmp_path, checkpoint_every=5, schedule=_stops_after(0.6))
    monkeypatch.setattr(training, "CACHE_FRIENDLY", 100)
    resumed = problem.fit(run_folder=tmp_path, checkpoint_every=5, resume=True, schedule=_stops_after(2.0))
    assert resumed.settings["max_physical_batch_size"] == 512


def _stops_after(share):
    def cosine(progress):
        if progress > share:
            raise RuntimeError("stop here")
        return 1.0

    return cosine


def test_a_plan_that_tells_who_was_sampled_is_private(problem, tmp_path):
    levels = tuple(dataclasses.replace(level, proven_epsilon=None) for level in problem.plan().levels)
    why = "It tells who is in which round."
    plan = dataclasses.replace(problem.plan(), levels=levels, not_for_release=why)
    result = problem.fit(plan=plan, run_folder=tmp_path, seed=None)
    assert {"plan.json", "promises.csv"} <= {path.name for path in (tmp_path / "private").iterdir()}
    assert not list((tmp_path / "public").glob("plan*"))
    assert not list((tmp_path / "people").glob("*"))
    assert "not for release" in result.release_note


def test_the_saved_model_loads_without_pdpsgd(problem, tmp_path, flat):
    result = problem.fit(run_folder=tmp_path)
    bare = problem.model()
    bare.load_state_dict(safetensors.torch.load_file(tmp_path / "public" / "model.safetensors"))
    assert torch.equal(flat(result), torch.cat([p.detach().reshape(-1) for p in bare.parameters()]))


@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_loaders_and_datasets_train_like_tensors(problem, flat, kind):
    dataset = TensorDataset(*problem.data)
    data = DataLoader(dataset, batch_size=10, shuffle=True) if kind == "loader" else dataset
    assert torch.equal(flat(problem.fit(data=data)), flat(problem.fit()))


def test_people_without_a_record_keep_their_place(problem):
    numbers = np.arange(100)
    numbers[50:] = -1
    result = problem.fit(data=(problem.inputs[:50], problem.targets[:50]), record_of_person=numbers)
    assert result.plan.rounds[0].expected_batch_size == pytest.approx(28)


def test_rounds_with_a_fresh_model_give_one_model_each_weighted_as_adapdp_says(problem):
    plan = problem.plan(steps=(4, 5, 6), fresh=True)
    result = problem.fit(plan=plan, weight_average=None)
    assert [weight for weight, _ in result.models] == [100.0, 200.0, 300.0]
    outputs = [model.eval()(problem.test_inputs) for _, model in result.models]
    result.model.eval()
    combined = result.model(problem.test_inputs)
    torch.testing.assert_close(combined, (outputs[0] + 2 * outputs[1] + 3 * outputs[2]) / 6)
    assert not torch.equal(outputs[0], outputs[1])


def test_each_fresh_model_is_trained_from_the_start_on_its_own_round(problem, flat):
    """The first round's model is the one that a plan of that round alone gives."""
    rounds = problem.plan(steps=(4, 5), fresh=True)
    alone = problem.fit(plan=problem.plan(steps=(4,)))
    first = problem.fit(plan=rounds).models[0][1]
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in first.parameters()]), flat(alone))


def test_weight_averaging_averages_the_weights(problem):
    """With a learning rate of 0 after the first step the average tends to where the weights stay."""
    schedule = lambda progress: 1.0 if progress == 0 else 0.0  # noqa: E731
    plan = problem.plan(steps=(400,))
    averaged = problem.fit(plan=plan, schedule=schedule, momentum=0.0, weight_average=0.9)
    last = problem.fit(plan=plan, schedule=schedule, momentum=0.0, weight_average=None)
    for one, other in zip(averaged.model.parameters(), last.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_optimizers_and_schedules_go_by_name(problem, optimizer, schedule):
    options = {
        "optimizer": optimizer,
        "schedule": schedule,
        "momentum": 0.0,
        "plan": problem.plan(steps=(3,)),
    }
    result = problem.fit(learning_rate=0.01, **options)
    assert result.settings["optimizer"] == optimizer


def test_ones_own_optimizer_schedule_and_loss_are_taken(problem):
    def own_loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)

    result = problem.fit(
        optimizer=lambda parameters: torch.optim.NAdam(parameters),
        schedule=lambda progress: 0.5,
        loss=own_loss,
    )
    assert result.settings["loss"].endswith("own_loss")


@pytest.mark.parametrize(
    ("loss", "targets"), [("binary-cross-entropy", "binary"), ("squared-error", "numbers")]
)
def test_other_losses_than_cross_entropy_go_by_name(problem, loss, targets):
    def wanted(inputs, classes):
        return (classes == 0).float() if targets == "binary" else inputs.sum(1)

    model = nn.Linear(5, 1)
    result = problem.fit(
        model=model,
        data=(problem.inputs, wanted(*problem.data)),
        loss=loss,
        test_data=(problem.test_inputs, wanted(*problem.test)),
        learning_rate=0.1,
    )
    assert (result.accuracy is None) == (result.rmse is not None) == (targets == "numbers")
    assert result.evaluation.loss < 10


def test_a_loss_in_which_examples_mix_is_refused(problem):
    def centred(outputs, targets):
        return nn.functional.cross_entropy(outputs - outputs.mean(0), targets)

    with pytest.raises(PdpsgdError, match="Examples mix"):
        problem.fit(loss=centred)


def test_an_augmentation_is_applied_example_by_example(problem, flat):
    def jitter(inputs):
        return inputs + 0.1 * torch.randn_like(inputs)

    assert not torch.equal(flat(problem.fit(augment=jitter)), flat(problem.fit()))


def test_an_augmentation_that_mixes_the_examples_of_a_dataset_is_refused(problem):
    data = torch.utils.data.TensorDataset(*problem.data)
    with pytest.raises(PdpsgdError, match="one by one"):
        problem.fit(data=data, augment=lambda inputs: 0.5 * (inputs + inputs.flip(0)))


def test_an_augmentation_that_mixes_examples_is_refused(problem):
    with pytest.raises(PdpsgdError, match="one by one"):
        problem.fit(augment=lambda inputs: 0.5 * (inputs + inputs.flip(0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "Expected loss to be one of 'cross-entropy'"),
        ({"optimizer": "lion"}, "Expected optimizer to be one of 'sgd'"),
        ({"schedule": "up"}, "Expected schedule to be one of 'constant'"),
        ({"optimizer": "adam"}, "Expected momentum=0 with optimizer 'adam'"),
        ({"momentum": 0.0, "optimizer_options": {"beta": 1}}, "optimizer_options that SGD accepts"),
        ({"learning_rate": 0.0}, "learning_rate > 0"),
        ({"weight_average": 1.5}, "0 <= weight_average <= 1"),
        ({"resume": True}, "Expected run_folder"),
        ({"plan": None, "budgets": None}, "Expected budgets"),
        ({"test_budgets": 1, "test_tiers": [1], "test_data": 1}, "not both"),
    ],
)
def test_what_cannot_be_used_is_said_plainly(problem, options, message):
    with pytest.raises(PdpsgdError, match=message):
        problem.fit(**options)


def test_an_unwritable_folder_is_said_before_anything_is_trained(problem, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PdpsgdError, match="folder that can be written"):
        problem.fit(run_folder=tmp_path / "file" / "run")


def test_the_progress_bar_shows_public_things(problem, capsys):
    problem.fit(progress=True, test_data=problem.test, evaluate_every=10)
    shown = capsys.readouterr().err
    assert "100% spent" in shown
    assert "loss" not in shown


def test_limited_physical_batches_train_the_same_model(problem, flat):
    whole = problem.fit(model=_without_dropout(problem))
    limited = problem.fit(model=_without_dropout(problem), max_physical_batch_size=5)
    torch.testing.assert_close(flat(whole), flat(limited), rtol=1e-4, atol=1e-6)


def test_several_views_of_a_record_are_trained_on(problem, flat):
    def jitter(inputs):
        return inputs + 0.1 * torch.randn_like(inputs)

    one, four = problem.fit(augment=jitter), problem.fit(augment=jitter, views=4)
    assert not torch.equal(flat(one), flat(four))
    still = problem.fit(augment=lambda inputs: inputs, views=4, model=_without_dropout(problem))
    plain = problem.fit(model=_without_dropout(problem))
    torch.testing.assert_close(flat(still), flat(plain), rtol=1e-4, atol=1e-6)
    with pytest.raises(PdpsgdError, match="Expected augment"):
        problem.fit(views=4)


def _without_dropout(problem):
    model = problem.model()
    model[2] = nn.Identity()
    return model
