"""Options that several commands share, so that they are spelled alike, and what is done with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from pdpsgd.errors import PdpsgdError, check_positive, fail

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan

PEOPLE = "People and what they allow"
PLAN = "The plan"
OUTPUT = "Output"


def option(*names: str, help: str, panel: str, **more: Any) -> Any:
    """An option in a panel of the help; a default of None is not shown."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _read_config(ctx: Any, value: Path | None) -> Path | None:
    """Take defaults from a TOML file: what stands on the command line still comes first."""
    if value is None or ctx.resilient_parsing:
        return value
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = tomllib.loads(value.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fail(
            f"Expected a settings file (TOML) at {str(value)!r}. {getattr(error, 'strerror', None) or error}."
        )
    except tomllib.TOMLDecodeError as error:
        fail(f"Expected TOML in {str(value)!r}. {error}.")
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
            close = ", ".join(get_close_matches(name, known, n=3)) or ", ".join(sorted(known))
            fail(f"Expected an option of this command in {str(value)!r}, such as {close}. Got {key!r}.")
        defaults[known[name]] = _as_text(setting)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def _as_text(setting: Any) -> Any:
    """A table {"1" = 0.34} is written as on the command line: 1:0.34."""
    if isinstance(setting, dict):
        return ",".join(f"{key}:{value}" for key, value in setting.items())
    return setting


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file with any of these options (learning-rate = 2.0); the command line comes first.",
        is_eager=True,
        callback=_read_config,
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
IdColumn = Annotated[
    str | None,
    option("--id-column", help="The column that says who it is.", panel=PEOPLE, show_default=False),
]
EpsilonColumn = Annotated[
    str, option("--epsilon-column", help="The column with the epsilon that each person allows.", panel=PEOPLE)
]
DeltaColumn = Annotated[
    str | None,
    option(
        "--delta-column", help="The column with each person's own delta.", panel=PEOPLE, show_default=False
    ),
]
Delta = Annotated[float, option("--delta", help="One delta for everybody.", panel=PEOPLE)]
Tiers = Annotated[
    str | None,
    option(
        "--tiers",
        help="Tiers instead of a column: epsilon and share, as in 1:0.34,2:0.43,3:0.23.",
        panel=PEOPLE,
        show_default=False,
    ),
]
AllowInfinite = Annotated[
    bool, option("--allow-infinite", help='Accept "inf": somebody who asks for no protection.', panel=PEOPLE)
]
Mechanism = Annotated[
    str,
    option(
        "--mechanism",
        help="dp-sgd, sampling, adapdp, pdp-sgd-fixed, pdp-sgd-adaptive, pdp-sgd-exact, idp-sample or "
        "idp-scale.",
        panel=PLAN,
    ),
]
Steps = Annotated[
    int | None, option("--steps", help="All steps together.  [default: 1000]", panel=PLAN, show_default=False)
]
BatchSize = Annotated[
    float, option("--batch-size", help="How many people a step draws, on average.", panel=PLAN)
]
AccountantName = Annotated[
    str | None,
    option(
        "--accountant",
        help="pld (tight), rdp, or gdp (an approximation that proves nothing).",
        panel=PLAN,
        show_default="pld",
    ),
]
MaxGradNorm = Annotated[
    float, option("--max-grad-norm", help="Gradients are clipped to this norm.", panel=PLAN)
]
Rounds = Annotated[
    int | None,
    option(
        "--rounds",
        help="At most so many rounds, for mechanisms with thresholds.",
        panel=PLAN,
        show_default=False,
    ),
]
NoiseMultiplier = Annotated[
    float | None,
    option(
        "--noise-multiplier",
        help="Fix the noise; the number of steps follows.",
        panel=PLAN,
        show_default=False,
    ),
]
Drawn = Annotated[str, option("--drawn", help="Draw people at every 'step', or once a 'round'.", panel=PLAN)]
Weights = Annotated[
    str | None,
    option("--weights", help="w1,w2 of the threshold's loss, as in 0.7,0.3.", panel=PLAN, show_default=False),
]
ThresholdLoss = Annotated[
    str | None,
    option("--threshold-loss", help="adaptive or adaptive-as-printed.", panel=PLAN, show_default=False),
]
EarlierPlans = Annotated[
    list[Path] | None,
    option(
        "--history",
        help="A plan that was run on these people before; give it as often as it was run.",
        panel=PLAN,
        show_default=False,
    ),
]
EarlierLists = Annotated[
    list[Path] | None,
    option(
        "--history-budgets",
        help="The list that the earlier plan was made for, if it was another; once, or once for each "
        "--history. (A run folder's plan.json has it beside it.)",
        panel=PLAN,
        show_default=False,
    ),
]
HistoryFixed = Annotated[
    bool,
    option(
        "--history-fixed",
        help="This plan was fixed before results of --history were seen.",
        panel=PLAN,
    ),
]
MaxLevels = Annotated[int, option("--max-levels", help="Treat people on at most so many levels.", panel=PLAN)]
JsonFile = Annotated[
    str | None,
    option(
        "--json",
        help="Write the figures to this file ('-': the screen).",
        panel=OUTPUT,
        metavar="FILE",
        show_default=False,
    ),
]
Quiet = Annotated[bool, option("--quiet", "-q", help="Print nothing but errors.", panel=OUTPUT)]


def earlier_plans(files: list[Path] | None, lists: list[Budgets], now: Budgets) -> list[Plan]:
    """Plans that were run on these people before, each knowing its people."""
    files = files or []
    if len(lists) not in (0, 1, len(files)):
        fail(
            f"Expected --history-budgets once, or once for each of the {len(files)} --history. Got "
            f"{len(lists)}."
        )
    if lists and not files:
        fail("Expected --history with --history-budgets. Got the latter alone.")
    given: list[Budgets | None] = (
        [*lists] * len(files) if len(lists) == 1 else [*lists] or [None] * len(files)
    )
    plans = []
    for path, named in zip(files, given, strict=True):
        earlier = read_plan(path)
        budgets = named or _people_beside(path, earlier) or now
        try:
            plans.append(earlier if earlier.roster is not None else earlier.with_people(budgets))
        except PdpsgdError as error:
            remedy = "Name the list that the plan was made for, as it was then, with --history-budgets."
            raise PdpsgdError(f"{path}: {error} {remedy}") from error
    return plans


def _people_beside(path: Path, plan: Plan) -> Budgets | None:
    """The people that a run folder's plan was carried out on, from the promises beside it; None if they have no ids."""
    promises = path.with_name("promises.csv")
    if not promises.is_file() or not (plan.people_digest or "").startswith("ids:"):
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
        self.console = Console(stderr=json_file == "-", quiet=quiet)

    @contextmanager
    def bars(self) -> Iterator[Callable[[str, int, int], None] | None]:
        """A progress bar on the error stream for each name that is told: tell(name, done, total)."""
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

        def tell(name: str, done: int, total: int) -> None:
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

    def say(self, *parts: Any) -> None:
        """Print something, as it is."""
        self.console.print(*parts, markup=False, highlight=False, soft_wrap=True)

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
    from pdpsgd.training.run_folder import plain

    return json.dumps(plain(document), indent=1)


def parse_tiers(text: str) -> dict[float, float]:
    """`1:0.34,2:0.43,3:0.23` as {epsilon: share}.

    >>> parse_tiers("1:0.5, 2:0.5")
    {1.0: 0.5, 2.0: 0.5}
    """
    tiers: dict[float, float] = {}
    for part in text.split(","):
        epsilon, colon, share = part.partition(":")
        try:
            if not colon:
                raise ValueError
            tiers[float(epsilon)] = float(share)
        except ValueError:
            fail(
                "Expected --tiers as epsilon:share,epsilon:share, for example 1:0.34,2:0.43,3:0.23. Got "
                f"{part!r}."
            )
    return tiers


def parse_weights(text: str | None) -> tuple[float, float] | None:
    """`0.7,0.3` as (w1, w2)."""
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        fail(f"Expected --weights as w1,w2, for example 0.7,0.3. Got {text!r}.")
    return first, second


def read_budgets(
    file: Path | None,
    *,
    id_column: str | None,
    epsilon_column: str,
    delta_column: str | None,
    delta: float,
    allow_infinite: bool,
    tiers: str | None = None,
    people: int | None = None,
    shuffle: int | None = None,
) -> Budgets:
    """Budgets from a file's columns, or from tiers and a number of people."""
    from pdpsgd.budgets.budgets import Budgets

    if tiers is not None:
        if people is None:
            fail("Expected --people with --tiers: how many people there are on the list. Got --tiers alone.")
        check_positive(people=people)
        return Budgets.from_tiers(parse_tiers(tiers), people, delta, shuffle=shuffle)
    if file is None:
        fail("Expected a file with people's budgets, or --tiers and --people. Got neither.")
    return Budgets.from_table(
        file,
        id_column=id_column,
        epsilon_column=epsilon_column,
        delta_column=delta_column,
        delta=delta,
        allow_infinite=allow_infinite,
    )


def read_plan(file: Path, *, verify: bool = False) -> Plan:
    """A plan from a JSON file; errors name it."""
    from pdpsgd.planning.plans import Plan

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"Expected a plan (JSON) at {str(file)!r}. {getattr(error, 'strerror', None) or error}.")
    try:
        return Plan.from_json(text, verify=verify)
    except PdpsgdError as error:
        raise type(error)(f"{file}: {error}") from error


def find_function(name: str) -> Callable[..., Any]:
    """The user's own function, named as module:function; the module may lie in the working directory."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module_name), function_name) if module_name and function_name else None
    except (ModuleNotFoundError, AttributeError) as error:
        fail(f"Expected module:function, to be found from {os.getcwd()}. Got {name!r}: {error}.")
    finally:
        sys.path.pop(0)
    if not callable(found):
        fail(f"Expected a function as module:function, for example my_views:shift. Got {name!r}.")
    function: Callable[..., Any] = found
    return function
