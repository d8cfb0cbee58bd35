"""What messages propose: the name that was meant, or nothing."""

from __future__ import annotations

import pytest

from pdpsgd.errors import closest, is_it

COLUMNS = ("person", "age", "job", "hours", "region", "epsilon", "income", "patient_id", "smoker")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("persn", "person"),
        ("preson", "person"),
        ("Person", "person"),
        ("epsilom", "epsilon"),
        ("EPSILON", "epsilon"),
        ("eps", "epsilon"),
        ("incme", "income"),
        ("icnome", "income"),
        ("patientid", "patient_id"),
        ("patient-id", "patient_id"),
        ("hour", "hours"),
        ("smokers", "smoker"),
        ("jobs", "job"),
    ],
)
def test_a_slip_of_the_fingers_is_recognized(typed, meant):
    assert closest(typed, COLUMNS) == [meant]


@pytest.mark.parametrize("typed", ["label", "privacy", "id", "x", "delta", "sex", "outcome", "wage", "name"])
def test_another_word_is_not_taken_for_a_slip(typed):
    assert is_it(typed, COLUMNS) == ""


def test_epsilon_is_no_region():
    assert is_it("epsilon", ("person", "region", "privacy")) == ""


def test_of_several_abbreviated_names_none_is_proposed():
    assert closest("pat", ("patient", "pathology")) == []
    assert closest("patien", ("patient", "pathology")) == ["patient"]
