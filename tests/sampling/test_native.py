"""Compiled and other code give the same words and the same noise, to the bit, or the compiled code is not used."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling import generators
from pdpsgd.sampling.generators import AES, SHAKE, generator_of
from pdpsgd.sampling.native import dispatch
from pdpsgd.sampling.native.calls import AesWords
from pdpsgd.sampling.native.self_check import KNOWN_ANSWERS, agrees_with_numpy
from pdpsgd.sampling.noise import quantize
from pdpsgd.sampling.record_choice import RecordsOfPeople
from pdpsgd.sampling.source import RandomSource

KEY = bytes(range(32))
compiled = pytest.mark.skipif(
    dispatch.library() is None, reason="no C compiler or AES here, or PDPSGD_NATIVE=0"
)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Take something away: the compiled code, or that and a package."""

    def take_away(what: str) -> None:
        monkeypatch.setattr(dispatch, "library", lambda: None)
        if what == "cryptography":
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    return take_away


def everything(source: RandomSource) -> list[np.ndarray]:
    totals = [torch.arange(-size, size) * 2**28 for size in (3, 20_000)]
    outs = [torch.empty(6), torch.empty(40_000, dtype=torch.float64)]
    released = source.release(totals, clipping_norm=1.3, noise_multiplier=0.7, step=4, out=outs)
    words = [source.draw_generator(step=1).random_raw(77), source.round_generator(round=2).random_raw(5)]
    words.append(source.record_words(step=3, people=np.array([7, 0, 10**6]), count=5))
    held = RecordsOfPeople.of(np.repeat(np.arange(50), np.arange(50) % 13), people=50)
    for most in (1, 4, 7, 1000):
        words += held.choose(np.array([40, 0, 12, 13, 49, 3, 25]), most=most, source=source, step=9)
    return [*words, *(one.numpy() for one in released)]


@compiled
def test_a_key_gives_the_same_draws_and_noise_with_and_without_compiled_code(
    without: Callable[[str], None],
) -> None:
    pytest.importorskip("cryptography")
    one = everything(RandomSource.from_key(KEY))
    assert isinstance(generator_of(AES, KEY), AesWords)
    without("compiled code")
    assert not isinstance(generator_of(AES, KEY), AesWords)
    assert all(map(np.array_equal, everything(RandomSource.from_key(KEY)), one))


