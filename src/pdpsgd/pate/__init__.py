"""Individualized PATE: teachers learn from people's records, a student from public examples that they label."""

from pdpsgd.pate.plans import MECHANISMS, VotePlan, VoteSettings, plan_votes
from pdpsgd.pate.student import ask_about, spread_labels
from pdpsgd.pate.teachers import assign_people, train_ridge_teachers, vote_counts
from pdpsgd.pate.votes import answer_queries

__all__ = [
    "MECHANISMS",
    "VotePlan",
    "VoteSettings",
    "answer_queries",
    "ask_about",
    "assign_people",
    "plan_votes",
    "spread_labels",
    "train_ridge_teachers",
    "vote_counts",
]
