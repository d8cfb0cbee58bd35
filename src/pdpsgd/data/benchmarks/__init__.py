"""The benchmarks by name: found in a data folder or downloaded, checked, normalized with public constants.

>>> digits = load("digits")
>>> digits.train_inputs.shape, digits.test_inputs.shape
(torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
"""

from __future__ import annotations

from pdpsgd.data.benchmarks.loading import NAMES, Dataset, get, load, verify

__all__ = ["NAMES", "Dataset", "get", "load", "verify"]
