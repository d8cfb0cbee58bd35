"""`pdpsgd train` and `pdpsgd compare`: own data without writing Python."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdpsgd import Plan

SMALL = ("--steps", "8", "--batch-size", "30", "--no-report", "--quiet")
TABLE = ("--label", "income", "--id-column", "person", "--delta-column", "delta")


def check(result: Any) -> None:
    assert result.exit_code == 0, (result.output, result.exception)


def test_a_table_becomes_a_folder_with_a_promise_for_each_person(
    run: Callable[..., Any], people: Path
) -> None:
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "run", "--json", "figures.json"))
    files = {path.name for path in Path("run/public").iterdir()}
    assert {"plan.json", "model.safetensors", "settings.json", "history.jsonl", "result.json"} <= files
    rows = list(csv.DictReader(Path("run/people/promises.csv").read_text().splitlines()))
    asked = {r["person"]: float(r["epsilon"]) for r in csv.DictReader(people.read_text().splitlines())}
    assert {row["id"]: float(row["asked_epsilon"]) for row in rows} == asked
    assert all(float(row["proven_epsilon"]) <= float(row["asked_epsilon"]) for row in rows)
    assert json.loads(Path("figures.json").read_text())["steps"] == 8


def test_a_schema_read_from_the_data_is_kept_apart_and_the_result_says_so(
    run: Callable[..., Any], people: Path
) -> None:
    loud = tuple(option for option in SMALL if option != "--quiet")
    result = run("train", people, *TABLE, *loud, "--run-folder", "run")
    assert "NOT covered by the privacy promise" in " ".join(result.output.split())
    drafts = [str(path) for path in Path("run").rglob("*schema*")]
    assert drafts == ["run/private/schema-draft.toml"]


def test_a_drafted_and_confirmed_schema_is_used_as_it_is(run: Callable[..., Any], people: Path) -> None:
    budgets = ("--epsilon-column", "epsilon", "--delta-column", "delta")
    check(
        run("data", "schema", people, "--label", "income", "--id-column", "person", *budgets, "-o", "s.toml")
    )
    text = Path("s.toml").read_text().replace("confirmed = false", "confirmed = true")
    Path("s.toml").write_text(text)
    check(
        run("train", people, "--schema", "s.toml", "--delta-column", "delta", *SMALL, "--run-folder", "run")
    )
    assert Path("run/public/schema.toml").exists()
    assert json.loads(Path("run/public/settings.json").read_text())["notes"] == []


def test_people_set_aside_to_test_on_are_off_the_list(run: Callable[..., Any], people: Path) -> None:
    check(
        run(
            "train",
            people,
            *TABLE,
            *SMALL,
            "--yes",
            "--test-share",
            "0.25",
            "--run-folder",
            "run",
            "--json",
            "f.json",
        )
    )
    tested = json.loads(Path("f.json").read_text())["evaluation"]["people"]
    assert Plan.from_json(Path("run/public/plan.json").read_text()).people == 120 - tested
    assert 10 < tested < 60


def test_somebody_on_the_list_may_have_supplied_nothing(run: Callable[..., Any], people: Path) -> None:
    lines = people.read_text().splitlines()
    listed = [
        "person,epsilon",
        *(f"{line.split(',')[0]},{line.split(',')[3]}" for line in lines[1:]),
        "shy,1",
    ]
    Path("list.csv").write_text("\n".join(listed) + "\n")
    check(run("train", people, *TABLE[:4], "--budgets", "list.csv", *SMALL, "--run-folder", "run"))
    assert Plan.from_json(Path("run/public/plan.json").read_text()).people == 121


def test_a_record_of_somebody_who_is_not_on_the_list_is_refused(
    run: Callable[..., Any], people: Path
) -> None:
    Path("list.csv").write_text("person,epsilon\n" + "".join(f"p{number},2\n" for number in range(100)))
    result = run("train", people, *TABLE[:4], "--budgets", "list.csv", *SMALL, "--run-folder", "run")
    assert result.exit_code == 2
    assert "on the list" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_list_apart_from_the_data_needs_ids(run: Callable[..., Any], people: Path, command: str) -> None:
    """With a row less in the data, everybody would get the budget of the person above them on the list."""
    lines = people.read_text().splitlines()
    Path("list.csv").write_text("\n".join(["epsilon", *(line.split(",")[3] for line in lines[1:])]) + "\n")
    options = ("--label", "income", "--budgets", "list.csv", "--one-row-per-person", *SMALL)
    result = run(command, people, *options)
    assert result.exit_code == 2
    assert "Expected an id for each person in list.csv (--id-column)" in " ".join(result.output.split())
    np.savez("images.npz", inputs=np.zeros((120, 6, 6), np.uint8), targets=np.arange(120) % 2)
    Path("list.csv").write_text("person,epsilon\n" + "".join(f"{number},2\n" for number in range(120)))
    listed = ("--budgets", "list.csv", "--id-column", "person")
    result = run(command, "images.npz", "--model", "linear", *listed, *SMALL)
    assert result.exit_code == 2
    assert "Expected an id for each person in images.npz" in " ".join(result.output.split())


def test_images_with_ids_are_matched_with_a_list_apart(run: Callable[..., Any], tmp_path: Path) -> None:
    images = {"inputs": np.zeros((60, 6, 6), np.uint8), "targets": np.arange(60) % 2}
    np.savez(tmp_path / "images.npz", **images, ids=np.arange(100, 160))
    Path("list.csv").write_text("person,epsilon\n" + "".join(f"{number},2\n" for number in range(99, 161)))
    listed = ("--budgets", "list.csv", "--id-column", "person", "--model", "linear")
    check(run("train", "images.npz", *listed, *SMALL, "--run-folder", "run"))
    assert Plan.from_json(Path("run/public/plan.json").read_text()).people == 62


def test_images_from_an_npz_file_train_the_user_s_own_network(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 255, (80, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", inputs=inputs, targets=rng.integers(0, 3, 80), classes=["a", "b", "c"])
    (tmp_path / "my_own_networks.py").write_text(
        "from torch import nn\n"
        "def tiny(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))\n"
    )
    model = ("--model", "my_own_networks:tiny")
    check(run("train", "images.npz", "--tiers", "1:0.5,4:0.5", *model, *SMALL, "--run-folder", "run"))
    assert json.loads(Path("run/public/settings.json").read_text())["model"] == "my_own_networks:tiny"


def test_settings_come_from_a_file_and_the_command_line_comes_first(
    run: Callable[..., Any], people: Path
) -> None:
    Path("run.toml").write_text(
        'label = "income"\nid-column = "person"\ndelta_column = "delta"\nsteps = 5\nlearning-rate = 0.25\n'
    )
    check(run("train", people, "--config", "run.toml", *SMALL, "--run-folder", "run"))
    assert json.loads(Path("run/public/settings.json").read_text())["learning_rate"] == 0.25
    assert Plan.from_json(Path("run/public/plan.json").read_text()).steps == 8


def test_a_preset_says_what_neither_the_file_nor_the_command_line_says(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from pdpsgd.training.presets import PRESETS, preset

    small = {"name": "small", "dataset": "digits", "model": "digits", "features": "pixels", "steps": 6}
    monkeypatch.setitem(PRESETS, "small", replace(preset("mnist"), batch_size=20, **small))
    Path("run.toml").write_text("momentum = 0.5\n")
    given = ("--tiers", "1:0.5,4:0.5", "--steps", "7", "--config", "run.toml", "--no-report", "--quiet")
    check(run("train", "digits", "--preset", "small", *given, "--run-folder", "run"))
    plan = Plan.from_json(Path("run/public/plan.json").read_text())
    assert (plan.steps, plan.max_grad_norm) == (7, 0.1)
    assert plan.rounds[0].expected_batch_size == pytest.approx(20, rel=0.01)
    settings = json.loads(Path("run/public/settings.json").read_text())
    assert (settings["learning_rate"], settings["momentum"], settings["model"]) == (30.0, 0.5, "digits")
    assert (settings["augment"], settings["views"]) == ("shifts", 4)
    assert settings["preset"] == "small"


def test_a_preset_is_audited_as_it_was_trained(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from pdpsgd.audit.targets import plan_and_settings, target_of
    from pdpsgd.training.presets import PRESETS, preset

    small = {"name": "small", "dataset": "digits", "steps": 3, "batch_size": 20}
    monkeypatch.setitem(PRESETS, "small", replace(preset("mnist-scattering"), **small))
    given = ("--preset", "small", "--tiers", "1:1", "--no-report", "--quiet")
    check(run("train", "digits", *given, "--run-folder", "run"))
    plan, settings = plan_and_settings("run")
    subject = target_of(plan, "digits", model=settings["model"], preset=settings["preset"])
    assert subject.inputs.shape[1:] == (81, 2, 2)
    first = next(subject.make_model().parameters())
    assert first.shape == (10, 324)
    assert not first.any(), "the preset's linear model starts at zero"


def test_a_preset_that_starts_from_drawn_digits_shows_its_progress_and_is_audited_from_there(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace
    from functools import partial

    import torch

    from pdpsgd.audit.targets import plan_and_settings, target_of
    from pdpsgd.models import pretraining as starts
    from pdpsgd.training.presets import PRESETS, preset

    small = {"name": "small", "dataset": "digits", "model": "digits", "steps": 3, "batch_size": 20}
    monkeypatch.setitem(PRESETS, "small", replace(preset("mnist-drawn"), **small))
    monkeypatch.setattr(starts, "start_from_synthetic", partial(starts.start_from_synthetic, pictures=300))
    given = ("--preset", "small", "--tiers", "1:1", "--no-report", "--seed", "0")
    result = run("train", "digits", *given, "--run-folder", "run")
    check(result)
    assert "Digits generated" in result.stderr
    plan, settings = plan_and_settings("run")
    named = {key: settings[key] for key in ("model", "activation", "preset")}
    subject = target_of(plan, "digits", **named)
    one, other = (torch.cat([p.flatten() for p in subject.make_model().parameters()]) for _ in range(2))
    assert torch.equal(one, other)
    assert settings["start"] == "drawn"
    changed = run("train", "digits", *given, "--activation", "relu", "--run-folder", "changed")
    check(changed)
    assert "Digits generated" in changed.stderr, "another activation starts from drawn digits, too"
    finished = Path("run/public/model.safetensors").read_bytes()
    resumed = run("train", "digits", *given, "--run-folder", "run", "--resume")
    assert "Digits generated" not in resumed.stderr, "a run that goes on has its weights already"
    assert Path("run/public/model.safetensors").read_bytes() == finished


def test_who_resumes_without_the_options_is_told_which_the_run_began_with(
    run: Callable[..., Any], people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error named what was missing (--label), as if it were a new run."""
    from pdpsgd.engine.optimizer import PrivateOptimizer

    step, taken = PrivateOptimizer.step, []

    def interrupted(self: Any, closure: Any = None) -> Any:
        taken.append(self)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(self, closure)

    given = ("train", people, *TABLE, *SMALL, "--run-folder", "run")
    with monkeypatch.context() as patched:
        patched.setattr(PrivateOptimizer, "step", interrupted)
        assert run(*given).exit_code != 0
    for arguments in (("train", people), ("train", people, *TABLE, "--optimizer", "adam")):
        result = run(*arguments, "--run-folder", "run", "--resume")
        assert result.exit_code == 2
        said = " ".join(result.output.split())
        assert "--resume remembers no options: repeat the whole command" in said
        assert f"It was begun with: pdpsgd train {people} " in said
        assert "--label income" in said
        assert "--steps 8" in said
    check(run(*given, "--resume"))
    new = run("train", people, "--run-folder", "other")
    assert "--resume remembers" not in new.output


