"""A frozen text encoder or adapters? Mails by their senders, who allow epsilon 1, 2 or 3, or a multiple of it.

    python -m experiments.texts run MAILS.parquet [--part plain,frozen,frozen-short,last-layer] [--seeds 10]
    python -m experiments.texts page

The table has the columns `sender`, `text`, `label` and `test`. Each run appends a line to `docs/results/texts.jsonl`,
with everything that it depends on; runs that are there already are not made again. Settings are chosen on training
senders alone, of whom a fifth are tested on; `page` writes `docs/results/texts.md` from the record. Embeddings of the
frozen encoder come from the user's cache folder, as in `pdpsgd train`; states of its last layer are kept where
`--states` says. The part `lora` (adapters in all layers) takes minutes for each run, and is not made by default.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import pdpsgd
from pdpsgd.models.adapters import AdaptedEncoder
from pdpsgd.models.embedding_cache import EmbeddingCache
from pdpsgd.models.encoders import load_encoder
from pdpsgd.models.last_layer import LastLayer, states
from pdpsgd.models.networks import linear_model
from pdpsgd.models.pretraining import start_at_zero

TIERS = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
DELTA = 1e-5
RECORD = Path("docs/results/texts.jsonl")
PAGE = RECORD.with_suffix(".md")
LORA_TOKENS = 64

FROZEN: dict[str, Any] = {
    "steps": 100,
    "batch_size": 512,
    "max_grad_norm": 0.5,
    "learning_rate": 20.0,
    "records_per_person": 4,
}
LORA: dict[str, Any] = {
    "steps": 20,
    "batch_size": 128,
    "max_grad_norm": 10.0,
    "optimizer": "adam",
    "learning_rate": 3e-3,
    "records_per_person": 1,
    "max_physical_batch_size": 32,
}
SHORT: dict[str, Any] = {
    "steps": 200,
    "batch_size": 512,
    "max_grad_norm": 0.5,
    "optimizer": "adam",
    "learning_rate": 0.1,
    "records_per_person": 1,
}
TRIED: dict[str, list[dict[str, Any]]] = {
    "frozen": [
        *(
            {**FROZEN, "learning_rate": rate, "steps": steps, "max_grad_norm": clip}
            for steps in (50, 100, 200)
            for clip in (0.25, 0.5)
            for rate in (10.0, 20.0, 40.0)
        ),
        # The best of these was at an end of its range: further on from there.
        *(
            {
                "learning_rate": rate,
                "steps": steps,
                "max_grad_norm": clip,
                "batch_size": people,
                "records_per_person": most,
            }
            for steps in (200,)
            for clip in (0.1, 0.25)
            for rate in (10.0 / clip, 20.0 / clip)
            for people in (1024, 1536)
            for most in (4, 16)
        ),
    ],
    "lora": [LORA, {**LORA, "head_scale": 1.0, "max_grad_norm": 0.5}],
    "frozen-short": [
        *({**SHORT, "learning_rate": rate, "steps": steps} for rate in (0.1, 0.3) for steps in (100, 200)),
        *(
            {
                "steps": 200,
                "batch_size": 1024,
                "max_grad_norm": 0.1,
                "learning_rate": rate,
                "records_per_person": 16,
            }
            for rate in (100.0, 300.0)
        ),
    ],
    "last-layer": [
        {**SHORT, "steps": 100, "batch_size": 256},
        SHORT,
        {
            "steps": 200,
            "batch_size": 512,
            "max_grad_norm": 0.1,
            "learning_rate": 300.0,
            "records_per_person": 4,
        },
    ],
}
"""Settings that are tried on training senders alone; for adapters fewer, as their runs take longer."""
TIMES = (1.0, 8.0, 64.0, 512.0)
"""Multiples of the tiers' epsilons."""
CHOSEN_AT: dict[str, dict[float, float]] = {
    "frozen": dict.fromkeys(TIMES, 1.0),
    "frozen-short": {times: times for times in TIMES},
    "lora": dict.fromkeys(TIMES, 8.0),
    "last-layer": {1.0: 8.0, 8.0: 8.0, 64.0: 64.0, 512.0: 64.0},
}
"""For each multiple of the tiers' epsilons, the one at which its settings are chosen."""
WAYS = {"frozen": "frozen", "frozen-short": "frozen", "lora": "lora", "last-layer": "last-layer"}
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Mails:
    """Texts, labels and senders; `test` marks those to test on."""

    texts: Sequence[str]
    labels: Array
    senders: Array
    test: Array
    rows: Array
    """Which rows of the table these are."""

    @classmethod
    def read(cls, file: Path) -> Mails:
        """Read the table."""
        import polars

        table = polars.read_parquet(file)
        labels = table["label"].to_numpy().astype(np.int64)
        senders, test = np.array(table["sender"].to_list()), table["test"].to_numpy()
        return cls(table["text"].to_list(), labels, senders, test, np.arange(len(table)))

    def for_choices(self) -> Mails:
        """Return the training senders alone, of whom a fifth are tested on."""
        kept = np.flatnonzero(~self.test)
        aside = [
            int(hashlib.sha256(f"choice {s}".encode()).hexdigest()[:8], 16) % 5 == 0
            for s in self.senders[kept]
        ]
        texts = [self.texts[row] for row in kept.tolist()]
        return Mails(texts, self.labels[kept], self.senders[kept], np.array(aside), self.rows[kept])


