"""`pdpsgd report`: the page of a run, from its folder, and letters to its people."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.own_ledger import default_place
from pdpsgd.cli.shared import option
from pdpsgd.errors import fail
from pdpsgd.training.options import OUTPUT, check_one_line

if TYPE_CHECKING:
    from pdpsgd.ledger import Ledger
    from pdpsgd.ledger.values import Person
    from pdpsgd.reporting.letter_page import Letterhead

LETTERS = "Letters"


def report(
    run_folder: Annotated[Path, typer.Argument(help="folder of a finished run", show_default=False)],
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            help="file of the page, or of the letter",
            panel=OUTPUT,
            show_default="RUN_FOLDER/public/report.html, or in RUN_FOLDER/people/letters",
        ),
    ] = None,
    person: Annotated[
        str | None,
        option("--person", help="id of the person to write a letter to", panel=LETTERS, show_default=False),
    ] = None,
    letters: Annotated[
        Path | None,
        option("--letters", help="folder for letters to everybody", panel=LETTERS, show_default=False),
    ] = None,
    ledger: Annotated[
        str | None,
        option("--ledger", help="ledger of these people", panel=LETTERS, show_default="people.ledger"),
    ] = None,
    purpose: Annotated[
        str | None, option("--purpose", help="what the model is for", panel=OUTPUT, show_default="the run's")
    ] = None,
    operator: Annotated[
        str | None, option("--operator", help="who answers for it", panel=OUTPUT, show_default="the run's")
    ] = None,
    contact: Annotated[
        str | None,
        option("--contact", help="whom people may ask", panel=OUTPUT, show_default="the run's"),
    ] = None,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
) -> None:
    """Write one HTML page about a run: what was promised, what is proven, how good the model is, for whom.

    The page opens offline and loads nothing. Only public things go in: the plan, the settings, and figures on
    test people.

    With --person or --letters, a letter instead: what was done with one person's record, and what it can reveal at
    most, in plain words, over all runs if there is a ledger. Nothing of anybody else is in it.

    \b
    Examples:
      pdpsgd report runs/people-pdp-sgd-exact
      pdpsgd report runs/people-pdp-sgd-exact --output for-the-officer.html
      pdpsgd report runs/people-pdp-sgd-exact --person ann \\
          --contact privacy@example.org
      pdpsgd report runs/people-pdp-sgd-exact --letters letters
    """
    screen = shared.Screen(quiet=quiet, json_file=json_file)
    said = {"purpose": purpose, "operator": operator, "contact": contact}
    for name, value in said.items():
        check_one_line(f"--{name}", value)
    if person is not None and letters is not None:
        fail("Expected --person (one letter) or --letters (to everybody). Got both.")
    if letters is not None and output is not None:
        fail("Expected --letters without --output: letters go into the folder. Got both.")
    if output is not None:
        shared.check_output(output, "--output")
    shared.say_other_version(run_folder, screen)
    if person is None and letters is None:
        _page(run_folder, output, said, screen)
    else:
        _letters(run_folder, person, letters or output, ledger, said, screen)


def _page(run_folder: Path, output: Path | None, said: dict[str, str | None], screen: shared.Screen) -> None:
    from pdpsgd.reporting import write_run_report
    from pdpsgd.training.finished_run import read_run

    screen.say(f"Report: {write_run_report(run_folder, output, **said)}")
    if screen.json_file is not None:
        run = read_run(run_folder)
        screen.write_json(
            shared.dump({"plan": run.plan.digest, "settings": run.settings, "result": run.result})
        )


def _letters(
    run_folder: Path,
    person: str | None,
    place: Path | None,
    ledger: str | None,
    said: dict[str, str | None],
    screen: shared.Screen,
) -> None:
    """Write one letter, or everybody's."""
    from pdpsgd.reporting.letter_page import Letterhead
    from pdpsgd.reporting.letters import find_promise, is_listed, write_letter, write_letters

    head = Letterhead.of(run_folder, said)
    plan = head.run.plan
    if (
        person is None
        and place is not None
        and not place.is_dir()
        and is_listed(run_folder, plan, str(place))
    ):
        fail(
            f"Expected a folder for letters to everybody with --letters. Got {str(place)!r}, the id of somebody on the "
            f"list: for one letter, write --person {place}; for a folder, give it another name."
        )
    if head.contact is None:
        screen.say(
            "Note: No contact is known, so letters do not say whom to ask: give --contact (and --operator)."
        )
    kept = _ledger_of(head, ledger)
    if person is not None:
        find_promise(run_folder, plan, person)
        account_of = None if kept is None else kept.person(person)
        screen.say(f"Letter: {write_letter(run_folder, head, person, account_of, place)}")
        screen.write_json(shared.dump({"person": person}))
        return
    assert place is not None
    people = plan.people
    with screen.bars() as progress, _accounts(kept) as account:
        written = write_letters(
            run_folder,
            head,
            place,
            account,
            progress=None if progress is None else lambda done: progress("letters", done, people),
        )
    screen.say(f"Letters: {written:,} in {place}. Each is for its person alone.")
    screen.write_json(shared.dump({"letters": written, "folder": str(place)}))


def _ledger_of(head: Letterhead, place: str | None) -> Ledger | None:
    """Open the ledger that the run was counted in; a letter is over all runs where there is one."""
    counted_in = (head.run.result.get("ledger") or {}).get("id")
    if counted_in is None:
        if place is not None:
            fail(
                f"Expected a run that was counted in a ledger, with --ledger {place}. Got one that is in none."
            )
        return None
    from pdpsgd.ledger import Ledger

    where = place or default_place()
    if "://" not in where and not Path(where).exists():
        fail(
            "Expected the ledger that this run was counted in, because letters are about all runs together. Got none "
            "at "
            f"{where!r}: name it with --ledger."
        )
    found = Ledger(where)
    if found.id != counted_in:
        fail(
            f"Expected the ledger that this run was counted in. Got another one, {found.place}: name it with --ledger."
        )
    return found


def _accounts(ledger: Ledger | None) -> AbstractContextManager[Callable[[str], Person | None]]:
    return nullcontext(lambda name: None) if ledger is None else ledger.accounts()
