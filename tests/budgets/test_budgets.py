"""What each person allows: reading it, refusing nonsense, and rounding it down to levels."""

from __future__ import annotations

import gzip
from decimal import Decimal

import numpy as np
import pandas
import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.planning.levels import assign, average_loss, make_levels
from pdpsgd.planning.splitting import SOME, last_at_most


def test_a_scalar_delta_goes_to_everybody() -> None:
    assert Budgets([1.0, 2.0], 1e-6).delta.tolist() == [1e-6, 1e-6]


def test_each_person_may_have_their_own_delta() -> None:
    assert Budgets([1.0, 2.0], [1e-6, 1e-5]).delta.tolist() == [1e-6, 1e-5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, np.nan],), "Got nan for person 1"),
        (([1.0, -0.5],), "Got -0.5 for person 1"),
        (([1.0, np.inf],), "allow it by name with allow_infinite=True"),
        (([1.0], 1.0), "Expected 0 <= delta < 1. Got 1.0"),
        (([1.0, 2.0], [1e-5, -1e-5]), "Got -1e-05 for person 1"),
        (([1.0, 2.0], [1e-5, 1e-5, 1e-5]), "one for each of the 2 people. Got 3"),
        (([],), "at least one person"),
        (([[1.0, 2.0]],), "shape"),
        ((["a"],), "numbers"),
        ((["0.5", "1"],), "Expected epsilon to be numbers. Got '0.5' for person 0"),
        (([1.0, None],), "Got None for person 1"),
        ((np.array([1.0, None], dtype=object),), "Got None for person 1"),
        ((pandas.array([1, None], dtype="Int64"),), "for person 1"),
        ((polars.Series([1.0, None]),), "Got nan for person 1"),
        (([2.0, True],), "Got True for person 1"),
        ((np.array([True, False]),), "Got True for person 0"),
        ((np.array([1.0, 2.0 + 3j]),), "Got (1+0j) for person 0"),
        (([10**400],), "fit in double precision"),
        ((np.array([1], dtype="timedelta64[s]"),), "Expected epsilon to be numbers"),
        (([1.0], "1e-5"), "Expected delta to be numbers. Got '1e-5' for everybody"),
        (([1.0, 2.0], [1e-5, None]), "Expected delta to be numbers. Got None for person 1"),
    ],
)
def test_nonsense_is_refused_with_the_value_and_the_person(arguments: tuple, message: str) -> None:
    with pytest.raises(PdpsgdError) as caught:
        Budgets(*arguments)
    assert message in str(caught.value)


def test_what_lies_under_a_mask_is_not_a_budget() -> None:
    hidden = np.ma.array([1.0, 50.0, 2.0], mask=[False, True, False])
    with pytest.raises(
        PdpsgdError, match=r"Expected epsilon for every person. Got a masked one for person ben"
    ):
        Budgets(hidden, ids=["ann", "ben", "cy"])
    with pytest.raises(PdpsgdError, match=r"Expected delta for every person. Got a masked one for person 1"):
        Budgets([1.0, 1.0, 1.0], hidden / 100)
    with pytest.raises(
        PdpsgdError, match=r"Expected an id for every person. Got a masked one for position 1"
    ):
        Budgets([1.0, 1.0, 1.0], ids=hidden)
    assert Budgets(np.ma.array([1.0, 2.0])).epsilon.tolist() == [1.0, 2.0]


def test_numbers_may_come_in_any_form() -> None:
    for numbers in (
        [1, 2.5],
        (Decimal(1), Decimal("2.5")),
        np.array([1, 2.5], dtype=object),
        np.float32([1, 2.5]),
    ):
        assert Budgets(numbers).epsilon.tolist() == [1, 2.5]


