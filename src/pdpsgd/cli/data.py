"""`pdpsgd data`: the benchmarks on this machine, a first schema for your own table, and the cache folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pdpsgd.cli.shared import JsonFile, Screen, check_output, write_file
from pdpsgd.errors import PdpsgdError, fail

app = typer.Typer(
    no_args_is_help=True,
    help="Benchmark data on this machine, a first schema for your own table, and the cache folder.",
)

Name = Annotated[str, typer.Argument(help="mnist, fashion-mnist or svhn (see `pdpsgd data list`)")]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-folder",
        help="first folder to look in, before $PDPSGD_DATA, ./data and the cache",
        show_default=False,
    ),
]


@app.command("list")
def list_(data_folder: DataFolder = None, json_file: JsonFile = None) -> None:
    """List the benchmarks, and where each of them is on this machine, intact.

    \b
    Examples:
      pdpsgd data list
      pdpsgd data list --json -
    """
    from pdpsgd.data.benchmarks.catalog import CATALOG

    rows = [_entry(name, data_folder) for name in CATALOG]
    if json_file is not None:
        Screen(quiet=False, json_file=json_file).write_json(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "what", "people", "shape", title="Benchmarks", title_justify="left")
    table.add_column("where", overflow="fold")
    for row in rows:
        people = f"{row['train_people']:,} + {row['test_people']:,} to test"
        shape = " x ".join(map(str, row["input_shape"]))
        missing = "damaged, see below" if row["problem"] else f"not here: {_way_to(row['name'])}"
        table.add_row(row["name"], row["what"], people, shape, escape(row["found"] or missing))
    Console().print(table)
    for row in rows:
        if row["problem"]:
            typer.echo(f"{row['name']}: {row['problem']}")


@app.command()
def get(name: Name, data_folder: DataFolder = None, json_file: JsonFile = None) -> None:
    """Download a benchmark, unless it is here already, and check it.

    A transfer that was interrupted continues where it stopped; a file gets its name only when it is
    complete and has the published checksum. Damaged files are fetched again.

    \b
    Examples:
      pdpsgd data get mnist
      pdpsgd data get svhn --data-folder ~/datasets
    """
    from pdpsgd.data.benchmarks.catalog import benchmark
    from pdpsgd.data.benchmarks.folders import find
    from pdpsgd.data.benchmarks.loading import get as get_files

    entry = benchmark(name)
    place = None if entry.built_in else find(entry, data_folder)
    if place is None or _problem(name, place)[0]:
        place = get_files(name, folder=data_folder)
    if json_file is not None:
        found = json.dumps({"name": name, "folder": str(place)})
        Screen(quiet=False, json_file=json_file).write_json(found)
    else:
        typer.echo(f"{name} is in {place} (terms: {entry.terms})")


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="name of one benchmark", show_default=False)] = None,
    data_folder: DataFolder = None,
    json_file: JsonFile = None,
) -> None:
    """Check the files of a benchmark, or of all that are here, against what was published.

    Ends with exit code 1 if a file is damaged.

    \b
    Examples:
      pdpsgd data check
      pdpsgd data check fashion-mnist --json checked.json
    """
    from pdpsgd.data.benchmarks.catalog import CATALOG, benchmark
    from pdpsgd.data.benchmarks.folders import find

    results = []
    for wanted in [benchmark(name).name] if name else CATALOG:
        place = None if CATALOG[wanted].built_in else find(CATALOG[wanted], data_folder)
        if place is not None:
            problem, notes = _problem(wanted, place)
            results.append({"name": wanted, "folder": str(place), "problem": problem, "notes": list(notes)})
        elif name:
            found = _entry(wanted, data_folder)["found"]
            if not found:
                fail(f"Expected all files of {wanted!r} in a folder. Found none that has: {_way_to(wanted)}.")
            results.append({"name": wanted, "folder": found, "problem": None, "notes": []})
    if json_file is not None:
        Screen(quiet=False, json_file=json_file).write_json(json.dumps(results, indent=1))
    else:
        _print_checks(results)
    if any(result["problem"] for result in results):
        raise typer.Exit(1)


@app.command()
def schema(
    file: Annotated[Path, typer.Argument(help="your table: a .csv or .parquet file")],
    label: Annotated[str, typer.Option(help="column to be predicted")],
    id_column: Annotated[str | None, typer.Option(help="column with person ids", show_default=False)] = None,
    epsilon_column: Annotated[
        str | None, typer.Option(help="column with each person's epsilon", show_default=False)
    ] = None,
    delta_column: Annotated[
        str | None, typer.Option(help="column with each person's delta", show_default=False)
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="classification, or regression for a number", show_default="by the label"),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="column of free text, then the only feature", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="output file, instead of the screen", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwriting of the output file")] = False,
) -> None:
    """Draft a schema for your own table: the kind of each column, its range or its categories.

    The draft is read from the data and is therefore NOT PRIVATE. Open it, replace every range and category
    by what is publicly known, and set `confirmed = true`; then train with `--schema`.

    \b
    Example:
      pdpsgd data schema people.csv --label income --id-column person \\
          --epsilon-column epsilon -o schema.toml
    """
    from pdpsgd.data.drafting import draft_schema
    from pdpsgd.data.tabular import left_out

    if output is not None:
        check_output(output, "--output")
        if output.exists() and not force:
            fail(f"Expected a new file for the schema. {str(output)!r} exists; --force overwrites it.")
        if output.exists() and file.exists() and output.samefile(file):
            fail(f"Expected another file for the schema than the table itself. Got {str(output)!r} for both.")
    budgets = [name for name in (epsilon_column, delta_column) if name is not None]
    drafted = draft_schema(file, label=label, id_column=id_column, leave_out=budgets, task=task, text=text)
    if output is None:
        typer.echo(drafted.to_toml(), nl=False)
        return
    write_file(output, drafted.to_toml())
    screen = Screen(quiet=False)
    screen.say(
        f"Drafted {output} from the data. It is NOT PRIVATE until you have replaced its ranges and "
        f"categories by public knowledge and set `confirmed = true` in it."
    )
    for note in left_out(drafted, budgets):
        screen.say(f"Note: {note}")


@app.command()
def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="removal of all but downloaded benchmarks", show_default=False)
    ] = False,
    cache_folder: Annotated[
        Path | None,
        typer.Option(
            "--cache-folder",
            help="another folder than $PDPSGD_CACHE, or the user's cache folder",
            show_default=False,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List what is kept in the cache folder for later runs, or remove it; it is computed again when needed.

    All together stays below 4 GB ($PDPSGD_CACHE_LIMIT, in GB): what was not used for longest goes first.

    \b
    Examples:
      pdpsgd data cache
      pdpsgd data cache --clear
    """
    from pdpsgd import _cache

    _cache.use_cache_folder(cache_folder)
    found = _cache.clear_cache() if clear else _cache.cached_files()
    total = sum(each.size for each in found)
    if json_file is not None:
        listed = [{"file": str(each.path), "what": each.what, "bytes": each.size} for each in found]
        content = {"folder": str(_cache.cache_place()), "bytes": total, "limit": _cache.cache_limit()}
        figures = json.dumps({**content, "removed" if clear else "files": listed}, indent=1)
        Screen(quiet=False, json_file=json_file).write_json(figures)
        return
    for each in found:
        typer.echo(f"{_cache.size_text(each.size):>8}  {each.path.name}  ({each.what})")
    did = "Removed" if clear else "In the cache"
    Screen(quiet=False).say(
        f"{did}: {len(found)} files, {_cache.size_text(total)}, in {_cache.cache_place()} "
        f"(limit {_cache.size_text(_cache.cache_limit())}, $PDPSGD_CACHE_LIMIT)."
    )


