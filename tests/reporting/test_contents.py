"""What a page says, and what it must not say."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.accounting.history import Exposure
from pdpsgd.planning.as_published import plan_as_published
from pdpsgd.planning.verdict import verdict
from pdpsgd.reporting import run_page, write_run_report
from pdpsgd.reporting.charts import interval
from pdpsgd.reporting.plan import Check
from pdpsgd.reporting.run import _verdict, read_run
from pdpsgd.training.run_folder import without_people


def words(page: str) -> str:
    """The text of a page, without its scripts and styles."""
    bare = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", bare)))


def test_the_page_names_what_is_promised_proven_and_used(run_folder: Path) -> None:
    page = words((run_folder / "public" / "report.html").read_text())
    run = read_run(run_folder)
    assert f"The promise holds for {run.plan.people:,} of 200 people." in page
    for level in run.plan.levels:
        assert f"{level.proven_epsilon:.4g}" in page
    assert run.plan.digest in page
    assert "pdpsgd plan plan.json --verify" in page


def test_a_share_of_what_people_allow_is_not_called_what_they_allow(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert run.plan.ledger is not None
    page = (run_folder / "public" / "report.html").read_text()
    said = words(page)
    assert "of this run's share, used" in said
    assert "of what people allow, used" not in said
    assert said.index("Over all runs on these people") < said.index("This run's share, and what is proven")
    charts = [
        json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', page)
    ]
    titles = json.dumps(charts)
    assert "epsilon that is this run's share" in titles
    assert "epsilon that people allow" not in titles
    assert "promised" not in {axis for axis in re.findall(r'"title": "([^"]*)"', titles) if "mark" in axis}
    for level, allowed in zip(run.plan.levels, run.result["ledger"]["levels"], strict=True):
        assert allowed["allows"][0] >= level.epsilon > 0
        assert f"allow {allowed['allows'][0]:.4g}, share {level.epsilon:.4g}" in titles


def test_whoever_withdrew_has_no_share_that_is_spent(run_folder: Path) -> None:
    run = read_run(run_folder)
    tier = {**run.result["ledger"]["tiers"][0], "epsilon": 0.0, "share_before": 6e13, "share_this_run": 0.0}
    lowered = {**run.result["ledger"]["tiers"][1], "share_before": 4.2, "share_this_run": 0.0}
    ledger = {**run.result["ledger"], "tiers": [tier, lowered, *run.result["ledger"]["tiers"][2:]]}
    said = words(run_page(replace(run, result={**run.result, "ledger": ledger})))
    assert "nothing is allowed now" in said
    assert "more than is allowed now" in said
    assert "60000" not in said.replace(",", "")
    (share,) = re.findall(r"over all runs, spent \(mu²\) (\d+) %", said)
    assert int(share) <= 100


def test_without_a_ledger_the_promise_is_the_run_s(run_folder: Path) -> None:
    run = read_run(run_folder)
    alone = replace(run, plan=replace(run.plan, ledger=None), result={**run.result, "ledger": None})
    said = run_page(alone)
    assert "of what people allow, used" in words(said)
    assert "epsilon that people allow" in said
    assert "share" not in words(said).split("How often people were sampled")[0].replace("shares no code", "")


def test_a_page_of_an_earlier_version_does_without_what_levels_allow(run_folder: Path) -> None:
    run = read_run(run_folder)
    ledger = {name: value for name, value in run.result["ledger"].items() if name != "levels"}
    said = run_page(replace(run, result={**run.result, "ledger": ledger}))
    assert f'"share {run.plan.levels[0].epsilon:.4g}"' in said


def test_nobody_is_named_on_the_page(run_folder: Path) -> None:
    page = (run_folder / "public" / "report.html").read_text()
    rows = csv.DictReader((run_folder / "people" / "promises.csv").read_text().splitlines())
    names = [row["id"] for row in rows]
    assert len(names) > 100
    assert not any(name in page for name in names)


def test_figures_by_tier_and_class_count_test_people_only(run_folder: Path) -> None:
    run = read_run(run_folder)
    counted = sum(share["people"] for share in run.evaluation["by_class"].values())
    assert counted == run.evaluation["people"]
    listed = len((run_folder / "people" / "promises.csv").read_text().splitlines()) - 1
    assert counted + listed == 200


def test_names_from_the_data_cannot_become_markup(run_folder: Path) -> None:
    page = (run_folder / "public" / "report.html").read_text()
    assert "high &lt;&amp;&gt; rich" in page
    assert "<&>" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)


def test_a_script_in_a_name_stays_a_name(run_folder: Path) -> None:
    run = read_run(run_folder)
    attack = "</script><script>alert(1)</script>"
    page = run_page(replace(run, settings={**run.settings, "data": attack, "classes": [attack, "b"]}))
    assert "<script>alert" not in page


def test_the_file_is_complete_in_itself(run_folder: Path) -> None:
    page = (run_folder / "public" / "report.html").read_text()
    assert (
        re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', re.sub(r"<script.*?</script>", "", page, flags=re.S))
        == []
    )
    assert "default-src 'none'" in page


def test_a_run_with_a_guessable_seed_is_marked_as_not_for_release(run_folder: Path) -> None:
    run = read_run(run_folder)
    found = verdict(run.plan, verified=True, in_ledger=run.result["ledger"]["id"], seeded=True).to_dict()
    page = words(run_page(replace(run, result={**run.result, "verdict": found})))
    assert "This run is not for release." in page
    assert "come from a seed" in page


def test_a_page_over_people_above_their_budget_does_not_say_proven_for_all(run_folder: Path) -> None:
    """Also if the run's own file says that the promise holds for all."""
    run = read_run(run_folder)
    first = run.plan.levels[0]
    spent = 8 * first.epsilon
    earlier = (Exposure(1.0, 1.0, 0.5, 1),)
    levels = (replace(first, proven_epsilon=spent, history=earlier), *run.plan.levels[1:])
    over = replace(run.plan, levels=levels, history_fixed=True)
    holds = verdict(run.plan, verified=True, in_ledger=run.result["ledger"]["id"]).to_dict()
    shown = replace(run, plan=over, result={**run.result, "verdict": holds})
    page = words(_verdict(shown, Check()))
    assert "proven for all" not in page
    assert f"The promise holds for {over.people - first.people} of {over.people} people." in page
    assert "800.0 %" in page


