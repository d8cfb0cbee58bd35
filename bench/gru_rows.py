"""At which numbers of rows PyTorch's own GRU rounds a row alike, wherever it stands and whoever else is there.

    python bench/gru_rows.py [--threads 1]

One row among others, at four places, forward and backward, in packed sequences and without; printed are the numbers at
which outputs and gradients have the bits that they have among 480 rows, for each precision and size. The table in
`docs/threat-model.md` has a line of it.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

NUMBERS = (2, 3, 4, 5, 8, 12, 16, 20, 32, 33, 48, 64, 96, 100, 128, 160, 256, 480)
SIZES = ((8, 8), (16, 32), (33, 17), (64, 64))
STEPS = 6


def bits_of_row(gru: nn.GRU, rows: Tensor, place: int, *, packed: bool) -> bytes:
    inputs = rows.clone().requires_grad_()
    if packed:
        lengths = torch.full((len(rows),), STEPS)
        outputs = gru(pack_padded_sequence(inputs, lengths, batch_first=True))[0].data
        outputs = outputs.reshape(STEPS, len(rows), -1).transpose(0, 1)
    else:
        outputs = gru(inputs)[0]
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs)
    return bytes(outputs.detach()[place].contiguous().numpy().tobytes() + gradient[place].numpy().tobytes())


def numbers_alike(size: tuple[int, int], precision: torch.dtype, *, packed: bool) -> list[int]:
    torch.manual_seed(sum(size))
    gru = nn.GRU(*size, batch_first=True).to(precision)
    row = torch.randn(STEPS, size[0], dtype=precision)
    found: dict[int, set[bytes]] = {number: set() for number in NUMBERS}
    for number in NUMBERS:
        for place in {0, 1, number // 2, number - 1}:
            rows = torch.randn(number, STEPS, size[0], dtype=precision)
            rows[place] = row
            found[number].add(bits_of_row(gru, rows, place, packed=packed))
    return [number for number in NUMBERS if found[number] == found[NUMBERS[-1]] and len(found[number]) == 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    for precision in (torch.float32, torch.float64):
        for packed in (True, False):
            for size in SIZES:
                alike = numbers_alike(size, precision, packed=packed)
                print(
                    precision, "packed" if packed else "not packed", *size, alike or "at no number", sep=", "
                )


if __name__ == "__main__":
    main()