def inputs_of(mails: Mails, way: str, tokens: int | None, kept: Path | None = None) -> torch.Tensor:
    """Return what the network is given: embeddings, tokens, or states, which `kept` has for all rows of the table."""
    encoder = load_encoder(max_tokens=tokens)
    if way == "lora":
        return encoder.tokens(mails.texts)
    if way == "last-layer":
        if kept is not None and kept.exists():
            return torch.from_numpy(np.load(kept, mmap_mode="r")[mails.rows])
        made = states(encoder, mails.texts)
        if kept is not None and np.array_equal(mails.rows, np.arange(len(made))):
            np.save(kept, made.numpy())
        return made
    return encoder.embed(mails.texts, cache=EmbeddingCache.of_user())


def network_of(
    way: str,
    tokens: int | None,
    *,
    head_scale: float | None = None,
    rank: int | None = None,
    strength: float | None = None,
) -> nn.Module:
    """Return the network: a linear one on embeddings, or the encoder with adapters, in its last layer or in all.

    The head of the latter is given embeddings of norm `head_scale`; by default of a norm of 20, with which the head's
    share of a gradient is far larger than that of the adapters.
    """
    if way == "last-layer":
        options = {
            name: value for name, value in (("rank", rank), ("strength", strength)) if value is not None
        }
        return LastLayer(load_encoder(max_tokens=tokens), 2, **options)  # type: ignore[arg-type]
    if way == "lora":
        adapted = AdaptedEncoder(load_encoder(max_tokens=tokens), 2)
        adapted.scale = adapted.scale if head_scale is None else head_scale
        return adapted
    made = linear_model(384, 2)
    start_at_zero(made)
    return made


