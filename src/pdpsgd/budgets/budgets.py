"""What each person allows: the specification (Phi, Delta) of the promise."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, KeysView, Mapping, ValuesView
from copy import copy
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import BoolArray, FloatArray, IdArray, IntArray
from pdpsgd.budgets.rows import check_rows, check_words, number_or_nan, numbers_in, words_remedy
from pdpsgd.errors import check_positive, fail

# A finite epsilon above this is warned of.
LARGE_EPSILON = 20
WRITTEN_ALIKE = "differ only in white space, in characters that show nothing, or in how letters are encoded"
UNUSUAL_BYTES = r"[\x00-\x1f\x7f]|^ | $"
"""In ids of ASCII: where as they are read may not be as they are written."""
SHOWS_NOTHING = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
"""Control characters that are no white space, and what Unicode says is ignored where it cannot be shown."""
LIKE_A_BLANK = re.compile(r"[^\S \t\n\r\f\v]")


@dataclass(frozen=True, init=False, eq=False)
class Budgets:
    """The public list of people and the (epsilon, delta) that each of them allows.

    An epsilon or a delta of 0 means that the person's record is never used. An infinite epsilon ("no
    protection asked") must be allowed by name with `allow_infinite=True`. Without `ids`, people are known by
    their position.

    The list, and the budgets on it, are public: the promise protects people's records and whether they
    supplied one.

    >>> Budgets([0.5, 1.0, 2.0])
    Budgets(3 people, epsilon 0.5 to 2, delta 1e-05)
    >>> Budgets([0.5, -1.0])
    Traceback (most recent call last):
        ...
    pdpsgd.errors.PdpsgdError: Expected epsilon >= 0. Got -1.0 for person 1.
    """

    epsilon: FloatArray
    delta: FloatArray
    ids: IdArray
    named: bool
    """Whether people have ids of their own; without, they are known by their position on this list only."""

    def __init__(
        self,
        epsilon: npt.ArrayLike,
        delta: npt.ArrayLike = 1e-5,
        *,
        ids: npt.ArrayLike | None = None,
        allow_infinite: bool = False,
    ) -> None:
        names = None if ids is None else _names(ids, lambda index: f"position {index}")

        def person(index: int) -> str:
            return f"person {names[index] if names is not None and index < names.size else index}"

        self._set(epsilon, delta, names, person, allow_infinite)

    @classmethod
    def of_enrolled(cls, epsilon: FloatArray, delta: FloatArray, ids: IdArray) -> Budgets:
        """List people as a ledger knows them: two whose ids were once enrolled written alike stay two people."""
        budgets = object.__new__(cls)
        budgets._set(epsilon, delta, ids, lambda index: f"person {ids[index]}", True, written_alike=True)
        return budgets

    def weak_promises(self) -> list[str]:
        """Say which promises on the list are hardly any: a delta above 1 over the people, a finite epsilon above 20.

        >>> len(Budgets([1.0, 50.0], delta=0.6).weak_promises()), Budgets([1.0, 20.0]).weak_promises()
        (2, [])
        """
        promised = (self.epsilon > 0) & (self.delta > 0) & np.isfinite(self.epsilon)
        found = []
        loose = promised & (self.delta > 1 / len(self))
        if np.any(loose):
            found.append(
                f"{_counted(loose)} a delta above 1 over the number of people (up to {self.delta[loose].max():g}, with "
                f"{len(self):,} people): delta alone would allow to publish somebody's whole record. A tenth of it, "
                f"{0.1 / len(self):.1g}, or less is usual."
            )
        large = promised & (self.epsilon > LARGE_EPSILON)
        if np.any(large):
            found.append(
                f"{_counted(large)} an epsilon above {LARGE_EPSILON} (up to {self.epsilon[large].max():g}): it lets an "
                f"attacker's odds grow by a factor of e^{LARGE_EPSILON}, 485 million, and more, which protects hardly "
                "anything. 0.1 to 10 is usual."
            )
        return found

    def _set(
        self,
        epsilon: npt.ArrayLike,
        delta: npt.ArrayLike,
        ids: IdArray | None,
        place: Callable[[int], str],
        allow_infinite: bool,
        *,
        written_alike: bool = False,
    ) -> None:
        epsilons = np.atleast_1d(_numbers("epsilon", epsilon, place))
        deltas = _numbers("delta", delta, place)
        for name, values in (("epsilon", epsilons), ("delta", deltas)):
            if values.ndim > 1:
                fail(f"Expected {name} to be one value per person. Got an array of shape {values.shape}.")
        if epsilons.size == 0:
            fail("Expected a budget for at least one person. Got an empty list.")
        if deltas.ndim == 1 and deltas.shape != epsilons.shape:
            fail(f"Expected one delta, or one for each of the {epsilons.size} people. Got {deltas.size}.")
        if ids is not None and ids.shape != epsilons.shape:
            fail(f"Expected one id for each of the {epsilons.size} people. Got {ids.size}.")
        _check_budgets(epsilons, np.atleast_1d(deltas), place, allow_infinite=allow_infinite)
        object.__setattr__(self, "named", ids is not None)
        if ids is None:
            ids = np.arange(epsilons.size)
        else:
            _check_ids(ids, place)
            if not written_alike:
                _check_written_alike(ids, place)
        columns: dict[str, IdArray] = {
            "epsilon": epsilons,
            "delta": np.broadcast_to(deltas, epsilons.shape),
            "ids": ids,
        }
        for name, column in columns.items():
            # A copy of what the user holds: ids that are shuffled later must not move people to other levels.
            frozen = column if column.strides == (0,) else column.copy()
            frozen = frozen.view()
            frozen.flags.writeable = False
            object.__setattr__(self, name, frozen)

    def without_names(self) -> Budgets:
        """Return the same budgets with ids that are only positions: on another list they may be other people."""
        unnamed = copy(self)
        object.__setattr__(unnamed, "named", False)
        return unnamed

    def __len__(self) -> int:
        return int(self.epsilon.size)

    def __repr__(self) -> str:
        return (
            f"Budgets({len(self):,} people, epsilon {_range(self.epsilon)}, delta {_range(self.delta)})"
            if len(self) > 1
            else f"Budgets(1 person, epsilon {self.epsilon[0]:g}, delta {self.delta[0]:g})"
        )

    @classmethod
    def from_mapping(
        cls,
        budgets: Mapping[Any, float | tuple[float, float]],
        delta: float = 1e-5,
        *,
        allow_infinite: bool = False,
    ) -> Budgets:
        """Take budgets from {id: epsilon} or {id: (epsilon, delta)}.

        >>> Budgets.from_mapping({"ann": 0.5, "ben": (2.0, 1e-6)}).delta.tolist()
        [1e-05, 1e-06]
        """
        pairs = [value if isinstance(value, tuple) else (value, delta) for value in budgets.values()]
        for name, pair in zip(budgets, pairs, strict=True):
            if len(pair) != 2:
                fail(f"Expected epsilon, or (epsilon, delta), for {name!r}. Got {pair!r}.")
        epsilons, deltas = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return cls(epsilons, deltas, ids=list(budgets), allow_infinite=allow_infinite)

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        id_column: str | None = None,
        epsilon_column: str = "epsilon",
        delta_column: str | None = None,
        delta: float = 1e-5,
        allow_infinite: bool = False,
        repeated_ids: bool = False,
        epsilon_map: Mapping[str, float] | None = None,
    ) -> Budgets:
        """Read budgets from a pandas or polars frame, or from a CSV or Parquet file.

        Args:
            table: the frame, or the path of the file.
            id_column: column with person ids; without, people are known by their position.
            epsilon_column: column with the epsilon that each person allows.
            delta_column: column with each person's delta.
            delta: one delta for everybody, without `delta_column`.
            allow_infinite: accept people who ask for no protection.
            repeated_ids: accept several rows of a person, all with the same budget.
            epsilon_map: the epsilon that each word in `epsilon_column` stands for, as in {"low": 0.5, "high": 8};
                public, as budgets are.

        Returns:
            The budgets, in the order of the rows, one per person.

        Raises:
            PdpsgdError: a value is missing, no number or no budget; the message names the file and the row.
        """
        from pdpsgd.budgets.readers import read_columns

        wanted = [name for name in (id_column, epsilon_column, delta_column) if name is not None]
        numbers = [name for name in (epsilon_column, delta_column) if name is not None]
        words = {} if epsilon_map is None else {epsilon_column: check_words(epsilon_map)}
        check = partial(check_rows, numbers, words, allow_infinite)
        columns, source = read_columns(table, wanted, check=check)
        for name in numbers:
            columns[name] = numbers_in(columns[name], words.get(name))
            where = _first_non_number(columns[name])
            if where is not None:
                got = str(columns[name][where])
                remedy = words_remedy(columns[name]) if name == epsilon_column else ""
                fail(f"Expected a number in column {name!r} of {source.row(where)}. Got {got!r}.{remedy}")
        ids = None if id_column is None else _names(columns[id_column], source.row)
        place = source.row
        if ids is not None and repeated_ids:
            kept = _first_rows(ids, {name: columns[name] for name in numbers}, source.row)
            columns = {name: values[kept] for name, values in columns.items()}
            ids, place = ids[kept], _RowsOf(source.row, kept)
        budgets = cls.__new__(cls)
        budgets._set(
            columns[epsilon_column],
            delta if delta_column is None else columns[delta_column],
            ids,
            place,
            allow_infinite,
        )
        return budgets

    @classmethod
    def from_tiers(
        cls, tiers: Mapping[float, float], people: int, delta: float = 1e-5, *, shuffle: int | None = None
    ) -> Budgets:
        """Make budgets from {epsilon: share}; shares sum to 1, counts to `people` (largest remainders).

        Args:
            tiers: share of people by epsilon.
            people: number of people.
            delta: one delta for everybody.
            shuffle: public seed by which people are shuffled; without, they are in the order of the tiers.

        Returns:
            The budgets.

        >>> budgets = Budgets.from_tiers({1: 0.34, 2: 0.43, 3: 0.23}, people=60_000)
        >>> [int((budgets.epsilon == e).sum()) for e in (1, 2, 3)]
        [20400, 25800, 13800]
        """
        shares = np.array(list(tiers.values()), dtype=float)
        if not np.isclose(shares.sum(), 1, atol=1e-6) or (shares < 0).any():
            fail(f"Expected shares that are >= 0 and sum to 1. Got {shares.tolist()}, sum {shares.sum():g}.")
        return cls._from_counts(np.array(list(tiers), dtype=float), shares, people, delta, shuffle)

    @classmethod
    def exponential(
        cls,
        people: int,
        *,
        k: float = 0.0,
        interval: tuple[float, float] = (0.5, 1.0),
        groups: int = 20,
        delta: float = 1e-5,
        shuffle: int | None = None,
    ) -> Budgets:
        """Make the paper's budgets: evenly spaced groups whose sizes follow c1 * exp(k * epsilon) + c2.

        Sizes are normalized to sum to `people` for every k (as printed, they sum to 1.83 over 20 groups, not
        to 1). For intervals other than [0.5, 1] the same sizes go to the same places within the interval.

        Args:
            people: number of people.
            k: skew; above 0 more people have large budgets.
            interval: smallest and largest epsilon.
            groups: number of groups.
            delta: one delta for everybody.
            shuffle: public seed by which people are shuffled; without, they are in the order of epsilon.

        Returns:
            The budgets.

        >>> [int((Budgets.exponential(60_000, k=k).epsilon == 0.5).sum()) for k in (-0.2, 0.0, 0.2)]
        [6011, 3000, 82]
        """
        epsilons = np.linspace(*interval, groups)
        return cls._from_counts(epsilons, _exponential_shares(groups, k), people, delta, shuffle)

    @classmethod
    def _from_counts(
        cls, epsilons: FloatArray, shares: FloatArray, people: int, delta: float, shuffle: int | None
    ) -> Budgets:
        check_positive(people=people)
        exact = shares / shares.sum() * people
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: people - counts.sum()]] += 1
        values = np.repeat(epsilons, counts)
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(values)
        return cls(values, delta)


def _exponential_shares(groups: int, k: float) -> FloatArray:
    """Count(epsilon) = c1 * exp(k * epsilon) + c2 of the paper's appendix, for any k.

    The printed constants (c2 = -1.715; c1 = 2.098 at k = -0.2, 1.554 at k = 0.2) both satisfy
    c1 * mean(exp(k * epsilon)) = 1.8064 over the 20 groups, which also makes k = 0 the constant function.
    """
    positions = np.linspace(0.5, 1.0, groups)
    growth = np.exp(k * positions)
    shares = 1.8064 / growth.mean() * growth - 1.715
    if shares.min() < 0:
        fail(
            "Expected k between about -0.2 and 0.2: beyond, the smallest group would have a negative size. "
            f"Got k={k!r}."
        )
    return np.asarray(shares, dtype=float)


def _numbers(name: str, values: npt.ArrayLike, place: Callable[[int], str]) -> FloatArray:
    """The values as numbers; what is masked, missing, complex, text, or true or false is refused with its place."""
    array = _array(name, values, place)
    given, listed = array, _listed(values)
    if listed is not None and any(isinstance(x, (bool, np.bool_, str)) for x in listed):
        given = np.array(listed, dtype=object)  # numpy has turned True into 1, or 1 into "1"
    where = _first_non_number(given.ravel())
    if where is not None:
        who = place(where) if array.ndim else "everybody"
        fail(f"Expected {name} to be numbers. Got {given.ravel().tolist()[where]!r} for {who}.")
    try:
        return array.astype(np.float64)
    except OverflowError:
        fail(f"Expected {name} to be numbers that fit in double precision. Got {values!r}.")


def _array(name: str, values: npt.ArrayLike, place: Callable[[int], str]) -> IdArray:
    """The values as an array; what is masked is missing."""
    if isinstance(values, np.ma.MaskedArray):
        hidden = np.ma.getmaskarray(values)
        if hidden.any():
            fail(f"Expected {name} for every person. Got a masked one for {place(int(hidden.argmax()))}.")
        return np.asarray(values.data)
    try:
        return np.asarray(list(values) if isinstance(values, (KeysView, ValuesView)) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        fail(f"Expected {name} to be one value per person. Got {values!r}: {error}.")


def _check_budgets(
    epsilons: FloatArray, deltas: FloatArray, place: Callable[[int], str], *, allow_infinite: bool
) -> None:
    def refuse(name: str, values: FloatArray, bad: npt.NDArray[np.bool_], expected: str) -> None:
        if bad.any():
            index = int(bad.argmax())
            where = place(index) if values.size == epsilons.size else "everybody"
            fail(f"Expected {expected}. Got {float(values[index])!r} for {where}.")

    refuse("epsilon", epsilons, np.isnan(epsilons), "epsilon to be a number")
    refuse("epsilon", epsilons, epsilons < 0, "epsilon >= 0")
    refuse("delta", deltas, ~((deltas >= 0) & (deltas < 1)), "0 <= delta < 1")
    if not allow_infinite:
        refuse(
            "epsilon",
            epsilons,
            np.isinf(epsilons),
            "a finite epsilon (infinity means that no protection was asked; allow it by name with allow_infinite=True)",
        )


def _names(ids: Any, place: Callable[[int], str]) -> IdArray:
    """Ids as an array; a missing one is refused with its place, and so are numbers among text."""
    array = _array("an id", ids, place)
    listed = _listed(ids)
    if listed is None and array.dtype.kind != "O":
        unequal = array != array  # not a number, or not a time
        if unequal.any():
            _fail_missing(place(int(unequal.argmax())))
        return array
    # In a list of names, numpy would turn one that is missing into the name "nan", and a number into text.
    given = array.tolist() if listed is None else listed
    if set(map(type, given)) in ({str}, {int}):  # millions of them without looking at each
        return array
    missing = next((i for i, name in enumerate(given) if _is_missing(name)), None)
    if missing is not None:
        _fail_missing(place(missing))
    if 0 < sum(isinstance(name, str) for name in given) < len(given):
        kinds = {"str" if isinstance(name, str) else type(name).__name__ for name in given}
        _fail_mixed(kinds)
    if array.dtype.kind == "O" and all(isinstance(name, np.integer) for name in given):
        return _array("an id", [int(name) for name in given], place)
    return array


def _listed(values: Any) -> list[Any] | None:
    """The values of a list, or of a dictionary's keys or values; None for anything else."""
    return list(values) if isinstance(values, (list, tuple, KeysView, ValuesView)) else None