def test_a_network_that_starts_at_random_has_no_progress_to_show_before_training(
    run: Callable[..., Any],
) -> None:
    given = ("--steps", "3", "--batch-size", "20", "--tiers", "1:1", "--no-report", "--seed", "0")
    result = run("train", "digits", *given, "--run-folder", "run")
    check(result)
    assert not result.stderr.startswith("\n")


def test_a_preset_s_learning_rate_is_for_its_norm_and_its_steps_for_no_noise_in_particular(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from pdpsgd.training.presets import PRESETS, preset

    small = {"name": "small", "dataset": "digits", "model": "digits", "batch_size": 20}
    monkeypatch.setitem(PRESETS, "small", replace(preset("mnist"), **small))
    given = ("train", "digits", "--preset", "small", "--tiers", "1:1", "--no-report", "--quiet")
    refused = run(*given, "--max-grad-norm", "1.0", "--steps", "3")
    assert refused.exit_code == 2
    assert "learning_rate of your own" in refused.output
    check(run(*given, "--max-grad-norm", "1.0", "--steps", "3", "--lr", "2", "--run-folder", "own"))
    check(run(*given, "--noise-multiplier", "1.1", "--run-folder", "noise"))
    assert Plan.from_json(Path("noise/public/plan.json").read_text()).rounds[0].noise_multiplier == 1.1


@pytest.mark.parametrize(("name", "message"), [("mnist", "'mnist' for preset"), ("cifar", "fashion-mnist")])
def test_a_preset_of_other_data_or_none_at_all_is_refused(
    run: Callable[..., Any], name: str, message: str
) -> None:
    result = run("train", "digits", "--preset", name, "--tiers", "1:1", *SMALL)
    assert result.exit_code == 2
    assert message in result.output


def test_tiers_in_a_settings_file_are_a_table(run: Callable[..., Any], people: Path) -> None:
    Path("run.toml").write_text("[tiers]\n1 = 0.5\n3 = 0.5\n")
    check(run("train", people, *TABLE[:4], "--config", "run.toml", *SMALL, "--run-folder", "run"))
    plan = Plan.from_json(Path("run/public/plan.json").read_text())
    assert [level.epsilon for level in plan.levels] == [1, 3]


def test_an_unknown_setting_is_refused_with_a_suggestion(run: Callable[..., Any], people: Path) -> None:
    Path("run.toml").write_text("learningrate = 1\n")
    result = run("train", people, "--config", "run.toml")
    assert result.exit_code == 2
    assert "Is it 'learning-rate'" in result.output  # as the pages write it


def test_a_ready_plan_is_verified_before_it_is_used(run: Callable[..., Any], people: Path) -> None:
    budgets = ("--id-column", "person", "--delta-column", "delta")
    check(
        run("plan", people, *budgets, "--steps", "8", "--batch-size", "30", "--json", "plan.json", "--quiet")
    )
    made = json.loads(Path("plan.json").read_text())
    made["rounds"][0]["noise_multiplier"] /= 3
    Path("broken.json").write_text(json.dumps(made))
    check(run("train", people, *TABLE, "--plan", "plan.json", *SMALL, "--run-folder", "one"))
    result = run("train", people, *TABLE, "--plan", "broken.json", *SMALL, "--run-folder", "two")
    assert result.exit_code == 2
    assert "Do not train with this plan" in " ".join(result.output.split())


def test_a_second_run_on_the_same_people_counts_the_first(run: Callable[..., Any], people: Path) -> None:
    uniform = ("--mechanism", "dp-sgd", "--run-folder", "first", "--no-ledger")
    check(run("train", people, *TABLE, *SMALL, *uniform))
    again = (*TABLE, *SMALL, "--history", "first/public/plan.json", "--run-folder", "second")
    check(run("train", people, *again))
    alone = Plan.from_json(Path("first/public/plan.json").read_text())
    both = Plan.from_json(Path("second/public/plan.json").read_text())
    assert [level.epsilon for level in both.levels] == [1, 2, 4]
    assert both.rounds[-1].sample_rates[0] < 0.1 * alone.rounds[0].sample_rates[0]  # nearly all of 1 is spent
    assert both.verify().kept
    result = run("train", people, *again, "--plan", "first/public/plan.json")
    assert result.exit_code == 2


def test_a_run_that_set_people_aside_is_counted_though_people_allow_more_now(
    run: Callable[..., Any], people: Path
) -> None:
    first = ("--yes", "--test-share", "0.25", "--mechanism", "dp-sgd", "--run-folder", "first")
    check(run("train", people, *TABLE, *SMALL, *first))
    header, *lines = people.read_text().splitlines()
    place = header.split(",").index("epsilon")
    more = [line.split(",") for line in lines]
    for row in more:
        row[place] = str(2 * float(row[place]))
    people.write_text("\n".join([header, *map(",".join, more)]) + "\n")
    again = ("--yes", "--test-share", "0.25", "--history", "first/public/plan.json", "--run-folder", "second")
    check(run("train", people, *TABLE, *SMALL, *again))
    both = Plan.from_json(Path("second/public/plan.json").read_text())
    assert any(level.history for level in both.levels)
    assert both.verify().kept


def test_rows_without_ids_are_no_names(run: Callable[..., Any], people: Path) -> None:
    """A row that was added since moves everybody by one: row 7 of then is not row 7 of now."""
    anonymous = ("--label", "income", "--delta-column", "delta", "--one-row-per-person")
    check(run("train", people, *anonymous, *SMALL, "--mechanism", "dp-sgd", "--run-folder", "first"))
    again = (*anonymous, *SMALL, "--history", "first/public/plan.json", "--run-folder", "second")
    header, *lines = people.read_text().splitlines()
    people.write_text("\n".join([header, lines[-1], *lines[:-1]]) + "\n")
    result = run("train", people, *again)
    assert result.exit_code == 2
    assert "--history-budgets" in result.output
    people.write_text("\n".join([header, *lines]) + "\n")
    check(run("train", people, *again))
    assert Plan.from_json(Path("second/public/plan.json").read_text()).people_digest.startswith("places:")


def test_a_finished_run_is_not_trained_over(run: Callable[..., Any], people: Path) -> None:
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "run"))
    result = run("train", people, *TABLE, *SMALL, "--run-folder", "run")
    assert result.exit_code == 2
    assert "without a finished run" in result.output


