"""Compiled code is made, kept, checked and used, or else everything works without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdpsgd import _native_build
from pdpsgd.gradients.native import build as compiling
from pdpsgd.gradients.native import dispatch as native

with_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here, or PDPSGD_NATIVE=0")


def script(body: str, **environment: str) -> str:
    """Run Python in a process of its own: the code is loaded once in each."""
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "from pdpsgd import _native_build\n"
            f"from pdpsgd.gradients.native import build as compiling, dispatch as native\n{body}",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def test_it_can_be_switched_off() -> None:
    assert script("print(native.library())", PDPSGD_NATIVE="0") == "None"


def test_there_need_be_no_compiler(tmp_path: Path) -> None:
    assert script("print(native.library())", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)) == "None"
    assert not list(tmp_path.glob("**/*.so"))


@with_compiler
def test_it_is_compiled_once_and_kept(tmp_path: Path) -> None:
    assert "CDLL" in script("print(native.library())", XDG_CACHE_HOME=str(tmp_path))
    (kept,) = (tmp_path / "pdpsgd").iterdir()
    assert kept.name == f"native-{_native_build.digest_of_needs(compiling.SOURCE, compiling.FLAGS)}.so"
    assert kept.stat().st_mode & 0o077 == 0
    # The second time there is no need for a compiler.
    assert "CDLL" in script("print(native.library())", XDG_CACHE_HOME=str(tmp_path), PATH="")


@with_compiler
def test_a_damaged_or_unwritable_folder_is_no_reason_to_fail(tmp_path: Path) -> None:
    folder = tmp_path / "pdpsgd"
    folder.mkdir()
    damaged = folder / f"native-{_native_build.digest_of_needs(compiling.SOURCE, compiling.FLAGS)}.so"
    damaged.write_bytes(b"no code")
    assert "CDLL" in script("print(native.library())", XDG_CACHE_HOME=str(tmp_path))
    assert damaged.read_bytes() != b"no code"
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert "CDLL" in script("print(native.library())", XDG_CACHE_HOME=str(in_the_way))


FAULTS = [
    ("met[v] * one[i * numbers.apart]", "met[v] * one[0]"),
    ("z * c->dilation[0] * t->needed[1] + y * c->dilation[1]", "0"),
    ("sum_of_squares(result, t->kernel)", "sum_of_squares(result, 1)"),
    ("floats[row] =", "floats[0] ="),
    ("doubles[row] =", "doubles[0] ="),
    ("sum[j] += met[j]", "sum[j] = met[j]"),
    ("met > best", "met < best"),
    ("place |= cut & NOWHERE", "place |= 0"),
    ("nothing ? 0 : gradient[i]", "nothing ? 0 : gradient[0]"),
    ("*result += (vector)", "*result = (vector)"),
    ("pool_one(p, n, 2, 2, 0,", "pool_one(p, n, 2, 1, 0,"),
    ("gradient = copied;", "(void)0;"),
    ("1, c->dilation_height * t->line,", "1, t->line,"),
    ("sums[i][v] += load(to, room)", "sums[i][v] += 0"),
    ("padded + y * c->stride_height * t->line", "padded + y * t->line"),
    ("square < smallest ? smallest : square", "square"),
    ("first = load(result.first", "first = 0 * load(result.first"),
    ("part.first += j", "part.first += 0"),
    ("CASES(7)", ""),
    ("CASES(2)", ""),
    ("CASE(h, 3)", ""),
    ("met + x * c->dilation[2] * t->wide", "met"),
    ("c->stride[1] * line, 1}", "line, 1}"),
    ("z++, add = 1", "z++"),
    ("i / copies * step", "i * step"),
    ("result + group * (t->kernel / rounds)", "result"),
    ("before = c->padding[2]", "before = 0"),
    ("y * c->stride[1]) * line + first", "y) * line + first"),
    ("one + k * far", "one + k * wide"),
    ("sums[k] += load(to, wide - first)", "sums[k] += 0"),
    ("k += 8", "k += 9"),
    ("CASE_OF_PLACES(2)", ""),
    ("(met[j] - middle) * by", "met[j] * by"),
    ("/ width + eps", "/ width"),
    ("scale[j] *= by[j]", "scale[j] *= by[0]"),
    ("shift[j] = (float)sum;", "shift[j] = 0;"),
    ("products * by", "products"),
    ("c->padding_width * c->channels;", "c->padding_height * c->channels;"),
    ("products(c->kernel_height, t->columns", "products(c->kernel_width, t->columns"),
    ("memset(padded, 0, sizeof(float) * padded_size(c))", "(void)0"),
    ("square < smallest ? smallest : square", "square > smallest ? square : smallest"),
    (" | (met != met)", ""),
    ("product : 2 * product", "product : product"),
    ("n == begin, result", "1, result"),
    ("used[places[place]] != rows[k]", "0"),
    ("weights[owners[u]]", "weights[0]"),
    ("to[j] += weight", "to[j] = weight"),
    ("share += shares[k]", "share = shares[k]"),
    ("to[j] += by * sum[j]", "to[j] = by * sum[j]"),
    ("to[j] += by * from[j]", "to[j] = by * from[j]"),
    ("rows[k] >= l->right_width", "rows[k] > l->right_width"),
    ("square += share * share", "square += share"),
    ("cell * keep, room", "cell, room"),
    ("(1 - new * new)", "(1 - new)"),
    ("load(l->outputs + here, room)", "0"),
    ("begin += at_once", "begin += at_once + 1"),
    ("whole + 127", "whole + 126"),
    ("size > 0.625f", "size > 5"),
    ("x > 88", "x > 1"),
    ("(int32_t)0x80000000", "0"),
    ("values + starts[g] * width", "values"),
    ("square += one[s] * other[s]", "square = one[s] * other[s]"),
    ("exact |= ", "exact &= "),
    ("left[j] * (1 / size) * weight", "left[j] * weight"),
]


@with_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_code_that_computes_something_else_is_not_used(tmp_path: Path, fault: tuple[str, str]) -> None:
    source = compiling.SOURCE.read_text()
    assert source.count(fault[0]) == 1
    wrong = tmp_path / "native.c"
    wrong.write_text(source.replace(*fault))
    quickly = "compiling.FLAGS = tuple(flag.replace('-O3', '-O1') for flag in compiling.FLAGS)"
    body = f"from pathlib import Path; compiling.SOURCE = Path({str(wrong)!r}); {quickly}; print(native.library())"
    assert script(body, XDG_CACHE_HOME=str(tmp_path)) == "None"
    if fault == FAULTS[0]:
        wrong.write_text(source)
        assert "CDLL" in script(body, XDG_CACHE_HOME=str(tmp_path))


@with_compiler
def test_processors_without_avx512_get_other_code_that_agrees(tmp_path: Path) -> None:
    body = "compiling.FLAGS = tuple(f.replace('native', 'haswell') for f in compiling.FLAGS); print(native.library())"
    assert "CDLL" in script(body, XDG_CACHE_HOME=str(tmp_path))


@with_compiler
@pytest.mark.parametrize(
    "disturbance",
    ["set_default_dtype(torch.float64)", "set_default_dtype(torch.bfloat16)", "set_default_device('meta')"],
)
def test_the_comparison_does_not_depend_on_the_users_defaults(disturbance: str) -> None:
    body = f"import torch; torch.{disturbance}; before = torch.get_rng_state(); print(native.library()); "
    assert script(f"{body} print(torch.equal(before, torch.get_rng_state()))").endswith("True")
    assert "CDLL" in script(body)


@with_compiler
def test_the_code_is_checked_where_tensors_have_no_numbers() -> None:
    body = (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode(): found = native.library()\n"
        "print(found)"
    )
    assert "CDLL" in script(body)


CHECKPOINTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from pdpsgd.gradients.clipping import ClippedGradients

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(72, 2)

    def forward(self, x):
        return self.out(checkpoint(self.block, x, use_reentrant=False).flatten(1))

torch.manual_seed(0)
model, x = Model(), torch.randn(4, 3, 8, 8)
clipped = ClippedGradients(model)
model(x).sum().backward()
clipped.clipped_sum(torch.full((4,), 1e9), loss_reduction="sum")
sums = {name: clipped.sums[parameter].clone() for name, parameter in model.named_parameters()}
clipped.remove()
model(x).sum().backward()
print(all(torch.allclose(sums[n], p.grad.double(), rtol=1e-2, atol=1e-3) for n, p in model.named_parameters()))
"""


