"""Mechanisms by name."""

from __future__ import annotations

from pdpsgd.planning.mechanisms import (
    adapdp,
    dp_sgd,
    exact,
    excluding,
    filter,
    idp_sgd,
    least_squares,
    partitioning,
    pdp_sgd,
    proper,
    sampling,
    stretching,
)
from pdpsgd.planning.mechanisms.base import Mechanism

MECHANISMS: dict[str, Mechanism] = {
    "dp-sgd": dp_sgd.MECHANISM,
    "dp-sgd-exclude": excluding.MECHANISM,
    "sampling": sampling.MECHANISM,
    "adapdp": adapdp.MECHANISM,
    "pdp-sgd-fixed": pdp_sgd.FIXED,
    "pdp-sgd-adaptive": pdp_sgd.ADAPTIVE,
    "pdp-sgd-exact": exact.MECHANISM,
    "idp-sample": idp_sgd.SAMPLE,
    "idp-scale": idp_sgd.SCALE,
    "partitioning": partitioning.MECHANISM,
    "stretching": stretching.MECHANISM,
    "proper": proper.MECHANISM,
    "pdp-gd-filter": filter.MECHANISM,
    least_squares.NAME: least_squares.MECHANISM,
}