@pytest.mark.parametrize(
    "ids",
    [
        ["ann", None],
        ["ann", float("nan")],
        [1.0, np.nan],
        np.array(["ann", None], dtype=object),
        pandas.array(["ann", None], dtype="string"),
        pandas.array([1, None], dtype="Int64"),
        polars.Series(["ann", None]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    ],
    ids=str,
)
def test_a_missing_id_is_refused_with_its_place(ids: object) -> None:
    with pytest.raises(PdpsgdError, match=r"Expected an id for every person. It is missing at position 1"):
        Budgets([1.0, 2.0], ids=ids)


@pytest.mark.parametrize("ids", [np.array([1, "1"], dtype=object), [1, "a"], (np.int64(1), "1")], ids=str)
def test_ids_of_several_kinds_are_refused(ids: object) -> None:
    with pytest.raises(PdpsgdError, match=r"all whole numbers or all text. Got values of int(64)?, str"):
        Budgets([1.0, 2.0], ids=ids)


@pytest.mark.parametrize(
    "ids",
    [[np.int64(7), 8], np.array([np.int64(7), np.int64(8)], dtype=object), {7: "a", 8: "b"}.keys(), (7, 8)],
    ids=str,
)
def test_ids_are_the_same_whatever_holds_them(ids: object) -> None:
    assert Budgets([1.0, 2.0], ids=ids).ids.tolist() == [7, 8]
    later = Budgets([2.0, 3.0], ids=np.array([7, 8]))
    before = plan(Budgets([1.0, 2.0], ids=ids), steps=2, batch_size=1)
    assert len(plan(later, steps=2, batch_size=1, history=[before]).levels) == 2


class Kind(str):
    """Text of a kind of its own."""


@pytest.mark.parametrize(
    "ids",
    [
        [np.datetime64("2020-01-01"), np.datetime64("2020-01-02")],
        [np.datetime64("2020-01-01", "ns"), np.datetime64("2020-01-02", "ns")],
        [1, 2.5],
        [b"a", b"b"],
        [Kind("a"), "b"],
        [np.str_("a"), "b"],
        pandas.Series([7, 8]),
        polars.Series(["a", "b"]),
        pandas.Index(["a", "b"]),
    ],
    ids=repr,
)
def test_ids_of_other_kinds_are_taken_as_numpy_takes_them(ids: object) -> None:
    assert np.array_equal(Budgets([1.0, 2.0], ids=ids).ids, np.asarray(ids))


def test_a_dictionary_s_values_are_budgets_like_any_others() -> None:
    said = {"ann": 0.5, "ben": 1.0}
    budgets = Budgets(said.values(), ids=said.keys())
    assert budgets.epsilon.tolist() == [0.5, 1.0]
    assert budgets.ids.tolist() == ["ann", "ben"]
    with pytest.raises(PdpsgdError, match=r"Got True for person ben"):
        Budgets({"ann": 1.0, "ben": True}.values(), ids=["ann", "ben"])


def test_duplicate_ids_are_refused_by_name() -> None:
    with pytest.raises(PdpsgdError, match="Got 'ann' for person ann and again"):
        Budgets([1.0, 2.0, 3.0], ids=["ann", "ben", "ann"])


def test_infinity_is_possible_when_allowed_by_name() -> None:
    assert np.isinf(Budgets([1.0, np.inf], allow_infinite=True).epsilon[1])


def test_budgets_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Budgets([1.0, 2.0]).epsilon[0] = 9.0


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame])
def test_frames_of_pandas_and_polars_are_read_alike(frame: type) -> None:
    table = frame({"person": ["a", "b"], "epsilon": [1, 2], "delta": [1e-5, 1e-6]})
    budgets = Budgets.from_table(table, id_column="person", delta_column="delta")
    assert budgets.epsilon.tolist() == [1, 2]
    assert budgets.delta.tolist() == [1e-5, 1e-6]
    assert budgets.ids.tolist() == ["a", "b"]


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame])
@pytest.mark.parametrize("column", ["person", "epsilon", "delta"])
def test_what_is_missing_in_a_frame_is_refused_with_its_row(frame: type, column: str) -> None:
    whole = {"person": ["a", "b"], "epsilon": [1.0, 2.0], "delta": [1e-5, 1e-6]}
    table = frame({**whole, column: [whole[column][0], None]})
    with pytest.raises(PdpsgdError, match=f"in column '{column}' of the frame, row 1. It is missing"):
        Budgets.from_table(table, id_column="person", delta_column="delta")


