"""A card's kernel times, as extracted from a published package: one curve a line, and where they come from.

The file is CSV in gzip. Its first line is JSON: package, version, licence, digests of the files read and what the rules of
``engines.cost.extract`` changed. A line ``sizes,FRAMEWORK,KERNEL,x,x,...`` gives the sizes of the curves below it; a
line ``FRAMEWORK,KERNEL,KEY,KEY,...,t,t,...`` one curve in microseconds, with nothing where nothing was measured.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engines.cost.cards import Gpu
from engines.cost.roofline import CardCalibration
from engines.errors import UserError, require
from engines.models.shape import ModelShape
from engines.user_file import read_bytes

Framework = Literal["vllm", "sglang", "trtllm"]
FRAMEWORKS: tuple[Framework, ...] = ("vllm", "sglang", "trtllm")
Kernel = Literal["gemm", "prompt", "decode", "experts", "all-reduce"]
KEYS: Mapping[Kernel, tuple[str, ...]] = {
    "gemm": ("outputs", "inputs"),
    "prompt": ("heads", "kv_heads", "batch"),
    "decode": ("heads", "kv_heads", "batch"),
    "experts": ("width", "hidden", "chosen", "among"),
    "all-reduce": ("degree",),
}
"""What tells the curves of a kernel apart. They run over rows (gemm, experts), tokens of each prompt (prompt), tokens of context
(decode), and numbers that are added up (all-reduce)."""

EVERY_MODEL: tuple[Kernel, ...] = ("gemm", "prompt", "decode")
"""Experts are of some models, and exchanges of groups of cards."""
ABOUT = ("package", "version", "system")
"""What runs say of where times come from."""
FOLDER = Path(__file__).parent / "kernel_times"
BLOCK_FOLDER = FOLDER / "block"
"""Tables of block-diffusion models, which are no part of what other models' runs rest on."""
Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes and seconds, of the measured points alone."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    card: str
    about: Mapping[str, Any] = field(repr=False, compare=False)
    digest: str
    """What the file, or all in a folder, hold: the rest follows from it."""
    curves: Mapping[tuple[str, Kernel], Mapping[tuple[int, ...], Curve]] = field(repr=False, compare=False)
    """By framework and kernel, then by key."""

    def of(self, framework: str, kernel: Kernel) -> Mapping[tuple[int, ...], Curve]:
        """All curves of a kernel; refused by name where there are none."""
        found = self.curves.get((framework, kernel))
        require(
            bool(found), f"kernels={framework!r} has no {kernel} table of {self.card}: use one of {self._with(kernel)}"
        )
        assert found is not None
        return found

    def curve(self, framework: str, kernel: Kernel, key: tuple[int, ...]) -> Curve:
        curves = self.of(framework, kernel)
        if key not in curves:
            said = ", ".join(f"{name}={value}" for name, value in zip(KEYS[kernel], key, strict=True))
            raise UserError(
                f"kernels={framework!r} has no {kernel} of {said} in its table of {self.card}: extract it with "
                f"repro calibrate --silicon, or use cost=roofline"
            )
        return curves[key]

    def _with(self, kernel: Kernel) -> str:
        return ", ".join(name for name in FRAMEWORKS if (name, kernel) in self.curves) or "cost=roofline"


@dataclass(frozen=True, kw_only=True)
class Card(Gpu):
    calibration: CardCalibration | None = None
    """Constants fitted to its steps; None: its steps are charged by the datasheet."""
    tables: Tables | None = None
    """Times of its kernels, which steps are then composed of."""


def encoded(about: Mapping[str, Any], curves: Mapping[tuple[str, Kernel], Mapping[tuple[int, ...], Curve]]) -> bytes:
    """The file's content, before it is packed."""
    lines = [json.dumps(about, sort_keys=True)]
    for (framework, kernel), group in curves.items():
        sizes = sorted({size for points, _ in group.values() for size in points})
        lines.append(",".join(["sizes", framework, kernel, *(f"{size:.0f}" for size in sizes)]))
        for key, (points, times) in sorted(group.items()):
            known = dict(zip(points, times, strict=True))
            lines.append(",".join([framework, kernel, *map(str, key), *(_microseconds(known.get(s)) for s in sizes)]))
    return ("\n".join(lines) + "\n").encode()


def write_tables(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0))


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.4g}"


def tables_file(card: str, folder: Path = FOLDER) -> Path:
    return folder / f"{card}.csv.gz"


@lru_cache(maxsize=16)
def load_tables(card: str, folder: Path = FOLDER) -> Tables:
    path = tables_file(card, folder)
    require(
        path.is_file(), f"card={card!r} has no kernel tables: use one of {', '.join(cards(folder))}, or cost=roofline"
    )
    content = gzip.decompress(path.read_bytes())
    head, *lines = content.decode().splitlines()
    return Tables(card=card, about=json.loads(head), digest=digest_of(content), curves=_curves(lines))


