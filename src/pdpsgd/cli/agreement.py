"""What somebody has to agree to before a run starts: on a terminal by answering, elsewhere by `--yes`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from pdpsgd.cli.messages import say_warning
from pdpsgd.cli.prose import wrapped
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.inputs import TrainingInputs


def confirm_without_promise(inputs: TrainingInputs, *, yes: bool) -> None:
    """Say how many people get no promise, and go on only if somebody agrees."""
    if not inputs.without_promise:
        return
    listed = 0 if inputs.budgets is None else len(inputs.budgets)
    notice = (
        f"{inputs.without_promise:,} people who said what they allow are used to test on: nothing is promised to them. "
        f"{listed:,} people are on the list."
    )
    if yes:
        return
    if not _on_a_terminal():
        fail(f"Expected --yes, to train although {notice[0].lower()}{notice[1:]} Got no answer.")
    _ask(
        notice, no="Expected agreement, to leave people without a promise. Got none, so nothing was trained."
    )


def warn_of_release(inputs: TrainingInputs, *, seeded: bool) -> None:
    """Say before people are charged that the result will not be for release, where that is known already.

    Args:
        inputs: The records: whether ranges, categories or classes were read from them.
        seeded: Whether samples and noise come from a seed.
    """
    reasons = []
    if inputs.learned_from_data:
        reasons.append("ranges, categories or classes were read from the data (`pdpsgd data schema`)")
    if seeded:
        reasons.append("samples and noise come from a seed (leave --seed out)")
    if reasons and not inputs.rehearsal:
        say_warning(
            f"The result will not be for release: {', and '.join(reasons)}. People are charged for the run all the "
            "same; --rehearse, with a schema, tries everything without spending."
        )


def confirm_signal(plan: Plan, parameters: int | None, *, yes: bool, charges: bool) -> None:
    """Say before anything is spent that a plan has too much noise for its network.

    Where people would be charged for hardly more than a guess, somebody at a terminal is asked.

    Args:
        plan: The plan that is about to be reserved, or trained by.
        parameters: The number of parameters of the network; None where nothing is trained step by step.
        yes: Whether somebody agreed already.
        charges: Whether people are charged for the run in a ledger, which cannot be taken back.

    Raises:
        PdpsgdError: If somebody was asked, and did not agree.
    """
    from pdpsgd.planning.advice import TOO_NOISY, doubt_about_signal, outlook

    if parameters is None:
        return
    seen = outlook(plan, parameters)
    doubt = doubt_about_signal(seen, parameters)
    if doubt is not None:
        confirm_doubt(doubt, asks=charges and seen.signal_to_noise < TOO_NOISY, yes=yes)


def confirm_doubt(doubt: str, *, asks: bool, yes: bool) -> None:
    """Say what speaks against a run, before anything is spent.

    Args:
        doubt: What speaks against it.
        asks: Whether somebody at a terminal is asked: people would be charged for hardly more than a guess.
        yes: Whether somebody agreed already.

    Raises:
        PdpsgdError: If somebody was asked, and did not agree.
    """
    if yes or not asks or not _on_a_terminal():
        say_warning(doubt)
        return
    _ask(
        f"{doubt} People are charged for this run whatever becomes of it.",
        no="Expected agreement, to spend what people allow on such a model. Got none, so nothing was spent.",
    )


def _on_a_terminal() -> bool:
    """Tell whether somebody is there to answer."""
    return sys.stdin is not None and sys.stdin.isatty()


def _ask(question: str, *, no: str) -> None:
    """Ask on the terminal; no answer at all is no agreement."""
    from rich.console import Console

    try:
        agreed = typer.confirm(wrapped(f"{question} Go on?", Console(stderr=True)), err=True)
    except typer.Abort:
        fail(f"{no} (--yes agrees beforehand.)")
    if not agreed:
        fail(no)
