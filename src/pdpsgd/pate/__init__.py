"""Individualized PATE: teachers learn from people's records, a student from public examples that they label."""

from pdpsgd.pate.plans import MECHANISMS, VotePlan, VoteSettings, plan_votes
from pdpsgd.pate.running import PateResult, run_pate
from pdpsgd.pate.student import ask_about, spread_labels, train_student
from pdpsgd.pate.teachers import (
    NetworkTraining,
    assign_people,
    train_network_teachers,
    train_ridge_teachers,
    vote_counts,
)
from pdpsgd.pate.votes import answer_queries

__all__ = [
    "MECHANISMS",
    "NetworkTraining",
    "PateResult",
    "VotePlan",
    "VoteSettings",
    "answer_queries",
    "ask_about",
    "assign_people",
    "plan_votes",
    "run_pate",
    "spread_labels",
    "train_network_teachers",
    "train_ridge_teachers",
    "train_student",
    "vote_counts",
]