def test_without_a_folder_each_run_gets_a_new_one(run: Callable[..., Any], people: Path) -> None:
    for _ in range(2):
        check(run("train", people, *TABLE, *SMALL))
    assert {path.name for path in Path("runs").iterdir()} == {
        "people-pdp-sgd-exact",
        "people-pdp-sgd-exact-2",
    }


def test_batch_sizes_and_losses_are_written_only_if_asked_for(run: Callable[..., Any], people: Path) -> None:
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "usual"))
    check(run("train", people, *TABLE, *SMALL, "--run-folder", "asked", "--sensitive"))
    usual = "".join(path.read_text() for path in Path("usual/public").glob("*.json*"))
    assert "batch_size" not in usual.replace("expected_batch_size", "").replace("physical_batch_size", "")
    assert "training_loss" not in usual
    assert Path("asked/private/steps.jsonl").exists()
    assert not Path("usual/private/steps.jsonl").exists()


def test_a_comparison_puts_mechanisms_side_by_side(run: Callable[..., Any], people: Path) -> None:
    options = ("--mechanisms", "dp-sgd,pdp-sgd-exact", "--seeds", "2", "--yes", "--test-share", "0.3")
    check(run("compare", people, *TABLE, *options, *SMALL, "--json", "c.json"))
    found = json.loads(Path("c.json").read_text())
    uniform, personal = found["outcomes"]
    assert uniform["mechanism"] == "dp-sgd"
    assert uniform["used"] < personal["used"]
    assert uniform["seeds"] == personal["seeds"] == [0, 1]


