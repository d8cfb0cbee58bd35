"""Options that several commands share, so that they are spelled alike, and what is done with them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from pdpsgd.budgets.files import parse_toml, read_text
from pdpsgd.cli.prose import wrapped
from pdpsgd.errors import PdpsgdError, fail, is_it, shown
from pdpsgd.training.options import OUTPUT, PLAN, Options
from pdpsgd.training.options import option as option_field

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.run_folder import RunFolder

PEOPLE = "People and budgets"
CHARTS = (".svg", ".png", ".html")


def option(*names: str, help: str, panel: str, **more: Any) -> Any:
    """Declare an option in a panel of the help; a default of None is not shown."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _read_config(ctx: Any, value: Path | None) -> Path | None:
    """Take defaults from a TOML file: what stands on the command line still comes first."""
    if value is None or ctx.resilient_parsing:
        return value
    content = parse_toml(read_text(value, "a settings file (TOML)"), repr(str(value)))
    known = {
        name.lstrip("-").replace("-", "_"): parameter.name
        for parameter in ctx.command.params
        for name in parameter.opts
        if parameter.name not in ("config", "help")
    }
    defaults = {}
    for key, setting in content.items():
        name = key.replace("-", "_")
        if name not in known:
            names = [each.replace("_", "-") for each in sorted(known)]
            hint = is_it(key, names) or f" They are {', '.join(names)}."
            fail(f"Expected options of this command in {str(value)!r}. Got {key!r}.{hint}")
        defaults[known[name]] = _as_text(setting)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def _as_text(setting: Any) -> Any:
    """Write a table {"1" = 0.34} as on the command line: 1:0.34."""
    if isinstance(setting, dict):
        return ",".join(f"{key}:{value}" for key, value in setting.items())
    return setting


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file with any of these options; the command line comes first",
        is_eager=True,
        callback=_read_config,
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
JsonFile = Annotated[
    str | None,
    option(
        "--json",
        help="file for the figures as JSON ('-': the screen)",
        panel=OUTPUT,
        metavar="FILE",
        show_default=False,
    ),
]
Yes = Annotated[
    bool,
    option(
        "--yes", "-y", help="agreement to what would be asked (test people without a promise)", panel=OUTPUT
    ),
]
Quiet = Annotated[bool, option("--quiet", "-q", help="no output but errors", panel=OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Options):
    """Where people's budgets are, or which tiers there are instead."""

    id_column: str | None = option_field(None, "column with person ids", panel=PEOPLE)
    epsilon_column: str = option_field("epsilon", "column with each person's epsilon", panel=PEOPLE)
    delta_column: str | None = option_field(None, "column with each person's delta", panel=PEOPLE)
    delta: float = option_field(1e-5, "one delta for everybody", panel=PEOPLE, kind=float)
    epsilon_map: str | None = option_field(
        None, "epsilon that words stand for, as in low=0.5,high=8", panel=PEOPLE
    )
    tiers: str | None = option_field(
        None, "epsilon:share of each tier, as in 1:0.34,2:0.43,3:0.23", panel=PEOPLE
    )
    allow_infinite: bool = option_field(
        False, 'acceptance of "inf" (no protection asked for)', panel=PEOPLE, kind=bool, shown=False
    )

    def read(self, file: Path | None, *, id_column: str | None = None, repeated_ids: bool = False) -> Budgets:
        """Read budgets from the columns of a file, in which people may have several rows if that is said."""
        from pdpsgd.budgets.budgets import Budgets

        if file is None:
            fail("Expected a file with people's budgets, or --tiers and --people. Got neither.")
        try:
            return Budgets.from_table(
                file,
                id_column=id_column or self.id_column,
                epsilon_column=self.epsilon_column,
                delta_column=self.delta_column,
                delta=self.delta,
                allow_infinite=self.allow_infinite,
                repeated_ids=repeated_ids,
                epsilon_map=None if self.epsilon_map is None else parse_words(self.epsilon_map),
            )
        except PdpsgdError as error:
            from pdpsgd.budgets.readers import has_column

            named = self.epsilon_column != self.declared()["epsilon_column"].default
            if named or not file.is_file() or has_column(file, self.epsilon_column):
                raise
            remedy = "If what people allow is in another column, name it with --epsilon-column."
            raise PdpsgdError(f"{error} {remedy}") from error


@dataclass(frozen=True, kw_only=True)
class HistoryOptions(Options):
    """Plans that were run on these people before."""

    history: list[Path] = option_field(
        [], "run folder or plan of an earlier run on these people (repeatable)", panel=PLAN, kind=list[Path]
    )
    history_budgets: list[Path] = option_field(
        [], "list of people of that earlier run, if it was another", panel=PLAN, kind=list[Path]
    )
    history_fixed: bool = option_field(
        False, "plan fixed before results of --history were seen", panel=PLAN, kind=bool, shown=False
    )

    @property
    def files(self) -> list[Path]:
        """The run folders and plans, each once."""
        return _each_once(self.history)

    def plans(self, now: Budgets, how: BudgetOptions) -> list[Plan]:
        """Read the earlier plans, each with its people.

        Args:
            now: The list of people today.
            how: Names of the columns in `history_budgets`.

        Returns:
            The plans, matched with the people they were run on.

        Raises:
            PdpsgdError: If the people of a plan cannot be found.
        """
        files, count = self.files, len(self.history_budgets)
        if count and not files:
            fail("Expected --history with --history-budgets. Got the latter alone.")
        if count not in (0, 1, len(files)):
            fail(
                f"Expected --history-budgets once, or once for each of the {len(files)} --history. Got {count}."
            )
        lists = [how.read(path) for path in self.history_budgets]
        given: list[Budgets | None] = (
            [*lists] * len(files) if len(lists) == 1 else [*lists] or [None] * len(files)
        )
        return [_with_people(path, listed, now) for path, listed in zip(files, given, strict=True)]


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(Options):
    """A ledger, and how much of what people have left in it a run may take."""

    ledger: str | None = option_field(
        None, "ledger of these people: a file, or postgresql://...", panel=PEOPLE
    )
    spend: str = option_field(
        "0.25", 'share of what is left, or "1 of 12" of the whole, or "all"', panel=PEOPLE
    )


def _each_once(paths: list[Path]) -> list[Path]:
    """Leave out a run folder, or a plan in it, that is named again; two files may be two runs of one plan."""
    from pdpsgd.training.run_folder import RunFolder

    known: dict[Path, Path] = {}
    for path in paths:
        folder = RunFolder.named_by(path)
        known.setdefault((path if folder is None else folder.path).resolve(), path)
    return list(known.values())


def _with_people(path: Path, listed: Budgets | None, now: Budgets) -> Plan:
    """Read an earlier plan with its people: as told, from the promises of its run, or those of today."""
    from pdpsgd.training.run_folder import RunFolder

    folder = RunFolder.named_by(path)
    earlier = read_plan(path) if folder is None else folder.read_plan(with_people=True)
    if folder is not None and earlier.ledger is not None and earlier.roster is None:
        return _with_levels(folder, earlier)
    people = listed or (None if folder is None else _promised(folder, earlier)) or now
    try:
        return earlier if earlier.roster is not None else earlier.with_people(people)
    except PdpsgdError as error:
        remedy = "Name the list that the plan was made for, as it was then, with --history-budgets."
        raise PdpsgdError(f"{path}: {error} {remedy}") from error


def _with_levels(folder: RunFolder, plan: Plan) -> Plan:
    """Read who was on which level of a ledger's plan: what people allow over all runs does not say it."""
    from pdpsgd.budgets.readers import read_columns
    from pdpsgd.planning.levels import Roster
    from pdpsgd.planning.plans import check_same_people

    if folder.promises is None:
        fail(
            f"Expected people/promises.csv in {str(folder.path)!r}, to know who was on which level. Got none: name the "
            "folder with all that the run left in it."
        )
    columns, _ = read_columns(folder.promises, ["id", "level"])
    people = Roster(columns["id"], columns["level"])
    check_same_people(plan, people)
    return replace(plan, roster=people)


def _promised(folder: RunFolder, plan: Plan) -> Budgets | None:
    """Read the people of a run from the promises made to them; None if they have no ids."""
    promises = folder.promises
    if promises is None or not (plan.people_digest or "").startswith("ids:"):
        return None
    from pdpsgd.budgets.budgets import Budgets

    return Budgets.from_table(
        promises,
        id_column="id",
        epsilon_column="asked_epsilon",
        delta_column="asked_delta",
        allow_infinite=True,
    )


class Screen:
    """Where a command talks: to standard output, or beside the JSON if that goes there, or not at all."""

    def __init__(self, *, quiet: bool, json_file: str | None = None) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.json_file = json_file
        if json_file not in (None, "-"):
            check_output(Path(str(json_file)), "--json")  # not after hours of training
        self.console = Console(stderr=json_file == "-", quiet=quiet)

    @contextmanager
    def bars(self, *, after: float = 0.0) -> Iterator[Callable[[str, int, int], None] | None]:
        """Show a progress bar on the error stream for each name that is told: tell(name, done, total).

        What takes less than `after` seconds shows nothing.
        """
        if self.quiet:
            yield None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        shown = Progress(*columns, console=Console(stderr=True))
        tasks: dict[str, TaskID] = {}
        begin = time.monotonic()

        def tell(name: str, done: int, total: int) -> None:
            if time.monotonic() - begin < after:
                return
            if not tasks:
                shown.start()
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
            shown.update(tasks[name], completed=done)

        try:
            yield tell
        finally:
            if tasks:  # otherwise there is nothing on the screen to end
                shown.stop()

    def say(self, text: str) -> None:
        """Print prose; on a terminal it is wrapped between words."""
        self.console.print(wrapped(text, self.console), markup=False, highlight=False, soft_wrap=True)

    def table(self, table: Any) -> None:
        """Print a table, fitted to the screen."""
        self.console.print(table)

    def write_json(self, text: str) -> None:
        """Write the figures where `--json` says."""
        if self.json_file == "-":
            stream: TextIO = sys.stdout
            stream.write(text.rstrip("\n") + "\n")
        elif self.json_file is not None:
            write_file(Path(self.json_file), text.rstrip("\n") + "\n")
            self.say(f"Figures: {self.json_file}")


def say_other_version(folder: Path, screen: Screen) -> None:
    """Say that another version wrote a run folder, if one did."""
    from pdpsgd.training.run_folder import RunFolder

    note = RunFolder(folder).version_note() if folder.is_dir() else None
    if note is not None:
        screen.say(f"Note: {note}")


def check_output(path: Path, named: str) -> None:
    """Refuse a name that no file can be written under, before time is spent on what goes into it."""
    above = next((part for part in path.absolute().parents if os.path.lexists(part)), path)
    if not above.is_dir():
        fail(f"Expected a file to write for {named}. Got {str(path)!r}, but {str(above)!r} is no folder.")
    try:
        is_folder = path.is_dir()
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fail(
            f"Expected a file to write for {named}. Got {shown(str(path))}: {getattr(error, 'strerror', error)}."
        )
    if is_folder or not path.name:
        fail(f"Expected a file to write for {named}. Got {str(path)!r}, which is a folder.")


def check_chart(path: Path) -> None:
    """Refuse the name of a chart before anything is computed, or reserved in a ledger, whose chart it is to be."""
    check_output(path, "--chart")
    if path.suffix.lower() not in CHARTS:
        fail(f"Expected a chart file that ends in .svg, .png or .html. Got {str(path)!r}.")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, in a folder that is made if need be."""
    from pdpsgd.training.run_folder import write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"Expected to be able to make the folder {str(path.parent)!r}. Got: {error.strerror}.")
    write_atomically(path, content)


def dump(document: Mapping[str, Any] | list[Any]) -> str:
    """Figures as JSON text."""
    from pdpsgd.training.run_folder import to_jsonable

    return json.dumps(to_jsonable(document), indent=1)


def parse_tiers(text: str) -> dict[float, float]:
    """`1:0.34,2:0.43,3:0.23` as {epsilon: share}.

    >>> parse_tiers("1:0.5, 2:0.5")
    {1.0: 0.5, 2.0: 0.5}
    """
    tiers: dict[float, float] = {}
    for part in text.split(","):
        epsilon, colon, share = part.partition(":")
        try:
            if not colon or float(epsilon) in tiers:
                raise ValueError
            tiers[float(epsilon)] = float(share)
        except ValueError:
            fail(
                "Expected --tiers as epsilon:share,epsilon:share, each epsilon once, for example "
                f"1:0.34,2:0.43,3:0.23. Got {part!r} in {text!r}."
            )
    return tiers


def parse_words(text: str) -> dict[str, float]:
    """`low=0.5,high=8` as {word: epsilon}.

    >>> parse_words("low=0.5, high=8")
    {'low': 0.5, 'high': 8.0}
    """
    words: dict[str, float] = {}
    for part in text.split(","):
        word, sign, epsilon = part.replace("=", ":").rpartition(":")
        try:
            if not sign or word.strip() in words:
                raise ValueError
            words[word.strip()] = float(epsilon)
        except ValueError:
            fail(
                "Expected --epsilon-map as word=epsilon,word=epsilon, each word once, for example low=0.5,high=8. Got "
                f"{part!r}."
            )
    return words


def parse_weights(text: str | None) -> tuple[float, float] | None:
    """`0.7,0.3` as (w1, w2)."""
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        fail(f"Expected --weights as w1,w2, for example 0.7,0.3. Got {text!r}.")
    return first, second


def read_plan(file: Path, *, verify: bool = False) -> Plan:
    """Read a plan from a JSON file; errors name it."""
    from pdpsgd.planning.plans import Plan

    return Plan.read(file, verify=verify)
