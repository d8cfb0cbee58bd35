"""The study of how many records of a person take part, on made-up mails."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import many_records
from experiments.many_records import Mails, hashed_words, page, study


@pytest.fixture
def mails() -> Mails:
    numbers = np.random.default_rng(0)
    senders = np.repeat(np.arange(400), numbers.choice([1, 1, 2, 9], 400))
    spam = numbers.integers(0, 2, 400)[senders]
    texts = [f"{'money now' if each else 'see you there'} {numbers.integers(9)}" for each in spam]
    names = np.array([f"s{sender}" for sender in senders])
    return Mails(hashed_words(texts, 16), spam.astype(np.int64), names, senders % 5 == 0)


def test_every_way_is_trained_tested_by_mail_and_by_sender_and_put_on_the_page(
    mails: Mails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_records, "STEPS", 10)
    monkeypatch.setattr(many_records, "PEOPLE_PER_STEP", 100)
    monkeypatch.setattr(many_records, "RATES", (4.0,))
    monkeypatch.setattr(many_records, "KS", (4,))
    rows = study(mails, seeds=1)
    assert [row["way"] for row in rows] == ["one each", "K = 4", "record-level"]
    assert all(0.5 < run["mail"] <= 1 and 0.5 < run["sender"] <= 1 for row in rows for run in row["runs"])
    text = page(rows, "Hashed words")
    assert text.count("±") == 6
    assert "*not* the promise made" in text


def test_words_are_hashed_to_numbers_of_norm_one_each_text_by_itself() -> None:
    both = hashed_words(["Money, money now!", "see you"], 32)
    assert np.allclose(np.linalg.norm(both, axis=1), 1)
    assert np.array_equal(hashed_words(["see you"], 32)[0], both[1])
    assert not hashed_words([""], 8).any()