def _entry(name: str, data_folder: Path | None) -> dict[str, Any]:
    """Say what the catalog knows of a benchmark, where it was found, and what is wrong with its files there."""
    from pdpsgd.data.benchmarks.catalog import benchmark
    from pdpsgd.data.benchmarks.folders import find

    entry = benchmark(name)
    problem = None
    if entry.built_in:
        found = "scikit-learn" if importlib.util.find_spec("sklearn") else None
    else:
        place = find(entry, data_folder)
        problem = None if place is None else _problem(name, place)[0]
        found = None if place is None or problem else str(place)
    return {
        "name": name,
        "what": entry.title,
        "train_people": entry.train_people,
        "test_people": entry.test_people,
        "input_shape": list(entry.input_shape),
        "classes": list(entry.classes),
        "terms": entry.terms,
        "found": found,
        "problem": problem,
    }


def _way_to(name: str) -> str:
    return "pip install scikit-learn" if name == "digits" else f"pdpsgd data get {name}"


def _problem(name: str, place: Path) -> tuple[str | None, tuple[str, ...]]:
    """Say what is wrong with a benchmark's files, if anything, and the remarks on them."""
    from pdpsgd.data.benchmarks.loading import verify

    try:
        return None, verify(name, place=place)
    except PdpsgdError as error:
        return str(error), ()


def _print_checks(results: list[dict[str, Any]]) -> None:
    if not results:
        typer.echo("No benchmark has files here. `pdpsgd data list` says how to get them.")
    for result in results:
        state = typer.style("damaged", fg="red") if result["problem"] else typer.style("intact", fg="green")
        typer.echo(f"{result['name']} in {result['folder']}: {state}")
        for remark in filter(None, [result["problem"], *result["notes"]]):
            typer.echo(f"  {remark}")
