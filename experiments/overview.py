"""The first page of the results: the main figures, what is still missing, and where everything is."""

from __future__ import annotations

from pathlib import Path

from experiments.cells import Cell, cell, gain, network_of, printed_text
from experiments.published import DATASETS, TITLES, best_of_paper
from experiments.record import Record
from experiments.search import SEARCH_SEED
from experiments.settings import Setting
from experiments.studies import (
    EXACT_AND_UNIFORM,
    SHOWN_ON,
    STUDIES,
    feature_settings,
    network_settings,
    table_1_settings,
)

WANTED_SEEDS = 3
IDP_NETWORK_SEEDS = 1
PROBES = tuple(SHOWN_ON)

TEXT = """\
# Results

The pages are made by `python -m experiments` from the records `search.jsonl` (trials of the search), `runs.jsonl`
(one line a run: settings, seed, versions, accuracy, iterations, seconds, promised and proven epsilon of each
level) and `effort.jsonl`; [how many records of a person take part](many-records.md) is a study of its own;
so is [texts: a frozen encoder, or adapters](texts.md);
*speed* is by `bench/shelf.py` and its neighbors, and `audit/` says on each page what made it. A
reproduction that was stopped continues where it was; `python -m experiments pages` writes these pages again.
Most runs on record were made with version 0.1.0, whose generator was another one (SFC64, noise in float32): the same
seed now gives other batches and other noise, so a run made again agrees with its record up to the spread over seeds,
not bit for bit.

## Against the paper

Test accuracy in percent at k = 0 (20 groups of budgets in [0.5, 1], delta 1e-5): mean ± standard deviation
(seeds). Ours is sound: PLD, everybody charged. The paper's own figures rest on a bookkeeping that does not
keep its promise (see `docs/everybody-pays.md`). Uniform DP-SGD, at the strictest budget, was given the same
search: two or three learning rates on 5,000 held-out training people, one seed. The number of steps was
settled while looking at validation accuracies of `pdp-sgd-exact` on MNIST, and everything else about a recipe
by trials of `pdp-sgd-exact`; some learning rates were added to a grid after test accuracies with the others
had been seen. All trials, also those outside the grids, are on the search page, but for those by which the drawing
of digits was settled (see the page on networks), and one of IDP-SGD's network for SVHN with first weights by Glorot's
rule, which had learned next to nothing after 60 steps. A validation accuracy from 5,000 people is uncertain by about
0.5 points, which is more than some of the choices turn on.

{headline}

"Gain" is what personalization is worth over uniform DP-SGD when both are tuned alike: mean over seeds ±
standard error. With few seeds that error is itself uncertain. Other personalized systems are often as good as
`pdp-sgd-exact`: see table 1. What many do instead, leaving the strict people out (`dp-sgd-exclude`), is uniform DP-SGD
at these budgets: within a factor of two of each other, the most signal is where nobody is left out. Where budgets lie
further apart it is another row: see [IDP-SGD's benchmark](idp-benchmark.md), and the demo's two lists in the README.

## Pages

| page | what |
|---|---|
| [table-1](table-1.md) | all systems under equal and sound conditions |
| [networks](networks.md) | the paper's networks as printed, and with the recipes of the presets |
| [features](features.md) | a linear model on wavelet features, not the paper's network |
| [table-1-as-published](table-1-as-published.md) | the paper's set-up and bookkeeping, its cells beside ours |
| [table-2](table-2.md) | run time, iterations, parameters |
| [table-3](table-3.md) | Individualized PATE, soundly, beside `pdp-sgd-exact`: linear models, the paper's CNNs |
| [idp-benchmark](idp-benchmark.md) | IDP-SGD's own benchmark, also with its own network |
| [filter](filter.md) | individual filters beside `pdp-sgd-exact`, at equal compute |
| [least-squares](least-squares.md) | personal least squares, with nothing tuned |
| [fairness](fairness.md) | by tier and class where strictness goes with a class, and what remedies cost |
| [probabilities](probabilities.md) | log loss: averaged weights, calibration (`experiments.probabilities`) |
| [speed](speed.md) | time and memory of a step, beside plain SGD and Opacus; growth; planning (`bench/`) |
| [search](search.md) | every trial of the hyper-parameter search |
| [figures](figures.md) | distributions of budgets; budgets left and chances round by round; sweeps |

## What is done

Trials of the search and runs on record, {seeds} seeds of each setting unless the table says otherwise. Each command
goes by the records, and with `--seeds` runs more. SVHN as published has up to 3.4 points between seeds, so that
its cells are rough. The studies of table 3, fairness, filters and least squares keep records of their own; their pages
say what was run.

{done}

Behind table 1 as published are also single runs, made one after the other to find out why a cell is not the printed
one, until that was answered ({probes}). They are no tables, and are not filled up: that page shows each with its
number of runs.
"""