def test_the_headline_is_that_of_the_verdict(run_folder: Path) -> None:
    run = read_run(run_folder)
    for circumstances, headline in (
        ({}, "The promise is proven for all"),
        ({"without_promise": 7}, f"The promise holds for {run.plan.people} of {run.plan.people + 7} people."),
        ({"schema_from_data": True}, "This run is not for release."),
    ):
        found = verdict(
            run.plan, verified=True, in_ledger=run.result["ledger"]["id"], **circumstances
        ).to_dict()
        page = words(run_page(replace(run, result={**run.result, "verdict": found})))
        assert headline in page
        assert ("The promise is proven for all" in page) == (not circumstances)
    earlier = {name: value for name, value in run.result.items() if name != "verdict"}
    assert "This run has no verdict." in words(run_page(replace(run, result=earlier)))


def test_the_page_tells_what_the_run_took_of_what_people_allow_over_all_runs(run_folder: Path) -> None:
    run = read_run(run_folder)
    page = words(run_page(run))
    assert "Over all runs on these people" in page
    assert "this is run 1 in it" in page
    assert run.result["ledger"]["head"] in page
    for tier in run.result["ledger"]["tiers"]:
        assert f"{tier['this_run']:.3g}" in page
    alone = {name: value for name, value in run.result.items() if name != "ledger"}
    page = words(run_page(replace(run, result=alone)))
    assert "This run is in no ledger." in page
    assert "The promise is proven for all" not in page  # its plan came from a ledger


def test_a_plan_that_proves_nothing_is_marked_so(run_folder: Path) -> None:
    approximate = plan(Budgets([1.0] * 50 + [2.0] * 50), steps=20, batch_size=20, accountant="gdp")
    page = words(run_page(replace(read_run(run_folder), plan=approximate)))
    assert "Nothing is proven." in page
    assert "The promise is proven" not in page