@pytest.mark.parametrize("value", [None, True, "1.0", (1.0,), (1.0, None)])
def test_a_mapping_has_numbers_only(value: object) -> None:
    with pytest.raises(PdpsgdError, match=r"for (person ben|'ben')"):
        Budgets.from_mapping({"ann": 1.0, "ben": value})


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_csv_and_parquet_files_are_read(tmp_path, suffix: str) -> None:
    frame = polars.DataFrame({"person": ["a", "b"], "epsilon": [0.5, 2.0]})
    path = tmp_path / f"people.{suffix}"
    getattr(frame, f"write_{suffix}")(path)
    assert Budgets.from_table(path, id_column="person").epsilon.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("person,epsilon\na,1\nb,\n", "people.csv, row 3. It is missing"),
        ("person,epsilon\na,1\nb,-2\n", "Got -2.0 for people.csv, row 3"),
        ("person,epsilon\na,1\na,2\n", "Got 'a' for people.csv, row 2 and again for people.csv, row 3"),
        (
            "person,epsilon\na,much\n",
            "Expected a number in column 'epsilon' of people.csv, row 2. Got 'much'",
        ),
        ("person,eps\na,1\n", "Expected a column 'epsilon' in people.csv. Its columns are 'person', 'eps'"),
        ("person,Epsilon\na,1\n", "Is it 'Epsilon'?"),
        ("person,epsilon\n", "Expected at least one row in people.csv"),
        ("", "Got an empty file"),
        (
            "person,epsilon\na,1\nb,-2\nc,\nd,much\ne,0\nf,inf\n",
            "Expected a number >= 0 (0: this person's record is never used) in column 'epsilon' of people.csv. Got "
            "something else in 4 of 6 rows: row 3: '-2', row 4: missing, row 5: 'much', row 7: 'inf'.",
        ),
    ],
)
def test_a_bad_file_is_refused_with_file_and_row(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "people.csv"
    path.write_text(text)
    with pytest.raises(PdpsgdError) as caught:
        Budgets.from_table(path, id_column="person")
    assert message in str(caught.value)


def test_many_bad_rows_are_counted_and_the_first_of_them_listed(tmp_path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("epsilon,delta\n" + "1,2\n" * 30 + "1,0\n" * 70)
    with pytest.raises(
        PdpsgdError, match=r"0 <= delta < 1 in column 'delta' .* 30 of 100 rows: .* and 22 more"
    ):
        Budgets.from_table(path, delta_column="delta")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(gzip.compress(b"epsilon\n1\n", mtime=0), "a gzip file", id="gzip"),
        pytest.param("epsilon\n1\n".encode("utf-16"), "UTF-16 text", id="utf-16"),
    ],
)
def test_a_table_of_another_kind_is_named(tmp_path, content: bytes, kind: str) -> None:
    for name in ("people.csv", "people.parquet"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PdpsgdError, match=rf"people.csv'. Got {kind}"):
        Budgets.from_table(tmp_path / "people.csv")
    with pytest.raises(PdpsgdError, match="Expected a Parquet file"):
        Budgets.from_table(tmp_path / "people.parquet")