def write_overview(search: Record, record: Record, folder: Path) -> list[Path]:
    """Write the overview as README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    text = TEXT.format(
        headline="\n".join(_headline(search, record)),
        done="\n".join(_done(search, record)),
        probes=", ".join(f"`{name}`" for name in PROBES),
        seeds=WANTED_SEEDS,
    )
    path.write_text(text, encoding="utf-8")
    return [path]


def _headline(search: Record, record: Record) -> list[str]:
    lines = [
        "| data set | model | `pdp-sgd-exact` | uniform DP-SGD | gain | the paper's best at k = 0 |",
        "|---|---|---|---|---|---|",
    ]
    for dataset in DATASETS:
        best = printed_text(best_of_paper(dataset))
        for where, settings in (
            ("table 1", table_1_settings(dataset, search)),
            ("ReLU as printed", network_settings(dataset, search, ("relu",))),
            ("preset", network_settings(dataset, search, ("best",))),
            ("preset", network_settings(dataset, search, ("drawn",))),
            ("preset", feature_settings(dataset, search)),
        ):
            exact, uniform = (_cell(settings, system, record) for system in EXACT_AND_UNIFORM)
            if exact is None or uniform is None or exact.mean is None:
                continue
            lines.append(
                f"| {TITLES[dataset]} | {network_of(exact.setting.recipe)} ({where}) | {exact.text()} | "
                f"{uniform.text()} | {gain(exact, uniform)} | {best} |"
            )
    return lines


def _done(search: Record, record: Record) -> list[str]:
    """Return how much of each study is on record; nothing that was not begun."""
    lines = ["| command | data set | trials of the search | runs | seeds |", "|---|---|---|---|---|"]
    for name, study in STUDIES.items():
        for dataset in () if name in PROBES else study.datasets:
            trials = [(s, SEARCH_SEED) for trial in study.searches(dataset) if len(trial) > 1 for s in trial]
            settings = study.settings(dataset, search)
            seeds = {s: _wanted_seeds(s) for s in settings}
            runs = [(s, seed) for s, number in seeds.items() for seed in range(number)]
            lines.append(
                f"| `python -m experiments {name} --dataset {dataset}` | {TITLES[dataset]} | "
                f"{_share(trials, search, 'none needed')} | {_share(runs, record, 'after the search')} | "
                f"{' or '.join(str(number) for number in sorted(set(seeds.values())))} |"
            )
    return lines


def _wanted_seeds(setting: Setting) -> int:
    """Return how many runs of a setting make the study complete: fewer where one takes many minutes."""
    return IDP_NETWORK_SEEDS if setting.recipe.network == "idp" else WANTED_SEEDS


def _share(wanted: list[tuple[Setting, int]], record: Record, nothing: str) -> str:
    done = sum(record.has(setting, seed) for setting, seed in wanted)
    return f"{done} of {len(wanted)}" if wanted else nothing


def _cell(settings: list[Setting], system: str, record: Record) -> Cell | None:
    found = (s for s in settings if s.system == system and s.population.k == 0)
    setting = next(found, None)
    return None if setting is None else cell(setting, record)
