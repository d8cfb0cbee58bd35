"""A run folder from your own loop, as `fit` leaves one: `write_run`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import fail
from pdpsgd.reporting.run import write_run_report
from pdpsgd.training.components import Loss
from pdpsgd.training.evaluation import Evaluation, evaluate
from pdpsgd.training.fitting import TrainingResult, spent_in_all
from pdpsgd.training.model_description import ModelDescription, NetworkDescription
from pdpsgd.training.options import TrainingOptions
from pdpsgd.training.run_folder import RunFolder, without_people
from pdpsgd.training.versions import versions

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def write_run(
    engine: PrivacyEngine,
    folder: str | os.PathLike[str],
    *,
    classes: Sequence[str] = (),
    test_data: Any = None,
    test_tiers: ArrayLike | None = None,
    loss: str | Loss = "cross-entropy",
    data: str | None = None,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    purpose: str | None = None,
    operator: str | None = None,
    contact: str | None = None,
    stopped_early: bool = False,
) -> TrainingResult:
    """End the run of your own loop, and leave what `fit` leaves: plan, promises, model, result, page, ledger entry.

    To be called after the last step, on every rank; the first one writes. The engine is closed, so that nothing of the
    random key is left, and the run of its reservation is finished in the ledger.

    Guarantee: the verdict is the engine's own, and what goes into `public/` is the plan, the settings that are given
    here, the model's state and figures on test people; nothing else is computed from the training data.

    Args:
        engine: The engine whose run it is.
        folder: The run folder, without a run in it.
        classes: Names of the classes, in the order of the model's outputs.
        test_data: Other people, never on the list, to evaluate the model on.
        test_tiers: The tier of each test record.
        loss: The loss to evaluate with, by name or as a function of outputs and targets.
        data: A name for the records.
        model: How to make the network again, as "module:function", where its layers do not stand in a row.
        settings: What else is to be known of the training: epochs, say. Not secret, and not computed from records.
        purpose: What the model is for, in a sentence.
        operator: Who trains and answers for it.
        contact: Whom people may ask.
        stopped_early: Whether to end a run that has steps left. The promise stays the whole plan's.

    Returns:
        The result, as `fit` gives it.

    Raises:
        PdpsgdError: If steps are left, the folder holds a run already, or test people are trained on. Then nothing is
            written.
    """
    stated = TrainingOptions(purpose=purpose, operator=operator, contact=contact).description()
    if engine.steps_left and not stopped_early:
        fail(
            f"Expected a run that has taken all its {engine.plan.steps:,} steps. Got one with {engine.steps_left:,} "
            f"left: "
            "go on with the loop, or end it here by stopped_early=True (what is promised stays the same)."
        )
    place = RunFolder(folder)
    if not engine.ranks.first:
        result = _result(engine, None, {}, None)
        engine.close()
        return result
    with place.in_use():
        place.check_is_free(resume=False, folder=f"folder={str(place.path)!r}", go_on="another one")
        if test_data is not None:
            engine.check_held_out(test_data)
        evaluation = None if test_data is None else evaluate(engine.module, test_data, loss, tiers=test_tiers)
        named = {"data": data, "model": model, "classes": list(classes) or None}
        known = {
            **_known(engine),
            **(settings or {}),
            **{name: value for name, value in named.items() if value is not None},
            **stated,
        }
        result = _result(engine, evaluation, known, place.path)
        _write(engine, place, result, _description(engine, classes, model))
    engine.close()
    if engine.reservation is not None and engine.reservation.state != "finished":
        engine.reservation.finish()
    write_run_report(place.path)
    return result


def _known(engine: PrivacyEngine) -> dict[str, Any]:
    """Say what the engine knows of the training."""
    first = engine.optimizer.param_groups[0]
    reservation = engine.reservation
    return {
        "loop": "own",
        "steps_taken": engine.steps_taken,
        "optimizer": type(engine.optimizer.original).__name__.lower(),
        "learning_rate": float(
            first.get("initial_lr", first["lr"])
        ),  # a scheduler keeps the one it began with
        **{name: value for name, value in engine.loop_options.items() if name != "keep_norms"},
        "plan": without_people(engine.plan).digest,
        "date": date.today().isoformat(),
        **({} if reservation is None else {"ledger": reservation.description()}),
    }


def _result(
    engine: PrivacyEngine, evaluation: Evaluation | None, settings: Mapping[str, Any], folder: Path | None
) -> TrainingResult:
    reservation = engine.reservation
    return TrainingResult(
        model=engine.module,
        plan=engine.plan,
        spent=spent_in_all(engine),
        evaluation=evaluation,
        history=(),
        models=((1.0, engine.module),),
        settings=settings,
        versions=versions(),
        seconds=0.0,
        verdict=engine.verdict(),
        run_folder=folder,
        ledger=None if reservation is None else reservation.description(),
    )


def _description(engine: PrivacyEngine, classes: Sequence[str], model: str | None) -> ModelDescription:
    shape = engine.input_shape
    network = NetworkDescription.of(
        engine.module, input_shape=shape, outputs=len(classes) or None, name=model
    )
    return ModelDescription(network=network, shape=shape, classes=tuple(map(str, classes)))


def _write(
    engine: PrivacyEngine, place: RunFolder, result: TrainingResult, description: ModelDescription
) -> None:
    """Write the files; the result is the last one, and says that the run has ended."""
    plan = engine.plan
    place.write_plan(plan)
    place.write_settings(result.settings)
    place.write_history([])
    place.write_model(engine.module, replace(description, not_for_release=result.verdict.against_release))
    promised = _promised(engine)
    if promised is not None:
        place.write_promises(plan, promised)
    if engine.individual_sums is not None:
        place.write_norms(engine.individual_sums, plan)
    place.write_result(result.to_dict())


def _promised(engine: PrivacyEngine) -> Budgets | None:
    """Return what each person allows: by the ledger, by the list, or as the levels that the plan put them on say."""
    if engine.reservation is not None:
        return engine.reservation.promises()
    if engine.budgets is not None:
        return engine.budgets
    roster, levels = engine.plan.roster, engine.plan.levels
    if roster is None:
        return None
    epsilon, delta = ([getattr(levels[i], name) for i in roster.level] for name in ("epsilon", "delta"))
    found = Budgets(epsilon, delta, ids=roster.ids, allow_infinite=True)
    return found if roster.named else found.without_names()