def test_numbers_of_more_than_64_bits_are_numbers(tmp_path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("person,epsilon\n1,1\n99999999999999999999,99999999999999999999\n")
    budgets = Budgets.from_table(path, id_column="person")
    assert budgets.epsilon.tolist() == [1.0, 1e20]
    assert budgets.ids.tolist() == [1, 99999999999999999999]


def test_a_missing_file_and_an_unknown_kind_of_file_are_refused(tmp_path) -> None:
    with pytest.raises(PdpsgdError, match="no such file"):
        Budgets.from_table(tmp_path / "nobody.csv")
    (tmp_path / "people.xls").write_text("x")
    with pytest.raises(PdpsgdError, match=r"ends in .csv or .parquet"):
        Budgets.from_table(tmp_path / "people.xls")


def test_a_mapping_may_mix_epsilons_and_pairs() -> None:
    budgets = Budgets.from_mapping({"ann": 0.5, "ben": (2.0, 1e-7)})
    assert budgets.ids.tolist() == ["ann", "ben"]
    assert budgets.delta.tolist() == [1e-5, 1e-7]


@given(st.integers(1, 5000), st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_tiers_always_sum_to_the_people(people: int, weights: list[float]) -> None:
    shares = np.array(weights) / sum(weights)
    tiers = {float(i + 1): float(s) for i, s in enumerate(shares)}
    budgets = Budgets.from_tiers(tiers, people)
    assert len(budgets) == people
    counts = np.array([(budgets.epsilon == e).sum() for e in tiers])
    assert (np.abs(counts - shares * people) < 1).all()


@given(st.integers(100, 70_000), st.floats(-0.2, 0.2))
def test_the_papers_distribution_sums_to_the_people_for_every_k(people: int, k: float) -> None:
    budgets = Budgets.exponential(people, k=k)
    assert len(budgets) == people
    counts = [(budgets.epsilon == e).sum() for e in np.linspace(0.5, 1, 20)]
    growing = np.diff(counts)
    assert (growing >= -1).all() if k >= 0 else (growing <= 1).all()


def test_the_papers_printed_constants_come_out_after_normalising() -> None:
    epsilons = np.linspace(0.5, 1, 20)
    for k, c1 in ((-0.2, 2.098), (0.2, 1.554)):
        printed = c1 * np.exp(k * epsilons) - 1.715
        expected = printed / printed.sum() * 60_000
        budgets = Budgets.exponential(60_000, k=k)
        counts = np.array([(budgets.epsilon == e).sum() for e in epsilons])
        assert np.abs(counts - expected).max() < 12


any_budgets = st.one_of(
    st.lists(st.floats(0, 10), min_size=1, max_size=60),
    st.lists(st.floats(0.4, 0.6), min_size=1, max_size=60).map(lambda x: [*x, 0.01]),
)


@given(
    any_budgets,
    st.lists(st.sampled_from([0.0, 1e-7, 1e-6, 1e-5]), min_size=1, max_size=4),
    st.integers(6, 40),
)
def test_levels_only_ever_go_down(epsilons: list[float], deltas: list[float], most: int) -> None:
    budgets = Budgets(epsilons, np.resize(deltas, len(epsilons)))
    levels, place = make_levels(budgets, most)
    assert np.array_equal(place, assign(levels.epsilon, levels.delta, budgets))
    assert len(levels) <= most
    assert (levels.epsilon[place] <= budgets.epsilon).all()
    assert (levels.delta[place] <= budgets.delta).all()
    assert np.array_equal(np.bincount(place, minlength=len(levels)), levels.people)
    never = (budgets.epsilon == 0) | (budgets.delta == 0)
    assert (levels.epsilon[place[never]] == 0).all()


def test_few_distinct_budgets_lose_nothing() -> None:
    budgets = Budgets(np.repeat(np.linspace(0.5, 1, 100), 7))
    levels, place = make_levels(budgets)
    assert len(levels) == 100
    assert average_loss(levels.epsilon[place], budgets.epsilon) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "epsilons",
    [
        np.random.default_rng(1).uniform(0.5, 4, 100_000),
        np.random.default_rng(2).lognormal(0, 0.5, 100_000),
        np.append(np.random.default_rng(3).uniform(0.5, 1, 100_000), 0.01),
    ],
    ids=["uniform", "lognormal", "outlier"],
)
def test_many_distinct_budgets_lose_less_than_half_a_percent(epsilons: np.ndarray) -> None:
    levels, place = make_levels(Budgets(epsilons))
    assert len(levels) <= 256
    assert 0 < average_loss(levels.epsilon[place], epsilons) < 0.005


@pytest.mark.parametrize("most", [256, 64])
@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
def test_smooth_budgets_have_their_levels_where_they_lose_least(kind: str, most: int) -> None:
    # Of n levels at the best widths, for a density p of epsilon, (integral of sqrt(p / epsilon))^2 / 2n is lost.
    rng = np.random.default_rng(6)
    epsilons = rng.uniform(0.5, 4, 200_000) if kind == "uniform" else rng.lognormal(0, 1, 200_000)
    best = (2 * (np.sqrt(4) - np.sqrt(0.5))) ** 2 / 3.5 if kind == "uniform" else np.sqrt(8 * np.pi)
    levels, place = make_levels(Budgets(epsilons), most)
    assert len(levels) <= most
    assert average_loss(levels.epsilon[place], epsilons) < 1.02 * best / (2 * len(levels))


@pytest.mark.parametrize("spread", [1e-6, 0.1, 1.0, 30.0])
def test_millions_find_the_level_that_a_search_finds(spread: float) -> None:
    rng = np.random.default_rng(8)
    values = np.unique(np.exp(spread * rng.uniform(-1, 1, 300)))
    beside = np.concatenate([values, np.nextafter(values, 0), np.nextafter(values, np.inf)])
    far = [0.0, 5e-324, 1e-300, values[0] / 3, values[-1] * 3, 1e300, np.inf]
    asked = np.concatenate([beside, far, np.exp(1.1 * spread * rng.uniform(-1, 1, 2 * SOME))])
    assert np.array_equal(last_at_most(values, asked), np.searchsorted(values, asked, side="right") - 1)


def test_many_distinct_deltas_are_rounded_down_to_few() -> None:
    deltas = np.random.default_rng(4).uniform(1e-6, 1e-5, 1000)
    levels, _ = make_levels(Budgets(np.full(1000, 1.0), deltas))
    assert np.unique(levels.delta).size <= 8


def test_infinite_budgets_have_a_level_of_their_own() -> None:
    levels, _ = make_levels(Budgets([1.0, np.inf, np.inf], allow_infinite=True))
    assert levels.epsilon.tolist() == [1.0, np.inf]
    assert levels.people.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (
            Budgets([1.0] * 50, 0.03),
            r"50 of 50 people have a delta above 1 over the number of people \(up to 0.03",
        ),
        (Budgets([1.0] * 49 + [21.0]), r"1 of 50 people has an epsilon above 20 \(up to 21\)"),
    ],
)
def test_promises_that_are_hardly_any_are_warned_of(budgets: Budgets, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        plan(budgets, steps=5, batch_size=20)


def test_ordinary_promises_and_people_without_one_are_planned_without_a_word() -> None:
    allowed = Budgets([20.0, 0.0, np.inf, 1.0], [0.25, 0.5, 0.5, 0.0], allow_infinite=True)
    assert allowed.weak_promises() == []


@pytest.mark.parametrize("other", ["ann ", "\u00a0ann", "ann\n"])
def test_an_id_with_white_space_around_it_is_not_another_person(other: str) -> None:
    with pytest.raises(PdpsgdError, match="Expected one way to write each id"):
        Budgets([1.0, 2.0, 3.0], ids=["ben", "ann", other])


def test_letters_that_are_put_together_otherwise_are_no_other_person() -> None:
    with pytest.raises(PdpsgdError, match="Expected one way to write each id"):
        Budgets([1.0, 2.0], ids=["Zo\u00eb", "Zoe\u0308"])


@pytest.mark.parametrize(
    "other",
    ["ann lee\u200b", "\ufeffann lee", "ann\u00ad lee", "ann\u00a0lee", "ann lee\ufe0f", "ann\x00 lee"],
)
def test_characters_that_show_nothing_make_no_other_person(other: str) -> None:
    with pytest.raises(PdpsgdError, match="differ only in white space, in characters that show nothing"):
        Budgets([1.0, 2.0], ids=["ann lee", other])
    assert Budgets([1.0, 2.0], ids=["ben lee", other]).ids.tolist() == ["ben lee", other]


@pytest.mark.parametrize(
    "ids",
    [
        ["ann", "Ann"],
        ["\u674e\u4e00", "\u674e\u4e8c"],
        ["o'x", "o\u2019x"],
        [" ann", " ben"],
        ["Zo\u00eb", "Zoe"],
        ["1", "01"],
        ["a b", "a  b"],
    ],
)
def test_ids_that_people_can_tell_apart_are_those_of_two(ids: list[str]) -> None:
    assert Budgets([1.0, 2.0], ids=ids).ids.tolist() == ids


def test_people_that_a_ledger_took_for_two_stay_two() -> None:
    ids = np.array(["ann", "ann "])
    with pytest.raises(PdpsgdError, match="one way to write each id"):
        Budgets([1.0, 2.0], ids=ids)
    assert Budgets.of_enrolled(np.array([1.0, 2.0]), np.full(2, 1e-5), ids).ids.tolist() == ids.tolist()
