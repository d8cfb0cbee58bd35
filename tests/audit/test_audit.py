"""The whole audit: one call, a table, JSON, charts and the command."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.audit.audit_target import AuditTarget
from pdpsgd.audit.auditing import audit
from pdpsgd.audit.result import AuditResult
from pdpsgd.audit.targets import plan_and_settings
from pdpsgd.cli.audit import audit as command
from pdpsgd.planning.as_published import plan_as_published
from pdpsgd.planning.plans import Plan
from pdpsgd.reporting.charts.audit import membership_curves, proven_against_measured

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(Budgets(np.repeat([1.0, 4.0], 60)), steps=20, batch_size=20)


@pytest.fixture(scope="module")
def found(made: Plan) -> AuditResult:
    torch.manual_seed(0)
    inputs, targets = torch.randn(120, 8), torch.randint(3, (120,))
    target = AuditTarget(
        make_model=lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)),
        inputs=inputs,
        targets=targets,
        level_of_person=np.repeat([0, 1], 60),
        spare_inputs=torch.randn(100, 8),
        spare_targets=torch.randint(3, (100,)),
        classes=3,
    )
    return audit(
        made,
        target,
        canaries=100,
        example_canaries=20,
        runs=20,
        shadow_models=6,
        false_alarm_rate=1e-6,
        significance=1e-6,
        seed=1,
    )


def test_every_attack_and_test_is_made_and_none_goes_off(found):
    assert set(found.one_run) == {"Dirac, white box", "mislabeled, white box"}
    assert set(found.conformance) == {
        "mechanism",
        "mechanism, little noise",
        "network, little noise",
        "noise",
    }
    assert len(found.many_runs) == len(found.membership) == len(found.rows) == 2
    assert found.passed, found.alarms


def test_measured_stands_beside_proven_for_every_tier(found, made):
    for row, level in zip(found.rows, made.levels, strict=True):
        assert row.tier.promised == level.epsilon
        assert row.tier.proven == level.proven_epsilon
        assert 0 <= row.measured <= row.tier.proven


def test_the_result_is_plain_json(found):
    text = json.dumps(found.to_dict())
    row = json.loads(text)["rows"][0]
    assert {"tier", "promised", "proven", "measured", "confidence", "attack_success", "auc"} <= set(row)


def test_the_table_fits_eighty_columns(found):
    out = io.StringIO()
    Console(file=out, width=80).print(found.table())
    text = out.getvalue()
    assert all(word in text for word in ("promised", "proven", "measured", "confidence", "right", "AUC"))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_charts_are_made_of_the_result_and_of_its_json(found):
    chart = proven_against_measured(found).to_dict()
    again = proven_against_measured(json.loads(json.dumps(found.to_dict()))).to_dict()
    assert chart["title"] == again["title"]
    assert membership_curves(found) is not None
    assert membership_curves(replace(found, membership=())) is None


def test_a_bound_above_what_is_proven_is_an_alarm_in_words(found):
    attack = "Dirac, white box"
    bound = found.one_run[attack][1]
    broken = replace(found, one_run={attack: (found.one_run[attack][0], replace(bound, measured=9.0))})
    assert not broken.passed
    assert "leaks at least epsilon 9, proven 4" in broken.summary()


def test_what_was_computed_from_records_is_told_apart(found, made):
    assert found.sensitive
    public = found.without_data()
    assert "seconds" not in public.to_dict(), "how long it took depends on how many records people hold"
    assert not public.sensitive
    assert set(found.conformance) - set(public.conformance) == {
        "network, little noise"
    }  # on people's records
    assert not audit(made, canaries=20, seed=1).sensitive


def test_an_audit_repeats_with_its_seed(made):
    one, two = (audit(made, canaries=30, seed=3) for _ in range(2))
    assert [row.measured for row in one.rows] == [row.measured for row in two.rows]
    assert one.conformance["mechanism"].checks == two.conformance["mechanism"].checks


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (plan, {"mechanism": "adapdp", "rounds": 3}),
        (plan, {"mechanism": "idp-scale"}),
        (plan, {"mechanism": "pdp-sgd-exact", "rounds": 3, "drawn": "round"}),
        (plan_as_published, {"mechanism": "pdp-sgd-fixed", "rounds": 3, "seed": 1}),
    ],
    ids=["fresh models", "clip scales", "drawn once a round", "as published"],
)
def test_every_kind_of_plan_can_be_audited(make, options):
    """Correct training passes; each kind of false alarm has a chance of 1e-6."""
    made = make(Budgets(np.repeat([0.5, 1.0, 4.0], 50)), steps=30, batch_size=20, **options)
    outcome = audit(made, canaries=60, seed=1, false_alarm_rate=1e-6, significance=1e-6)
    assert outcome.passed, outcome.alarms


def test_too_few_spare_records_are_refused(made):
    target = AuditTarget(
        make_model=lambda: nn.Linear(8, 3),
        inputs=torch.randn(120, 8),
        targets=torch.randint(3, (120,)),
        level_of_person=np.repeat([0, 1], 60),
        spare_inputs=torch.randn(5, 8),
        spare_targets=torch.randint(3, (5,)),
        classes=3,
    )
    with pytest.raises(PdpsgdError, match=r"at least 40 spare records.*Got 5"):
        audit(made, target, canaries=10, example_canaries=20, seed=1)


def run_command(*arguments: str):
    import typer

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_takes_a_plan_and_writes_json_and_chart(made, tmp_path):
    (tmp_path / "plan.json").write_text(made.to_json())
    outcome = run_command(
        *(str(tmp_path / "plan.json"), "--canaries", "50", "--seed", "1"),
        *("--json", str(tmp_path / "audit.json"), "--chart", str(tmp_path / "audit.html")),
    )
    assert outcome.exit_code == 0, outcome.output
    assert "No alarm" in outcome.stdout
    assert json.loads((tmp_path / "audit.json").read_text())["passed"] is True
    assert "vega" in (tmp_path / "audit.html").read_text()


def test_the_command_prints_json_alone_where_asked(made, tmp_path):
    (tmp_path / "plan.json").write_text(made.to_json())
    outcome = run_command(
        str(tmp_path / "plan.json"), "--canaries", "20", "--quiet", "--json", "-", "--seed", "1"
    )
    assert json.loads(outcome.stdout)["settings"]["canaries"] == 20


def test_the_command_ends_with_exit_code_1_when_an_alarm_goes_off(found, made, tmp_path, monkeypatch):
    attack = "Dirac, white box"
    high = tuple(replace(bound, measured=9.0) for bound in found.one_run[attack])
    broken = replace(found, one_run={attack: high})
    monkeypatch.setattr("pdpsgd.audit.auditing.audit", lambda *_, **__: broken)
    (tmp_path / "plan.json").write_text(made.to_json())
    assert run_command(str(tmp_path / "plan.json")).exit_code == 1


def test_the_command_takes_a_run_folder(made, tmp_path):
    pytest.importorskip("sklearn")
    public, people, private = (tmp_path / name for name in ("public", "people", "private"))
    public.mkdir()
    people.mkdir()
    (public / "plan.json").write_text(made.to_json())
    (public / "settings.json").write_text(json.dumps({"data": "digits", "model": "linear"}))
    rows = "\n".join(f"{i},1,1e-5,1,1e-5,{0 if i < 60 else 1}" for i in range(120))
    header = "id,asked_epsilon,asked_delta,proven_epsilon,proven_delta,level\n"
    (people / "promises.csv").write_text(header + rows + "\n")
    outcome = run_command(
        *(str(tmp_path), "--canaries", "20", "--example-canaries", "10", "--shadow-models", "4"),
        *("--quiet", "--seed", "1", "--json", "-", "--false-alarm-rate", "1e-6"),
    )
    assert outcome.exit_code == 0, outcome.output
    assert len(json.loads(outcome.stdout)["membership"]) == 2
    found = json.loads((public / "audit.json").read_text())
    assert (found["sensitive"], found["membership"]) == (False, [])
    assert set(found["one_run"]) == {"Dirac, white box"}
    assert set(found["conformance"]) == {"mechanism", "mechanism, little noise", "noise"}
    assert json.loads((private / "audit.json").read_text())["sensitive"] is True


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(PdpsgdError, match=r"plan\.json"):
        plan_and_settings(tmp_path)
    with pytest.raises(PdpsgdError, match=r"No such file"):
        plan_and_settings(tmp_path / "nothing.json")
