"""Stopping and going on: what a checkpoint holds, and what it must agree with.

The danger is the same noise on different gradients: the difference of the two results has no noise at all.
Sampling and noise come from the key and the step's number, so a run that is killed and resumed repeats its
steps exactly, as long as everything else is the same. So the checkpoint names what the run depends on, and a
resume refuses anything else. (`journal` catches what has no name.)
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, from_numpy

from pdpsgd.budgets.files import ANY, Each, Optional, Range, check_shape
from pdpsgd.engine.checkpoints import HasState, erase_key, load, pack_optimizer, save, unpack_optimizer
from pdpsgd.engine.checks.row_rounding import NONE_FOUND
from pdpsgd.engine.fingerprints import describe_model, describe_optimizer, digest_of_module, fingerprint_data
from pdpsgd.engine.journal import count_entries
from pdpsgd.errors import PdpsgdError, fail, shown
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.sampling.source import RandomSource

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pdpsgd.engine.run import Run

NORMS = "norms"
"""What norms add up to, where they are kept, likewise."""
SPENT = "spent"
"""What people have spent under a filter, which is sensitive, as a tensor of a checkpoint."""
STATE = {
    "run": {"optimizer": ANY},
    "steps_done": int,
    "forfeited": [int],
    "iterated": Optional(int),
    "layout": Optional(
        {"multiple": Range(1, 2**20, whole=True), "lanes": Range(1, 8, whole=True), "powers": Optional(bool)}
    ),
    "source": {"secure": bool, "seeded": bool, "algorithm": Optional(str), "name": Optional(str)},
    "verdict": Optional({"test_double": bool, "unseen_code": [str], "assumed": Optional([str])}),
    "packed": Each(ANY),
    "journal": Optional(str),
    "journal_entries": Optional(int),
    "checkpoints": Optional([str]),
}
"""What a checkpoint says beside tensors. (Those of earlier versions do not count the journal's entries.)"""


def save_run(run: Run, path: str | os.PathLike[str], others: Mapping[str, HasState]) -> None:
    """Write a checkpoint of a run; after its last step without the key, which then is erased everywhere else."""
    ranks, source, path = run.ranks, run.execution.source, Path(path).absolute()
    ended = run.execution.steps_left == 0
    if ranks.first and run.journal.journal is None and not ended:
        # Whoever resumes a run keeps its journal. So this run is new, and what lies there is another one's.
        Path(f"{path}.journal").unlink(missing_ok=True)
        run.journal.keep(Path(f"{path}.journal"))
    tensors = {f"model.{name}": value for name, value in run.module.state_dict().items()}
    packed: dict[str, Any] = {}
    for name, other in {"optimizer": run.optimizer, **others}.items():
        more, packed[name] = pack_optimizer(other, prefix=name)
        tensors.update(more)
    if run.spending is not None:
        tensors[SPENT] = ranks.largest(from_numpy(run.spending.spent))
    if run.norms is not None:
        tensors |= {f"{NORMS}.{name}": value for name, value in run.norms.state().items()}
    if not ended:
        run.checkpoints.add(path)  # before the key is in it
    journal = None if run.journal.journal is None else run.journal.journal.path
    state = {
        "run": describe_run(run, without_key=ended),
        "steps_done": run.execution.steps_done,
        "forfeited": list(run.execution.forfeited),
        "iterated": run.power_iterations.step if run.power_iterations.step >= 0 else None,
        "layout": {
            "multiple": run.execution.layout.multiple,
            "lanes": run.execution.layout.lanes,
            "powers": run.execution.layout.powers,
        },
        "source": source.description,
        "verdict": {
            "test_double": run.test_double,
            "unseen_code": run.unseen_code,
            "assumed": list(run.assumed),
        },
        "packed": packed,
        "journal_entries": 0 if run.journal.journal is None else run.journal.journal.entries,
        "journal": None if journal is None else os.path.relpath(journal, path.parent),
        "checkpoints": sorted(os.path.relpath(other, path.parent) for other in run.checkpoints),
    }
    if ranks.world_size > 1:
        ranks.check_same(model=digest_of_module(run.module))
    if ranks.first:
        save(path, tensors, state, None if ended else source.key_bytes())
        if ended:
            erase_saved_keys(run)
    ranks.wait()


def resume_run(run: Run, path: str | os.PathLike[str], others: Mapping[str, HasState]) -> None:
    """Put a run, which has not begun, where a checkpoint was made; that of the last step has no key any more."""
    if run.execution.steps_done:
        fail(
            f"Expected a run that has not begun, to resume another one. Got one at step {run.execution.steps_done}."
        )
    path = Path(path).absolute()
    checkpoint = run.ranks.broadcast_object(load(path) if run.ranks.first else None)
    state, ended = checkpoint.state, checkpoint.key is None
    check_shape(str(path), state, STATE)
    if ended and state["steps_done"] < run.plan.steps:
        fail(
            f"Expected the checkpoint of a run that can go on. {str(path)!r} is of one that was closed after "
            f"{state['steps_done']} steps, and its key was erased. Begin a new run."
        )
    # First the key: the fingerprints of private data are keyed with it.
    run.execution.use_source(RandomSource.of_run(checkpoint.key, **_source_options(state["source"])))
    now = describe_run(run, without_key=ended)
    check_same_run({name: state["run"].get(name) for name in now}, now, place=str(path))
    if state["steps_done"] > run.plan.steps:
        fail(
            f"Expected {path}: steps_done up to the plan's {run.plan.steps} steps. Got {state['steps_done']}."
        )
    prefix = "model."
    saved = {
        name.removeprefix(prefix): value
        for name, value in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    check_same_tensors(saved, run.module.state_dict(), place=f"{path}: model")
    run.module.load_state_dict(saved)
    for name, other in {"optimizer": run.optimizer, **others}.items():
        if name not in state["packed"]:
            fail(f"Expected a checkpoint that holds {name}. {str(path)!r} holds none.")
        unpack_optimizer(other, checkpoint.tensors, state["packed"][name])
    _check_optimizer(run.optimizer.original, state["run"]["optimizer"], place=str(path))
    if run.spending is not None:
        if SPENT not in checkpoint.tensors:
            fail(f"Expected what people have spent in the checkpoint {str(path)!r}. It holds none.")
        run.spending.load(checkpoint.tensors[SPENT])
    if run.norms is not None:
        run.norms.load(
            {name: checkpoint.tensors.get(f"{NORMS}.{name}") for name in run.norms.state()}, str(path)
        )
    run.execution.steps_done = state["steps_done"]
    run.execution.forfeited = list(state["forfeited"])
    iterated = state.get("iterated")
    run.power_iterations.step = -1 if iterated is None else iterated
    # Rows stand as they did, although kernels may round otherwise here (with another number of threads, say).
    here = run.execution.layout
    noted = {name: value for name, value in (state.get("layout") or {}).items() if value is not None}
    stood = run.execution.layout = replace(here, **noted)
    run.before.update(state.get("verdict") or {})
    rounds_otherwise = stood.lanes != here.lanes or bool(stood.multiple % here.multiple)
    rounds_otherwise |= here.powers and not stood.powers
    if any(run.ranks.all_values(rounds_otherwise)) and not run.assumed:
        run.before["assumed"] = [NONE_FOUND]
    run.checkpoints.update(_beside(path, name) for name in (path.name, *(state.get("checkpoints") or ())))
    if not ended:
        _take_up_journal(run, path, state)
    elif run.ranks.first:  # in case the run was killed just before it did
        if state.get("journal") is not None:
            _beside(path, state["journal"]).unlink(missing_ok=True)
        erase_saved_keys(run)


def _beside(path: Path, name: str) -> Path:
    file = Path(os.path.normpath(path.parent / name))
    try:
        is_folder = stat.S_ISDIR(os.lstat(file).st_mode)
    except FileNotFoundError:
        return file
    except (OSError, ValueError):  # too long, or with a null character in it
        is_folder = True
    if is_folder:
        fail(f"Expected the name of a file in the checkpoint {str(path)!r}. Got {shown(name)}.")
    return file


def _source_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: saved.get(name) for name in ("secure", "seeded", "algorithm", "name")}


def _take_up_journal(run: Run, path: Path, state: Mapping[str, Any]) -> None:
    """Go on with the run's journal, which has to know at least the steps that it knew when the checkpoint was made."""
    if state.get("journal") is None:
        fail(f"Expected the name of the run's journal in the checkpoint {str(path)!r}. Got none.")
    journal = _beside(path, state["journal"])
    found = run.ranks.broadcast_object(
        count_entries(journal) if run.ranks.first else None
    )  # as rank 0 sees it
    remedy = "Put it back beside the checkpoint, or begin a new run."
    if found is None:
        fail(
            f"Expected the run's journal at {str(journal)!r}, to see that the same noise is not used on "
            f"different gradients. Got none. {remedy}"
        )
    if found < (state.get("journal_entries") or 0):
        fail(
            f"Expected {state['journal_entries']:,} entries in the run's journal {str(journal)!r}, as when the "
            f"checkpoint was made. Got {found:,}: it was emptied or cut off. {remedy}"
        )
    run.journal.keep(journal)


def check_same_tensors(saved: Mapping[str, Any], now: Mapping[str, Any], *, place: str) -> None:
    """Refuse saved tensors that do not fit: other names, shapes or types.

    Args:
        saved: Tensors of a checkpoint by name.
        now: Tensors that they are to be copied into.
        place: The file, and the place in it, for errors.

    Raises:
        PdpsgdError: One of them is missing, too many, or of another shape or type.
    """
    for name in sorted({*saved, *now}):
        before, after = (_describe(part.get(name)) for part in (saved, now))
        if before != after:
            fail(f"Expected {place}.{name} to be {after}. Got {before}.")


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"


def _check_optimizer(optimizer: Optimizer, saved: Any, *, place: str) -> None:
    """Refuse a state that an optimizer takes without looking and then trips over."""
    if describe_optimizer(optimizer) != saved:
        fail(f"Expected {place}: optimizer to have the settings that the run was begun with. Got others.")
    for group in optimizer.param_groups:
        if not isinstance(rate := group.get("lr", 0.0), (float, int, Tensor)):
            fail(f"Expected {place}: optimizer.lr to be a number. Got {shown(rate)}.")
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return  # what the state of another optimizer looks like is not known
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                fail(
                    f"Expected {place}: optimizer.{name} of shape {tuple(parameter.shape)}, as its parameter has. "
                    f"Got {tuple(value.shape)}."
                )


def erase_saved_keys(run: Run) -> None:
    """Erase the key from every checkpoint of the run, which has ended: nobody is to repeat its noise.

    One that cannot be read does not keep the others from losing theirs; it is named afterwards.
    """
    name = run.execution.source.name
    failed = [error for path in sorted(run.checkpoints) if run.ranks.first and (error := _erase(path, name))]
    if failed:
        raise failed[0]
    run.checkpoints.clear()
    run.journal.close(remove=True)


def _erase(path: Path, name: str) -> PdpsgdError | None:
    """Erase the key of this name from a checkpoint, if that is still there; tell why where it cannot be done."""
    try:
        if path.exists():
            erase_key(path, only=name)
    except PdpsgdError as error:
        return error
    return None


def describe_run(run: Run, *, without_key: bool = False) -> dict[str, Any]:
    """Name what the run depends on, apart from the model's parameters: a resume must agree with all of it.

    Without the key, as after the last step, what can be compared no more is left out: nothing is computed from the
    data then.
    """
    described = {
        "plan": run.plan.digest,
        "model": describe_model(run.module),
        "optimizer": describe_optimizer(run.optimizer.original),
        "options": run.options,
        "number of ranks": run.ranks.world_size,
    }
    if without_key:
        return described
    # The digests of private data are keyed: without the key nobody can check a guess.
    key = run.execution.source.key_bytes()
    return {
        **described,
        "people": fingerprint_data((run.level_of_person, *run.records_of_people), key=key),
        "data": run.records.fingerprint(key),
        "compiled code": run.ranks.broadcast_object(native.description()),
    }


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], *, place: str) -> None:
    """Refuse to resume a run with anything but what it was begun with."""
    for name in sorted({*saved, *now}):
        before, after = saved.get(name), now.get(name)
        if before != after:
            what, before, after = _narrow(name, before, after)
            fail(
                f"Expected the {what} that the checkpoint {place!r} was made with: {shown(before)}. Got "
                f"{shown(after)}. Resuming would use the same noise on different gradients. Resume with what "
                "the run was begun with, or begin a new run."
            )


def _narrow(name: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """Name the one setting that differs inside a group of settings."""
    while isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in sorted({*before, *after}) if before.get(key) != after.get(key))
        name, before, after = f"{name} {key}", before.get(key), after.get(key)
    return name, before, after