def test_activation_checkpointing_works() -> None:
    assert (
        script(CHECKPOINTED) == "True"
    )  # in a process of its own: nothing is loaded yet when the pass begins
    assert script(CHECKPOINTED, PDPSGD_NATIVE="0") == "True"


@with_compiler
def test_code_in_a_folder_of_others_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "pdpsgd"
    folder.mkdir()
    assert "CDLL" in script("print(native.library())", XDG_CACHE_HOME=str(tmp_path))
    folder.chmod(0o777)
    assert str(tmp_path) not in script("print(native.library())", XDG_CACHE_HOME=str(tmp_path))
    folder.chmod(0o755)
    (kept,) = folder.iterdir()
    kept.chmod(0o777)
    kept.write_bytes(b"planted")
    assert "CDLL" in script("print(native.library())", XDG_CACHE_HOME=str(tmp_path))
    assert script(
        "print(_native_build.cache_folder())", XDG_CACHE_HOME="here", HOME=str(tmp_path)
    ).startswith(str(tmp_path))


@with_compiler
def test_a_library_without_the_functions_is_not_used(tmp_path: Path) -> None:
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing;")
    body = f"from pathlib import Path; compiling.SOURCE = Path({str(empty)!r}); print(native.library())"
    assert script(body, XDG_CACHE_HOME=str(tmp_path)) == "None"
