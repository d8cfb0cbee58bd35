"""Peak memory for batches ten times as large: it follows the physical batch, not the batch."""

from __future__ import annotations

import resource
import subprocess
import sys

PEOPLE, EXPECTED, PHYSICAL = 20_000, 400, 512


def train(batch_size: int) -> float:
    """Train the MNIST network for a few steps, and return the peak memory of this process in MB."""
    import torch

    from pdpsgd import Budgets, fit
    from pdpsgd.models.networks import mnist_cnn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = (torch.rand(PEOPLE, 1, 28, 28), torch.randint(0, 10, (PEOPLE,)))
    settings = {"steps": 3, "batch_size": batch_size, "max_physical_batch_size": PHYSICAL, "progress": False}
    fit(mnist_cnn(), data, Budgets([4.0, 8.0] * (PEOPLE // 2)), **settings)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure both in processes of their own, and print them beside each other."""
    if len(sys.argv) > 1:
        print(train(int(sys.argv[1])))
        return
    sizes = (EXPECTED, 10 * EXPECTED)
    found = [
        float(subprocess.run([sys.executable, __file__, str(size)], capture_output=True, check=True).stdout)
        for size in sizes
    ]
    for size, peak in zip(sizes, found, strict=True):
        print(f"batches of {size:,}, at most {PHYSICAL} at once: peak {peak:,.0f} MB")
    print(f"ratio {found[1] / found[0]:.2f}")


if __name__ == "__main__":
    main()