@compiled
def test_sums_become_the_same_integers_with_and_without_compiled_code(without: Callable[[str], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = [
        torch.randn(1001, generator=generator, dtype=dtype) * 10.0**power
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for power in (-9, 0, 5)
    ]
    sums += [torch.randn(30, 7, generator=generator).t(), torch.tensor(0.5), torch.empty(0)]
    one = quantize(sums, clipping_norm=1.3)
    without("compiled code")
    assert all(map(torch.equal, quantize(sums, clipping_norm=1.3), one))


@compiled
def test_noise_of_many_blocks_is_the_same_with_and_without_compiled_code(
    without: Callable[[str], None],
) -> None:
    pytest.importorskip("cryptography")
    total = torch.arange(200_003) * 2**25

    def released() -> list[torch.Tensor]:
        totals = [total[:70_001], total[70_001:]]
        return RandomSource.from_key(KEY).release(totals, clipping_norm=1.0, noise_multiplier=1.0, step=0)

    one = released()
    without("compiled code")
    assert all(torch.equal(*pair) for pair in zip(released(), one, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**23, -(2.0**23)])
def test_without_compiled_code_a_number_that_is_too_large_is_found_wherever_it_is(
    wrong: float, dtype: torch.dtype, without: Callable[[str], None]
) -> None:
    without("compiled code")
    sums = torch.full((100_003,), 2.0**22 - 1, dtype=dtype)
    quantize([sums], clipping_norm=1.0)
    for place in (0, 2**15 - 1, 2**15, 100_002):
        changed = sums.clone()
        changed[place] = wrong
        with pytest.raises(PdpsgdError, match="finite and below"):
            quantize([changed], clipping_norm=1.0)


@pytest.mark.parametrize("missing", ["nothing", "compiled code"])
def test_sums_become_integers_in_their_own_memory_and_are_refused_there_too(
    missing: str, without: Callable[[str], None]
) -> None:
    if missing != "nothing":
        without(missing)
    sums = torch.randn(1003, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (wanted,) = quantize([sums], clipping_norm=1.3)
    (found,) = quantize([sums], clipping_norm=1.3, out=[sums.view(torch.int64)])
    assert torch.equal(found, wanted)
    assert found.data_ptr() == sums.data_ptr()
    for wrong in (torch.nan, torch.inf, 2.0**30):
        for place in (3, 1002):
            sums = torch.zeros(1003, dtype=torch.float64)
            sums[place] = wrong
            with pytest.raises(PdpsgdError, match="finite and below"):
                quantize([sums], clipping_norm=1.3, out=[sums.view(torch.int64)])


@pytest.mark.parametrize(("key", "block", "result"), KNOWN_ANSWERS)
def test_the_known_answers_are_those_of_another_implementation(key: str, block: str, result: str) -> None:
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.AES(bytes.fromhex(key)), ciphers.modes.ECB())
    assert cipher.encryptor().update(bytes.fromhex(block)).hex() == result


def test_without_aes_words_come_from_the_standard_library_and_a_run_with_aes_cannot_go_on(
    without: Callable[[str], None],
) -> None:
    without("cryptography")
    assert RandomSource.from_seed(0).algorithm == SHAKE
    assert RandomSource.from_seed(0).cryptographic
    with pytest.raises(
        ValueError, match=r"a C compiler.*or the package 'cryptography'.*pip install cryptography"
    ):
        RandomSource.from_key(KEY, algorithm=AES)


def test_it_can_be_switched_off() -> None:
    code = "from pdpsgd.sampling.native import dispatch; print(dispatch.library())"
    environment = {**os.environ, "PDPSGD_NATIVE": "0"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == "None", found.stderr


def build(folder: Path, source: str, *flags: str) -> ctypes.CDLL:
    """Compile a variant of the code; it is loaded under a name of its own."""
    file, made = folder / "kernels.c", folder / "kernels.so"
    file.write_text(source)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    options = [flag for flag in dispatch.FLAGS if flag != "-march=native"] if flags else dispatch.FLAGS
    subprocess.run([compiler, *options, "-w", *flags, str(file), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@compiled
@pytest.mark.parametrize("processor", [("-march=x86-64", "-maes", "-msse4.1"), ("-march=haswell", "-maes")])
def test_code_for_older_processors_gives_the_same_bits(tmp_path: Path, processor: tuple[str, ...]) -> None:
    code = build(tmp_path, dispatch.SOURCE.read_text(), *processor)
    if not code.supported():
        pytest.skip("this processor is older still")
    assert agrees_with_numpy(code)


FAULTS = (
    ("ROUNDS = 14", "ROUNDS = 12"),
    ("EXPAND(14, 0x40)", "EXPAND(14, 0x1b)"),
    ("__builtin_bswap64(counter)", "(counter)"),
    ("words->position / 2, to)", "words->position / 4, to)"),
    ("*to++ = pair[1];", "*to++ = pair[0];"),
    ("<< 24)", "<< 23)"),
    ("0.666666666666667,", "0.6666666666666665,"),
    ("value << 64 | word", "value << 64 | (word >> 1)"),
    ("value < (1ull << 53)", "value < (1ull << 52)"),
    ("distance < (1ll << 53)", "distance < (1ll << 52)"),
    ("#define NEAR_ONE 0.2928932188134524", "#define NEAR_ONE 0.51"),
    ("word ^ (word >> 63)", "word & ~(1ll << 63)"),
    ("((turn << 1) & SIGN)", "(turn & SIGN)"),
    ("((1ull << 61) - 1)", "((1ull << 60) - 1)"),
    ("+ half), (int)by.shift", "), (int)by.shift"),
    ("some_radii(1, first,", "some_radii(1, 0,"),
    ("release_some(1, first,", "release_some(1, 0,"),
    ("sine[v] = radius *", "sine[v] = -radius *"),
    ("good &= size < largest", "good |= size < largest"),
    ("all_good && __builtin_fabs(x) < largest", "all_good && x < largest"),
)


@compiled
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[1])
def test_code_with_a_fault_is_not_used(tmp_path: Path, fault: tuple[str, str]) -> None:
    source = dispatch.SOURCE.read_text()
    assert fault[0] in source
    assert not agrees_with_numpy(build(tmp_path, source.replace(*fault)))


@compiled
def test_contracted_products_and_sums_are_not_used(tmp_path: Path) -> None:
    # Rounded once instead of twice: as exact, but other bits. (A processor without such an instruction has the same.)
    code = build(tmp_path, dispatch.SOURCE.read_text(), "-march=haswell", "-maes", "-ffp-contract=fast")
    assert not agrees_with_numpy(code)


def test_words_are_little_endian_whatever_gives_them(without: Callable[[str], None]) -> None:
    pytest.importorskip("cryptography")
    without("compiled code")
    words = generators.generator_of(AES, bytes(32)).random_raw(1)
    assert int(words[0]).to_bytes(8, "little").hex() == "dc95c078a2408989"