def _fail_mixed(kinds: Iterable[str]) -> NoReturn:
    fail(f"Expected ids that are all whole numbers or all text. Got values of {', '.join(sorted(kinds))}.")


def _fail_missing(place: str) -> NoReturn:
    fail(f"Expected an id for every person. It is missing at {place}.")


def _is_missing(name: Any) -> bool:
    equal = name == name  # not for NaN; neither true nor false for pandas.NA
    return name is None or name is np.ma.masked or not (isinstance(equal, (bool, np.bool_)) and equal)


def _check_ids(ids: IdArray, place: Callable[[int], str]) -> None:
    import polars

    if ids.dtype.kind == "O":
        kinds = set(map(type, ids.tolist()))
        if kinds not in ({str}, {int}):
            _fail_mixed(kind.__name__ for kind in kinds)
    if ids.dtype.kind in "iu":
        ordered = np.sort(ids)  # takes a fifth of the memory of hashing
        if (ordered[1:] != ordered[:-1]).all():
            return
    # polars hashes ten million ids in a second, of any type; numpy would have to sort them.
    repeated = (
        polars.Series("id", list(map(str, ids.tolist())) if ids.dtype.kind == "O" else ids)
        .is_duplicated()
        .to_numpy()
    )
    if repeated.any():
        first, second = np.flatnonzero(repeated & (ids == ids[repeated.argmax()]))[:2]
        fail(
            f"Expected each id once. Got {ids.tolist()[second]!r} for {place(int(first))} "
            f"and again for {place(int(second))}."
        )