def test_a_plan_that_breaks_its_promise_is_called_out(run_folder: Path) -> None:
    run = read_run(run_folder)
    quieter = replace(run.plan.rounds[0], noise_multiplier=run.plan.rounds[0].noise_multiplier / 2)
    page = words(run_page(replace(run, plan=replace(run.plan, rounds=(quieter,)))))
    assert "The plan breaks its promise." in page
    assert "The promise is proven" not in page


def test_published_bookkeeping_is_never_called_a_kept_promise(run_folder: Path, tmp_path: Path) -> None:
    published = plan_as_published(
        Budgets([0.5] * 100 + [1.0] * 100), "pdp-sgd-fixed", steps=40, batch_size=20, seed=1
    )
    page = words(run_page(replace(read_run(run_folder), plan=published)))
    assert "No promise is kept here." in page

    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / "public" / "plan.json").write_text(published.to_json())
    edit(folder, "settings.json", plan=without_people(published).digest)
    edit(folder, "result.json", levels=None)
    assert write_run_report(folder) == folder / "private" / "report.html"


def edit(folder: Path, name: str, **values: object) -> None:
    path = folder / "public" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("file", ["plan.json", "settings.json", "audit.json", "result.json"])
def test_files_of_several_runs_are_no_run(run_folder: Path, tmp_path: Path, file: str) -> None:
    """A plan that proves less than what was trained by would otherwise stand under "the promise is proven"."""
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    assert read_run(folder).plan == read_run(run_folder).plan
    other = plan(Budgets([0.1] * 200, ids=[f"p{i}" for i in range(200)]), steps=3, batch_size=20)
    if file == "plan.json":
        (folder / "public" / file).write_text(without_people(other).to_json())
    elif file == "result.json":
        levels = read_run(folder).result["levels"]
        edit(
            folder,
            file,
            levels=[{**level, "proven_epsilon": level["proven_epsilon"] / 2} for level in levels],
        )
    else:
        (folder / "public" / file).touch()
        audited = (
            {"passed": True, "alarms": [], "confidence": 0.95, "rows": []} if file == "audit.json" else {}
        )
        (folder / "public" / file).write_text(json.dumps({**audited, "plan": without_people(other).digest}))
    with pytest.raises(PdpsgdError, match="Expected files of one run in"):
        read_run(folder)


@pytest.mark.parametrize("settings", [{"seed": 3}, {"secure": False}])
def test_settings_that_speak_against_a_release_are_believed_before_the_result(
    run_folder: Path, settings: dict[str, object]
) -> None:
    run = read_run(run_folder)
    sound = verdict(run.plan, verified=True, in_ledger=run.result["ledger"]["id"]).to_dict()
    kept = replace(run, result={**run.result, "verdict": sound}, audit=None)
    assert "The promise is proven for all" in words(run_page(kept))
    page = words(run_page(replace(kept, settings={**run.settings, **settings})))
    assert "The promise is proven" not in page
    assert "This run is not for release." in page