def load_folder(card: str, folder: Path) -> Tables:
    """A card's tables of a user's own: every .csv and .csv.gz in a folder, each as the packed ones are. Refuses a file that is none, and
    a kernel that every model has and no file has."""
    files = sorted(path for path in folder.glob("*") if path.name.endswith((".csv", ".csv.gz")))
    require(bool(files), f"kernels={str(folder)!r} has no .csv or .csv.gz: give a folder of kernel tables")
    about: dict[str, Any] = {}
    found: dict[tuple[str, Kernel], dict[tuple[int, ...], Curve]] = {}
    contents = []
    for path in files:
        content = read_bytes("kernels", path)
        try:
            content = gzip.decompress(content) if path.name.endswith(".gz") else content
            head, *lines = content.decode().splitlines()
            about = json.loads(head) | about
            for group, curves in _curves(filter(None, lines)).items():
                found.setdefault(group, {}).update(curves)
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"kernels={str(path)!r} cannot be read as a kernel table ({type(error).__name__}: {error}): write it as "
                f"docs/silicon.md says"
            ) from None
        contents.append(content)
    for name in ABOUT:
        require(name in about, f"kernels={str(folder)!r} does not say its {name}: add it to a file's first line")
    for framework in dict.fromkeys(framework for framework, _ in found):
        for kernel in EVERY_MODEL:
            require(
                (framework, kernel) in found,
                f"kernels={str(folder)!r} has no {kernel} table of {framework}: add one, or leave kernels out",
            )
    return Tables(card=card, about=about, digest=digest_of(b"".join(contents)), curves=found)


def cards(folder: Path = FOLDER) -> list[str]:
    """The cards with tables of their own."""
    return sorted(path.name.removesuffix(".csv.gz") for path in folder.glob("*.csv.gz"))


def _curves(lines: Iterable[str]) -> Mapping[tuple[str, Kernel], Mapping[tuple[int, ...], Curve]]:
    sizes: Sequence[float] = ()
    found: dict[tuple[str, Kernel], dict[tuple[int, ...], Curve]] = {}
    for line in lines:
        first, *cells = line.split(",")
        if first == "sizes":
            sizes = [float(cell) for cell in cells[2:]]
            continue
        kernel: Kernel = cells[0]  # type: ignore[assignment]
        num_keys = len(KEYS[kernel])
        times = cells[1 + num_keys :]
        known = [(size, 1e-6 * float(time)) for size, time in zip(sizes, times, strict=True) if time]
        points, seconds = zip(*known, strict=True)
        found.setdefault((first, kernel), {})[tuple(map(int, cells[1 : 1 + num_keys]))] = points, seconds
    return found


class Product(NamedTuple):
    """A matrix product with weights [outputs, inputs]."""

    outputs: int
    inputs: int


class Heads(NamedTuple):
    heads: int
    kv_heads: int


class Experts(NamedTuple):
    """The experts of a layer on one rank: gate, up and down of each, rows routed and gathered again."""

    width: int
    hidden: int
    """Hidden rows of one expert on this rank."""
    chosen: int
    among: int


def layer_products(shape: ModelShape) -> tuple[Product, ...]:
    """What every row of a layer of ``shape``, a rank's share, passes: q, k and v are one product, gate and up another. Of a mixture the
    router and the expert that every row gets."""
    if shape.num_experts > 1:
        shared = () if shape.shared_hidden is None else _mlp(shape, shape.shared_hidden)
        return (*_attention(shape), Product(shape.num_experts, shape.d_model), *shared)
    return (*_attention(shape), *_mlp(shape, shape.mlp_hidden))


def dense_layer_products(shape: ModelShape) -> tuple[Product, ...]:
    """The same of a mixture's layers with one MLP in place of experts; empty where there are none."""
    return () if shape.dense_hidden is None else (*_attention(shape), *_mlp(shape, shape.dense_hidden))


def _attention(shape: ModelShape) -> tuple[Product, ...]:
    return Product(shape.q_width + 2 * shape.kv_width, shape.d_model), Product(shape.d_model, shape.q_width)


def _mlp(shape: ModelShape, hidden: int) -> tuple[Product, ...]:
    return Product(2 * hidden, shape.d_model), Product(shape.d_model, hidden)


def head_product(shape: ModelShape) -> Product:
    return Product(shape.vocab_rows, shape.d_model)


def heads_of(shape: ModelShape) -> Heads:
    return Heads(shape.n_heads, shape.n_kv_heads)


def experts_of(shape: ModelShape) -> Experts | None:
    """None of a dense model."""
    if shape.num_experts == 1:
        return None
    return Experts(shape.d_model, shape.mlp_hidden, shape.experts_per_token, shape.num_experts)