def _check_written_alike(ids: IdArray, place: Callable[[int], str]) -> None:
    """Refuse ids that only look different to a machine: they are one person's, who would have two budgets."""
    import polars

    read = as_read(ids)
    if read is None:
        return
    repeated = polars.Series("id", read).is_duplicated().to_numpy()
    if repeated.any():
        first, second = np.flatnonzero(repeated & (read == read[repeated.argmax()]))[:2].tolist()
        names = ids.tolist()
        fail(
            f"Expected one way to write each id. Got {names[first]!r} for {place(first)} and {names[second]!r} for "
            f"{place(second)}, which {WRITTEN_ALIKE}: one person would have two budgets."
        )


def as_read(ids: IdArray) -> IdArray | None:
    """Return ids of text as people read them; None where they are so already.

    No white space around them, one kind of blank, no character that shows nothing, and letters composed.

    >>> as_read(np.array(["ann ", "be\u200bn"])).tolist(), as_read(np.array(["ann", "ben"]))
    (['ann', 'ben'], None)
    """
    import polars

    if ids.dtype.kind not in "OUT" or not all(isinstance(name, str) for name in ids[:1].tolist()):
        return None
    names = polars.Series("id", ids.tolist(), dtype=polars.String)
    odd = names.str.contains(UNUSUAL_BYTES) | (names.str.len_bytes() != names.str.len_chars())
    if not odd.any():
        return None
    read = names.to_numpy().astype(object)
    for index in np.flatnonzero(odd.to_numpy()):
        shown = LIKE_A_BLANK.sub(" ", SHOWS_NOTHING.sub("", read[index])).strip()
        read[index] = unicodedata.normalize("NFC", shown)
    return read


