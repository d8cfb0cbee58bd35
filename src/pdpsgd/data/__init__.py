"""Tables, images and benchmarks in, tensors with the id of each record's person out."""

from __future__ import annotations

from pdpsgd.data.people import PeopleData, load_people
from pdpsgd.data.schema import Schema

__all__ = ["PeopleData", "Schema", "load_people"]
