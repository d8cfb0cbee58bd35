"""A reproduction runs what is missing, records it run by run, and makes pages from records alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments import runner
from experiments.__main__ import app
from experiments.cells import cell
from experiments.effort import measure
from experiments.inputs import features_of
from experiments.overview import write_overview
from experiments.published import SKEWS, TABLE_1, TABLE_1_SYSTEMS, best_of_paper
from experiments.record import Record
from experiments.reproduce import reproduce, write_pages
from experiments.search import chosen_recipe, trials
from experiments.settings import PAPERS_RECIPE, Population, Recipe, Setting
from experiments.studies import (
    NOISE_AS_PUBLISHED,
    STUDIES,
    as_published_settings,
    noise_settings,
    table_1_settings,
)
from experiments.systems import SYSTEMS, plan_of, published_of
from experiments.tables import PAGES
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.standardization import standardized_images

SMALL = Recipe(steps=6, batch_size=64, learning_rate=1.0)


FOUR_GROUPS = Population(groups=4)


def small(
    system: str = "pdp-sgd-exact",
    population: Population = FOUR_GROUPS,
    bookkeeping: str = "sound",
    accountant: str = "pld",
    split: str = "test",
) -> Setting:
    threshold = 0.75 if system == "leave-out" else None
    return Setting(
        "digits", system, SMALL, population, bookkeeping, accountant, threshold=threshold, split=split
    )


def made_up(setting: Setting, seed: int, accuracy: float) -> dict[str, object]:
    """A record of a run that never was, to test pages with."""
    level = {"epsilon": 0.5, "delta": 1e-5, "people": 1, "proven_epsilon": 0.4}
    return {
        "key": setting.key(seed),
        "setting": setting.to_dict(),
        "seed": seed,
        "accuracy": accuracy,
        "iterations": 7,
        "seconds": 1.0,
        "parameters": 10,
        "levels": [level],
    }


def test_a_setting_survives_the_way_through_json() -> None:
    setting = Setting(
        "mnist",
        "pdp-sgd-fixed",
        PAPERS_RECIPE,
        Population(tiers=((1.0, 0.4), (2.0, 0.6))),
        weights=(0.3, 0.7),
    )
    assert Setting.from_dict(json.loads(json.dumps(setting.to_dict()))) == setting


def test_a_run_on_record_is_known_by_value(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    setting = small()
    assert not record.has(setting, 0)
    as_float = replace(setting, recipe=replace(setting.recipe, batch_size=float(setting.recipe.batch_size)))
    record.add(made_up(as_float, 0, 0.9))
    assert record.has(setting, 0)
    assert not record.has(setting, 1)
    assert not record.has(replace(setting, loss="adaptive-as-printed"), 0)
    record.add(made_up(setting, 1, 0.8))
    assert [run["seed"] for run in record.of(setting)] == [0, 1]


def test_the_key_of_a_run_changes_with_the_seed_and_with_every_part_of_the_setting() -> None:
    settings = [small(), small("dp-sgd"), small(population=Population(k=0.2)), small(split="validation")]
    keys = {setting.key(seed) for setting in settings for seed in (0, 1)}
    assert len(keys) == 8


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_keeps_every_promise(system: str) -> None:
    setting = small(system)
    budgets = setting.population.budgets(1437, shuffle=0)
    made = plan_of(setting, budgets, seed=0)
    assert made.steps <= 6
    for level in made.levels:
        assert level.proven_epsilon is not None
        assert level.proven_epsilon <= level.epsilon


def test_leaving_out_never_draws_those_below_the_threshold() -> None:
    setting = small("leave-out")
    made = plan_of(setting, setting.population.budgets(1437, shuffle=0), seed=0)
    rates = {
        level.epsilon: rate for level, rate in zip(made.levels, made.rounds[0].sample_rates, strict=True)
    }
    assert all((rate > 0) == (epsilon >= 0.75) for epsilon, rate in rates.items())


def test_one_tier_after_another_exposes_everybody_in_exactly_one_round() -> None:
    setting = small("one-after-another")
    made = plan_of(setting, setting.population.budgets(1437, shuffle=0), seed=0)
    assert len(made.rounds) == 4
    for index in range(len(made.levels)):
        assert sum(r.sample_rates[index] > 0 for r in made.rounds) == 1


def test_a_run_records_what_was_promised_and_what_is_proven(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    said: list[str] = []
    assert runner.run_all([(small(), 3)], record, say=said.append) == 1
    (run,) = record
    assert run["seed"] == 3
    assert run["iterations"] == 6
    assert 0 <= run["accuracy"] <= 1
    assert len(run["levels"]) == 4
    assert all(level["proven_epsilon"] <= level["epsilon"] for level in run["levels"])
    assert {"torch", "pdpsgd", "python"} <= set(run["versions"])
    assert "seed 3" in said[0]


def test_a_run_that_is_on_record_is_not_done_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    record.add(made_up(small(), 0, 0.5))
    assert runner.run_all([(small(), 0)], record) == 0
    assert len(list(record)) == 1


def test_as_published_records_state_the_larger_bound_and_tell_nobody_who_was_drawn() -> None:
    setting = small("pdp-sgd-adaptive", bookkeeping="as-published", accountant="rdp")
    made, claims = published_of(setting, setting.population.budgets(1437, shuffle=0), seed=0)
    levels = runner.summary_of_levels(made, claims)
    assert len(made.levels) > len(levels) == 4
    assert all(level["proven_epsilon"] is None for level in levels)
    assert all(level["claimed_epsilon"] <= level["epsilon"] for level in levels)
    assert any(level["provable_epsilon"] > level["epsilon"] for level in levels)


def test_the_search_chooses_only_when_every_candidate_was_tried(tmp_path: Path) -> None:
    record = Record(tmp_path / "search.jsonl")
    candidates = trials("mnist", "dp-sgd")
    record.add(made_up(candidates[0], 0, 0.9))
    assert chosen_recipe(record, candidates) is None
    for setting in candidates[1:]:
        record.add(made_up(setting, 0, 0.8))
    assert chosen_recipe(record, candidates) == candidates[0].recipe


def test_a_cell_without_runs_is_empty_and_one_run_has_no_deviation(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    assert cell(small(), record).text() == ""
    record.add(made_up(small(), 0, 0.5))
    assert cell(small(), record).text() == "50.00 (1)"


def test_pages_show_ours_and_the_papers_figures_side_by_side(tmp_path: Path) -> None:
    search, record = Record(tmp_path / "search.jsonl"), Record(tmp_path / "runs.jsonl")
    for setting in trials("mnist", "pdp-sgd-adaptive"):
        search.add(made_up(setting, 0, 0.9))
    (setting,) = (s for s in table_1_settings("mnist", search) if s.population.k == 0)
    for seed, accuracy in enumerate((0.95, 0.96)):
        record.add(made_up(setting, seed, accuracy))
    text = PAGES["table-1"](search, record).markdown
    assert "| 95.50 ± 0.71 (2) | 95.05 ± 0.44 |" in text
    assert "svhn" not in text


def test_without_records_every_page_can_be_written_and_claims_nothing(tmp_path: Path) -> None:
    search, record = Record(tmp_path / "search.jsonl"), Record(tmp_path / "runs.jsonl")
    for make in PAGES.values():
        page = make(search, record)
        assert all(found.seeds == 0 for found in page.cells)
        assert len(page.write(tmp_path)) == 2


def test_the_distributions_come_out_as_png_and_svg(tmp_path: Path) -> None:
    written = write_pages("distributions", Record(tmp_path / "a"), Record(tmp_path / "b"), tmp_path)
    assert {path.suffix for path in written if path.parent.name == "figures"} == {".png", ".svg"}
    assert all(path.stat().st_size > 1000 for path in written if path.parent.name == "figures")


def test_the_papers_table_is_complete() -> None:
    assert len(TABLE_1) == 3 * len(SKEWS) * len(TABLE_1_SYSTEMS)
    assert [best_of_paper(name).mean for name in ("mnist", "fashion-mnist", "svhn")] == [95.19, 79.81, 77.50]


def test_the_papers_set_up_is_the_papers() -> None:
    settings = as_published_settings("mnist", Record("nowhere.jsonl"))
    assert {s.system for s in settings} == set(TABLE_1_SYSTEMS)
    assert all(s.recipe == PAPERS_RECIPE and s.accountant == "rdp" for s in settings)
    assert len(settings) == 13  # DP-SGD does not depend on k


def test_unknown_names_are_refused_with_what_would_be_accepted(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match=r"table-1.*table-3"):
        reproduce("table-3", output=tmp_path)
    with pytest.raises(PdpsgdError, match="cifar"):
        reproduce("table-1", output=tmp_path, datasets=["cifar"], quick=True)
    with pytest.raises(PdpsgdError, match="'pdp-sgd-exakt'"):
        reproduce("table-1", output=tmp_path, datasets=["digits"], systems=["pdp-sgd-exakt"])
    with pytest.raises(PdpsgdError, match="Got 3/2"):
        reproduce("table-1", output=tmp_path, datasets=["digits"], quick=True, part=(3, 2))


def test_systems_and_skews_leave_out_the_other_runs_and_searches(tmp_path: Path) -> None:
    said: list[str] = []
    reproduce(
        "table-1",
        output=tmp_path,
        datasets=["digits"],
        systems=["pdp-sgd-exact"],
        skews=[0.2],
        seeds=2,
        quick=True,
        say=said.append,
    )
    runs = list(Record(tmp_path / "quick" / "runs.jsonl"))
    assert [run["seed"] for run in runs] == [0, 1]
    searched = Record(tmp_path / "quick" / "search.jsonl")
    assert {run["setting"]["system"] for run in [*runs, *searched]} == {"pdp-sgd-exact"}
    assert {run["setting"]["population"]["k"] for run in runs} == {0.2}
    begun = [line for line in said if line.startswith("run ") and "k=0.2" in line]
    assert [line.split(":")[0] for line in begun] == ["run 1 of 2", "run 2 of 2"]


def test_a_reproduction_that_was_stopped_says_what_is_kept_and_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, said = Record(tmp_path / "runs.jsonl"), []
    runs = [(small(), seed) for seed in range(3)]

    def stopped(setting: Setting, seed: int, *, progress: bool) -> dict[str, object]:
        if seed == 1:
            raise KeyboardInterrupt
        return {**made_up(setting, seed, 0.9), "seconds": 1.0}

    with monkeypatch.context() as patched:
        patched.setattr(runner, "run", stopped)
        with pytest.raises(KeyboardInterrupt, match=r"the 1 that were finished .*runs\.jsonl.*same command"):
            runner.run_all(runs, record, say=said.append)
    assert [run["seed"] for run in record] == [0]
    assert runner.run_all(runs, record, say=said.append) == 2
    assert f"1 of 3 runs are on record in {record.path}" in said
    assert [run["seed"] for run in record] == [0, 1, 2]


def test_every_study_names_its_searches_and_settings(tmp_path: Path) -> None:
    for study in STUDIES.values():
        assert study.datasets
        for dataset in study.datasets:
            assert all(s.split == "validation" for trial in study.searches(dataset) for s in trial)
        study.settings("digits", Record(tmp_path / "none.jsonl"))  # for a first look, without benchmark files


def test_the_command_writes_a_figure_and_says_where(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["distributions", "--output", str(tmp_path), "--json"])
    assert answer.exit_code == 0, answer.output
    files = json.loads(answer.stdout)["files"]
    assert str(tmp_path / "figures" / "epsilon-distributions.svg") in files


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["pages", "--part", "half"], "Got 'half'."), (["table-9"], "Got what='table-9'.")],
)
def test_a_mistake_ends_with_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
    assert answer.exit_code == 2
    assert said in answer.stderr
    assert "Traceback" not in answer.output
    assert list(tmp_path.iterdir()) == []


def test_after_ctrl_c_the_command_says_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("1 of 3 runs are on record")

    monkeypatch.setattr("experiments.reproduce.write_pages", interrupted)
    answer = CliRunner().invoke(app, ["pages", "--output", str(tmp_path)])
    assert answer.exit_code == 130
    assert "1 of 3 runs are on record" in answer.stderr


def test_the_module_runs_and_has_help() -> None:
    for arguments in (["--help"], []):
        command = [sys.executable, "-m", "experiments", *arguments]
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
        )
        assert "python -m experiments table-1 --dataset mnist" in answer.stdout, answer.stderr


def test_a_system_that_was_not_searched_borrows_a_recipe_and_the_table_says_so(tmp_path: Path) -> None:
    search, record = Record(tmp_path / "search.jsonl"), Record(tmp_path / "runs.jsonl")
    for setting in trials("mnist", "pdp-sgd-exact"):
        search.add(made_up(setting, 0, 0.9))
    settings = {s.system: s for s in table_1_settings("mnist", search) if s.population.k == 0}
    assert settings["sampling"].recipe == settings["pdp-sgd-exact"].recipe
    for name in ("sampling", "pdp-sgd-exact"):
        record.add(made_up(settings[name], 0, 0.9))
    text = PAGES["table-1"](search, record).markdown
    assert "| sampling |  | 92.57 ± 0.13 | 90.00 (1) * |" in text
    assert "| pdp-sgd-exact |  |  | 90.00 (1) |" in text


def test_effort_counts_iterations_and_models_from_the_plan() -> None:
    setting = small("adapdp", bookkeeping="as-published", accountant="rdp")
    (found,) = measure([setting], turns=3, steps=2)
    assert len(found["turns"]) == 3
    made = plan_of(setting, setting.population.budgets(1437, shuffle=0), seed=0)
    assert found["iterations"] == made.steps
    assert found["models"] == len(made.rounds) > 1
    assert found["parameters"] == found["models"] * 2410


def test_the_overview_says_how_much_is_done(tmp_path: Path) -> None:
    search, record = Record(tmp_path / "search.jsonl"), Record(tmp_path / "runs.jsonl")
    record.add(made_up(as_published_settings("mnist", search)[0], 0, 0.9))
    (path,) = write_overview(search, record, tmp_path)
    text = path.read_text()
    assert (
        "| `python -m experiments table-1-as-published --dataset mnist` | MNIST | none needed | 1 of 39 |"
        in text
    )
    assert "90.00" not in text


def test_unit_pixels_are_those_of_the_files() -> None:
    found = features_of("digits", "unit-pixels")
    for inputs in (found.train_inputs, found.test_inputs):
        assert inputs.min() == pytest.approx(0, abs=1e-6)
        assert inputs.max() == pytest.approx(1, abs=1e-6)
    normalised = features_of("digits", "pixels")
    assert normalised.train_inputs.min() < -0.5
    assert torch.equal(found.train_targets, normalised.train_targets)


def test_standardised_pixels_have_like_brightness_and_contrast() -> None:
    found = features_of("digits", "standardised-pixels")
    for inputs in (found.train_inputs, found.test_inputs):
        assert inputs.mean((1, 2, 3)).abs().max() < 1e-5
        assert inputs.square().mean((1, 2, 3)) == pytest.approx(torch.ones(len(inputs)), abs=1e-4)


def test_an_image_is_standardised_by_itself_alone() -> None:
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    together = standardized_images(images)
    for index, image in enumerate(images):
        assert torch.allclose(standardized_images(image[None])[0], together[index], atol=1e-6)
        assert torch.allclose(standardized_images(3 * image[None] + 7)[0], together[index], atol=1e-5)
    faint = 0.001 * images
    assert standardized_images(faint).abs().max() < 0.1


def test_noise_by_noise_everybody_allows_what_it_costs() -> None:
    for dataset in ("mnist", "svhn"):
        settings = noise_settings(dataset, Record(Path("none.jsonl")))
        allowed = [setting.population.tiers[0][0] for setting in settings]
        assert allowed == sorted(allowed)
        assert {setting.recipe.noise_multiplier for setting in settings} == set(NOISE_AS_PUBLISHED)


def test_every_study_has_a_page_or_a_figure_that_its_command_writes() -> None:
    from experiments.reproduce import SHOWN_ON
    from experiments.studies import STUDIES
    from experiments.tables import PAGES

    figures = {"weights", "intervals"}
    assert {name for name in STUDIES if SHOWN_ON.get(name, name) not in PAGES} == figures