@dataclass(frozen=True, eq=False)
class _RowsOf:
    """Where the rows that were kept are in the file."""

    place: Callable[[int], str]
    kept: IntArray

    def __call__(self, index: int) -> str:
        return self.place(int(self.kept[index]))


def _first_rows(ids: IdArray, numbers: Mapping[str, IdArray], place: Callable[[int], str]) -> IntArray:
    """Return the first row of each person, whose other rows must have the same numbers."""
    first: dict[Any, int] = {}
    for row, name in enumerate(ids.tolist()):
        before = first.setdefault(name, row)
        for column, values in numbers.items():
            if values[row] != values[before]:
                fail(
                    f"Expected one budget per person, the same in all their rows. Got {values[before]} for {name!r} in "
                    f"column {column!r} of {place(before)}, and {values[row]} in {place(row)}."
                )
    return np.fromiter(first.values(), dtype=np.int64, count=len(first))


def _first_non_number(column: IdArray) -> int | None:
    """The index of the first value that is no real number; text is none, also if it reads like one."""
    if column.dtype.kind in "iuf":
        return None
    if column.dtype.kind in "US":
        return next((index for index, text in enumerate(column) if math.isnan(number_or_nan(text))), 0)
    values = enumerate(column.tolist())
    return next((i for i, x in values if not isinstance(x, (Real, Decimal)) or isinstance(x, bool)), None)


def _range(values: FloatArray) -> str:
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _counted(people: BoolArray) -> str:
    count = int(np.count_nonzero(people))
    return f"{count:,} of {len(people):,} people {'has' if count == 1 else 'have'}"