def train(mails: Mails, inputs: torch.Tensor, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Train once as asked, and test on all mails of the test senders."""
    settings = dict(asked["settings"])
    of_network = {name: settings.pop(name) for name in ("head_scale", "rank", "strength") if name in settings}
    if asked["way"] == "last-layer":
        settings = {"max_physical_batch_size": 32, **settings}
    own, tested = np.flatnonzero(~mails.test), np.flatnonzero(mails.test)
    targets = torch.from_numpy(mails.labels)
    people = np.unique(mails.senders[own])
    tiers = {epsilon * asked["times"]: share for epsilon, share in TIERS.items()}
    listed = pdpsgd.Budgets.from_tiers(tiers, len(people), DELTA, shuffle=0)
    budgets = pdpsgd.Budgets(listed.epsilon, listed.delta, ids=people)
    if asked["mechanism"] == "dp-sgd-exclude":
        settings["plan_options"] = {"exclude_below": 2.0 * asked["times"]}
    torch.manual_seed(asked["seed"])
    began = time.process_time()
    result = pdpsgd.fit(
        network_of(asked["way"], asked["tokens"], **of_network),
        (inputs[own], targets[own]),
        budgets,
        mechanism=asked["mechanism"],
        record_ids=mails.senders[own],
        seed=asked["seed"],
        progress=False,
        secure=False,
        **settings,
    )
    found = pdpsgd.evaluate(result.model, (inputs[tested], targets[tested]), ids=mails.senders[tested])
    assert found.accuracy is not None
    return {
        "accuracy": found.accuracy,
        "per_sender": found.accuracy_per_person,
        "batch_size": round(result.plan.rounds[0].expected_batch_size),
        "noise_multiplier": result.plan.rounds[0].noise_multiplier,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def train_plainly(mails: Mails, inputs: torch.Tensor, penalty: float) -> dict[str, Any]:
    """Train a logistic regression without privacy, on all mails of the training senders."""
    from sklearn.linear_model import LogisticRegression

    own, tested = np.flatnonzero(~mails.test), np.flatnonzero(mails.test)
    model = LogisticRegression(C=penalty, max_iter=1000).fit(inputs[own].numpy(), mails.labels[own])
    right = model.predict(inputs[tested].numpy()) == mails.labels[tested]
    senders = np.unique(mails.senders[tested])
    each = [right[mails.senders[tested] == sender].mean() for sender in senders]
    return {"accuracy": float(right.mean()), "per_sender": float(np.mean(each))}


def run_plainly(mails: Mails, record: Path) -> None:
    """Add the reference without privacy to the record, its penalty chosen on training senders."""
    choices = mails.for_choices()
    inputs = {"choice": inputs_of(choices, "frozen", None), "test": inputs_of(mails, "frozen", None)}
    best = max((1.0, 10.0, 100.0), key=lambda c: train_plainly(choices, inputs["choice"], c)["accuracy"])
    asked = {"way": "frozen", "tokens": None, "mechanism": "none", "times": math.inf, "settings": {"C": best}}
    line = {"asked": {**asked, "split": "test"}, "found": train_plainly(mails, inputs["test"], best)}
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")


def asked_for(
    part: str, *, times: float, seed: int, mechanism: str = "pdp-sgd-exact", **changes: Any
) -> dict[str, Any]:
    """Say everything that a run depends on."""
    tokens = None if part == "frozen" else LORA_TOKENS
    settings = {**{"lora": LORA, "frozen": FROZEN}.get(part, {}), **changes}
    return {
        "way": WAYS[part],
        "tokens": tokens,
        "mechanism": mechanism,
        "times": times,
        "settings": settings,
        "seed": seed,
    }


def run(
    mails: Mails,
    wanted: Sequence[Mapping[str, Any]],
    record: Path,
    *,
    split: str = "test",
    kept: Path | None = None,
) -> None:
    """Make the runs that are not in the record yet, and add them to it."""
    known = [json.loads(line)["asked"] for line in record.read_text().splitlines()] if record.exists() else []
    inputs: dict[tuple[str, int | None], torch.Tensor] = {}
    for asked in ({**each, "split": split} for each in wanted):
        if asked in known:
            continue
        kind = (asked["way"], asked["tokens"])
        if kind not in inputs:
            inputs[kind] = inputs_of(mails, *kind, kept)
        line = {"asked": asked, "found": train(mails, inputs[kind], asked)}
        known.append(asked)
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def choices(part: str) -> list[dict[str, Any]]:
    """Name the runs that settings are chosen by; of adapters, those at large budgets come first."""
    seeds = (100, 101) if part == "frozen" else (100,)
    return [
        asked_for(part, times=times, seed=seed, **tried)
        for tried in TRIED[part]
        for times in (64.0, 8.0, 512.0, 1.0)
        for seed in seeds
        if times in CHOSEN_AT[part].values()
    ]


def chosen(part: str, record: Path, times: float = 1.0) -> dict[str, Any]:
    """Return the settings that did best on training senders, of those that are for this multiple of the budgets."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    like = asked_for(part, times=CHOSEN_AT[part][times], seed=0)
    wanted = {"split": "choice", **{name: like[name] for name in ("way", "tokens", "times")}}
    tried = [line for line in lines if wanted.items() <= line["asked"].items()]

    def mean(settings: Mapping[str, Any]) -> tuple[float, float]:
        found = [line["found"] for line in tried if line["asked"]["settings"] == settings]
        return _average(found, "accuracy"), _average(found, "per_sender")

    return max(TRIED[part], key=mean)


def _average(found: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(each[name] for each in found) / len(found) if found else 0.0


def wanted(part: str, record: Path, seeds: int) -> list[dict[str, Any]]:
    """Name the runs that are tested."""

    def runs(times: float, seeds: Sequence[int], **more: Any) -> list[dict[str, Any]]:
        best = chosen(part, record, times)
        return [asked_for(part, times=times, seed=seed, **more, **best) for seed in seeds]

    if part == "lora":
        return [each for times in (1.0, 64.0, 8.0) for each in runs(times, (0,))]
    if part == "frozen":
        beside = ("pdp-sgd-exact", "dp-sgd", "dp-sgd-exclude")
        compared = [each for mechanism in beside for each in runs(1.0, range(seeds), mechanism=mechanism)]
        return compared + [each for times in (8.0, 64.0) for each in runs(times, range(3))]
    first = [each for times in (64.0, 8.0, 512.0, 1.0) for each in runs(times, (0,))]
    return first + [each for times in (64.0, 8.0, 512.0, 1.0) for each in runs(times, (1, 2))]


def page(record: Path) -> str:
    """Write the page: the tested runs of the chosen settings, and what was tried."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    best = {**FROZEN, **chosen("frozen", record)}
    rows = []
    for name, part, mechanism, times in (
        ("frozen, logistic regression without privacy", "frozen", "none", math.inf),
        ("frozen, uniform DP-SGD (`dp-sgd`)", "frozen", "dp-sgd", 1.0),
        ("frozen, without those at epsilon 1 (`dp-sgd-exclude`)", "frozen", "dp-sgd-exclude", 1.0),
        *(("**frozen, `pdp-sgd-exact`**", "frozen", "pdp-sgd-exact", times) for times in TIMES),
        *(("adapters in all layers, 64 tokens", "lora", "pdp-sgd-exact", times) for times in TIMES),
        *(
            (name, part, "pdp-sgd-exact", times)
            for times in TIMES
            for name, part in (
                ("frozen, 64 tokens", "frozen-short"),
                ("**adapter in the last layer, 64 tokens**", "last-layer"),
            )
        ),
    ):
        found = tested(lines, record, part, times, mechanism)
        tiers = "none" if mechanism == "none" else _tiers(times)
        if found:
            rows.append(
                f"| {name} | {tiers} | {_mean(found, 'accuracy')} | {_mean(found, 'per_sender')} | {len(found)} |"
            )
    tried = [line for line in lines if line["asked"]["split"] == "choice"]
    at_choice = ";\n  ".join(_trial_text(line) for line in tried if line["asked"]["way"] == "lora")
    long = [line for line in tried if line["asked"]["way"] == "frozen" and line["asked"]["tokens"] is None]
    beside = _mean([line["found"] for line in long if line["asked"]["settings"] == best], "accuracy")
    return TEXT.format(
        rows="\n".join(rows),
        settings=", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in best.items()),
        tried=len({json.dumps(line["asked"]["settings"]) for line in long}),
        adapters=at_choice or "none so far",
        beside=beside,
        tokens=LORA_TOKENS,
        steps=LORA["steps"],
        people=LORA["batch_size"],
        settings_short=_chosen_text(lines, record, "frozen-short"),
        settings_last=_chosen_text(lines, record, "last-layer"),
        crossing_choice=_crossing(lines, record, "choice"),
        crossing_test=_crossing(lines, record, "test"),
    )


def tested(
    lines: Sequence[Mapping[str, Any]], record: Path, part: str, times: float, mechanism: str
) -> list[dict[str, Any]]:
    """Return what came out of the tested runs with the settings that were chosen for them."""
    if mechanism == "none":
        wanted: dict[str, Any] = {"split": "test", "mechanism": "none"}
    else:
        wanted = {"split": "test", **asked_for(part, times=times, seed=0, mechanism=mechanism)}
        wanted |= {"settings": asked_for(part, times=1.0, seed=0, **chosen(part, record, times))["settings"]}
        del wanted["seed"]
    return [line["found"] for line in lines if wanted.items() <= line["asked"].items()]


def _tiers(times: float) -> str:
    return " / ".join(f"{epsilon * times:g}" for epsilon in TIERS)


def trials(lines: Sequence[Mapping[str, Any]], record: Path, part: str, times: float) -> list[dict[str, Any]]:
    """Return what came out of the trials, on training senders, of the settings that were chosen for a multiple."""
    like = asked_for(part, times=times, seed=0, **chosen(part, record, times))
    wanted = {"split": "choice", **{name: value for name, value in like.items() if name != "seed"}}
    return [line["found"] for line in lines if wanted.items() <= line["asked"].items()]


def _chosen_text(lines: Sequence[Mapping[str, Any]], record: Path, part: str) -> str:
    """Say which settings were chosen for which budgets, of how many, and what they came to on training senders."""
    said = []
    like = {name: asked_for(part, times=1.0, seed=0)[name] for name in ("way", "tokens")}
    for times in TIMES:
        wanted = {"split": "choice", "times": times, **like}
        tried = {
            json.dumps(line["asked"]["settings"]) for line in lines if wanted.items() <= line["asked"].items()
        }
        if found := trials(lines, record, part, times):
            listed = ", ".join(
                f"{key.replace('_', ' ')} {value if isinstance(value, str) else format(value, 'g')}"
                for key, value in chosen(part, record, times).items()
            )
            said.append(
                f"at {_tiers(times)}, the best of {len(tried)} tried: {listed} ({_mean(found, 'accuracy')} % per mail, "
                f"{_mean(found, 'per_sender')} % per sender)"
            )
    return ";\n  ".join(said) or "none so far"


def _crossing(lines: Sequence[Mapping[str, Any]], record: Path, split: str) -> str:
    """Say between which measured budgets the adapter in the last layer passes the frozen encoder."""

    def found(part: str, times: float) -> list[dict[str, Any]]:
        if split == "choice":
            return trials(lines, record, part, times)
        return tested(lines, record, part, times, "pdp-sgd-exact")

    said = []
    for name, what in (("accuracy", "per mail"), ("per_sender", "per sender")):
        ahead: list[tuple[float, float]] = []
        for times in TIMES:
            pair = [found(part, times) for part in ("last-layer", "frozen-short")]
            if all(pair):
                ahead.append((times, 100 * (_average(pair[0], name) - _average(pair[1], name))))
        behind = [times for times, points in ahead if points <= 0]
        if not ahead:
            said.append(f"{what}: not measured")
        elif not behind:
            said.append(f"{what}: below {_tiers(ahead[0][0])}, the smallest that was measured")
        elif behind[-1] == ahead[-1][0]:
            said.append(f"{what}: nowhere up to {_tiers(behind[-1])}")
        else:
            after = next(times for times, _ in ahead if times > behind[-1])
            said.append(f"{what}: between {_tiers(behind[-1])} and {_tiers(after)}")
        said[-1] += "".join(f"; {points:+.1f} points at {_tiers(times)}" for times, points in ahead)
    return ". ".join(said)


def _trial_text(line: Mapping[str, Any]) -> str:
    """Say what a trial of adapters was, and what came out."""
    settings, found, times = line["asked"]["settings"], line["found"], line["asked"]["times"]
    budgets = "the tiers' own epsilons" if times == 1 else f"{times:g} times the tiers' epsilons"
    return (
        f"embeddings of norm {settings.get('head_scale', 384**0.5):.3g}, clipping at {settings['max_grad_norm']:g}, "
        f"at most {settings['records_per_person']} of a sender's mails, {budgets}: "
        f"{100 * found['accuracy']:.1f} % per mail, {100 * found['per_sender']:.1f} % per sender"
    )


def _mean(found: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [100 * each[name] for each in found]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{statistics.mean(values):.1f}" + ("" if error is None else f" ± {error:.1f}")


TEXT = """# Texts: a frozen encoder, or adapters

5,924 mails of 2,555 senders (SpamAssassin's public corpus), spam or not; trained on 2,044 senders, tested on all mails
of every fifth sender. 34 % of the senders allow epsilon 1, 43 % 2, 23 % 3, or a multiple of it; delta 1e-05. The
encoder is all-MiniLM-L6-v2 (public weights). Accuracy in %, mean and standard error over runs. Written by
`python -m experiments.texts page` from `texts.jsonl`, which has the settings and seed of every run;
`python -m experiments.texts run MAILS.parquet` makes the runs.

| what is trained, and how | epsilon | accuracy per mail | per sender | runs |
|---|---|---|---|---|
{rows}

- **Frozen**: the encoder reads 256 tokens, and a linear model is trained on embeddings. Settings: {settings}.
  They were the best of {tried} for `pdp-sgd-exact` on training senders alone ({beside} there); the other
  two mechanisms have the same. The ranges of the search were widened once, as the best setting was at an end of them,
  after test senders had been seen with it (91.3 %; those runs stay in the record).
- **Adapter in the last layer** (`--finetune lora`): of rank 1, beside the last projection of the last layer, 2,690
  numbers with the head; {tokens} tokens. What the adapter is given comes from public weights, and is computed once. Its
  settings were chosen on a fifth of the training senders, with the rest to train on:
  {settings_last}.
  At budgets without trials it has the settings of the nearest with them.
- **Frozen, 64 tokens**, to compare with it: a linear model on embeddings of the same tokens, its settings chosen in the
  same way:
  {settings_short}.
- **Adapters in all layers**: rank 4 beside the queries and values of all six layers, 37,634 numbers with
  the head; {tokens} tokens, {steps} steps of {people} senders, Adam. A run takes two to four minutes of a core, so few
  settings were tried, and each once. On a fifth of the training senders:
  {adapters}.

## Two road signs

Where the adapter in the last layer passes the frozen encoder, on the same tokens:

- on a fifth of the training senders, each with the best of its settings there: {crossing_choice}.
- on test senders: {crossing_test}.

Both have the same senders, and which senders these are matters more than seeds do: with the 408 that are held out of
training, a point is about one standard error of either. A sender's gradient is the mean over their mails in a step, so
both are trained for accuracy per sender; with 16 of a sender's mails in a step, as the frozen encoder has at its best,
accuracy per mail is higher. For adapters that takes minutes of a core for each run, and was not tried.

- **Small epsilon: freeze.** Noise is added to every number that is trained. The linear model has 770 of them, and
  trains in seconds.
- **Large epsilon: measure before you fine-tune.** Without privacy the frozen encoder has 96 %: there is room for
  adapters. Whether they fill it at a budget is said above, as far as it is measured: by few settings, and few runs.
"""


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("mails", type=Path, nargs="?")
    parser.add_argument("--part", default="plain,frozen,frozen-short,last-layer")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument(
        "--split", default="choice,test", help="trials on training senders, tested runs, or both"
    )
    parser.add_argument("--states", type=Path, help="a file for states of the last layer (.npy, 1.5 GB)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.what == "page":
        PAGE.write_text(page(options.record))
        return
    mails = Mails.read(options.mails)
    for part in options.part.split(","):
        if part == "plain":
            run_plainly(mails, options.record)
            continue
        if part in TRIED and "choice" in options.split:
            run(mails.for_choices(), choices(part), options.record, split="choice", kept=options.states)
        if "test" in options.split:
            run(mails, wanted(part, options.record, options.seeds), options.record, kept=options.states)


if __name__ == "__main__":
    main()