def test_the_same_seeds_give_the_same_comparison(run: Callable[..., Any], people: Path) -> None:
    options = ("--mechanisms", "pdp-sgd-exact", "--seeds", "1", "--yes", "--test-share", "0.3")
    for name in ("one.json", "two.json"):
        check(run("compare", people, *TABLE, *options, *SMALL, "--json", name))
    one, two = (json.loads(Path(name).read_text())["outcomes"][0] for name in ("one.json", "two.json"))
    assert one["history"] == two["history"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits"), "Expected what people allow"),
        (("train", "people.csv"), "--label"),
        (("train", "nothing.csv", "--label", "x"), "There is no such file"),
        (("train", "people.csv", *TABLE, "--test-share", "1.5"), "test_share"),
        (("train", "people.csv", *TABLE, "--resume"), "--run-folder"),
        (("train", "people.csv", *TABLE, "--model", "nothing:here"), "nothing:here"),
        (("train", "people.csv", *TABLE, "--optimizer-option", "nesterov"), "name=value"),
        (("compare", "people.csv", *TABLE), "Expected test people"),
        (("compare", "people.csv", *TABLE, "--yes", "--test-share", "0.3", "--seeds", "0"), "--seeds >= 1"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(
    run: Callable[..., Any], people: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments, "--steps", "3", "--batch-size", "20")
    assert result.exit_code == 2, result.exception
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