def test_what_settings_and_weights_say_against_a_release_outweighs_exceptions(
    run_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    run = read_run(folder)
    excepting = verdict(
        run.plan, verified=True, in_ledger=run.result["ledger"]["id"], without_promise=3
    ).to_dict()
    kept = replace(run, result={**run.result, "verdict": excepting}, audit=None)
    assert "The promise holds for" in words(run_page(kept))
    assert "This run is not for release." in words(
        run_page(replace(kept, settings={**run.settings, "seed": 3}))
    )
    weights = folder / "public" / "model.safetensors"
    with safe_open(weights, framework="numpy") as file:
        said = json.loads(file.metadata()["pdpsgd"])
    save_file(
        load_file(weights),
        weights,
        {"pdpsgd": json.dumps({**said, "not_for_release": "Noise was left out."})},
    )
    page = words(run_page(replace(kept, weights_say=read_run(folder).weights_say)))
    assert "This run is not for release." in page
    assert "Noise was left out." in page


def test_infinite_budgets_and_people_who_are_never_used_fit_on_the_page(run_folder: Path) -> None:
    budgets = Budgets([0.0, 1.0, 2.0, float("inf")] * 50, allow_infinite=True)
    page = words(run_page(replace(read_run(run_folder), plan=plan(budgets, steps=20, batch_size=20))))
    assert "no limit" in page


def test_many_levels_are_grouped_and_many_rounds_are_listed(run_folder: Path) -> None:
    budgets = Budgets.exponential(4000, groups=40)
    made = plan(budgets, "pdp-sgd-adaptive", steps=50, batch_size=100, rounds=3)
    page = words(run_page(replace(read_run(run_folder), plan=made)))
    assert "adjacent levels together" in page
    assert "Noise in each round" in page


def test_a_folder_without_a_run_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match=r"Expected a finished run .* There is no run\."):
        write_run_report(tmp_path)
    with pytest.raises(PdpsgdError, match="not a folder"):
        write_run_report(tmp_path / "nowhere")


def test_a_damaged_run_is_refused(run_folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "run"
    shutil.copytree(run_folder, damaged)
    plan_text = json.loads((damaged / "public" / "plan.json").read_text())
    del plan_text["levels"]
    (damaged / "public" / "plan.json").write_text(json.dumps(plan_text))
    with pytest.raises(PdpsgdError, match=r"plan.json: Expected a list .levels. in the plan"):
        write_run_report(damaged)


def test_the_comparison_says_who_gains_and_who_loses(comparison_file: Path) -> None:
    page = words(comparison_file.read_text())
    assert "pdp-sgd-exact (change)" in page
    assert "A comparison is for study" in page
    assert "secret-name" not in comparison_file.read_text()


def test_the_interval_of_a_share_holds_the_share_and_stays_between_0_and_1() -> None:
    for right, people in ((0.0, 5), (1.0, 5), (0.5, 100), (0.93, 360)):
        low, high = interval(right, people)
        assert 0 <= low <= right <= high <= 1


def test_an_audit_in_the_run_folder_is_shown_beside_what_is_proven() -> None:
    from pdpsgd.reporting.audit import audit_parts

    audit = {
        "passed": True,
        "alarms": [],
        "confidence": 0.95,
        "rows": [
            {"tier": "1", "promised": 1.0, "proven": 0.998, "measured": 0.21, "attack": "dirac canaries"},
            {"tier": "2", "promised": 2.0, "proven": None, "measured": 0.0, "attack": None},
        ],
    }
    text = "".join(audit_parts(audit))
    for expected in ("No alarm went off", "0.998", "0.21", "dirac canaries", "lower bound"):
        assert expected in text
    alarmed = "".join(audit_parts({**audit, "passed": False, "alarms": ["Noise is too small."]}))
    assert "An alarm went off: Noise is too small." in alarmed
    test = {"passed": True, "false_alarm_rate": 0.001, "checks": [{}] * 3}
    tested = {**audit, "conformance": {"noise": test, "network, little noise": test}, "blind_tiers": ["1"]}
    said = words("".join(audit_parts(tested)))
    assert (
        "The noise itself, in a run without records: as the plan says (3 checks; a false alarm in 0.001"
        in said
    )
    assert said.count("3 checks") == 1  # the network's canaries have records of people
    assert "Too few canaries to notice a doubled sampling rate in tier 1." in said


def test_an_alarm_of_an_audit_is_the_headline_and_a_silent_one_changes_nothing(run_folder: Path) -> None:
    run = read_run(run_folder)
    plain = words(_verdict(run, Check()))
    silent = {"passed": True, "alarms": [], "confidence": 0.95, "rows": []}
    assert words(_verdict(replace(run, audit=silent), Check())) == plain
    alarmed = words(
        _verdict(replace(run, audit={**silent, "passed": False, "alarms": ["tier 1 leaks"]}), Check())
    )
    assert "An audit of this run raised an alarm. tier 1 leaks." in alarmed
    assert "Do not publish" in alarmed
