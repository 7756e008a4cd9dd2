"""The times of a forward's kernels on a card, for a model and a framework's kernels, and the price of a step composed of them.

Times of matrix products lie on straight lines between measured numbers of rows, those of attention on power laws between measured
lengths. A card without tables takes those of another card of its generation. Each time is scaled by the ratio of the least times that
the kernel's arithmetic and traffic take on both cards.

A table is CSV in gzip. Its first line is JSON: package, version, licence, digests of the files read and what the rules of
``engines.cost.extract`` changed. A line ``sizes,FRAMEWORK,KERNEL,x,x,...`` gives the sizes of the curves below it. A line
``FRAMEWORK,KERNEL,KEY,KEY,...,t,t,...`` is one curve in microseconds, with an empty cell for a size that was not measured.

Packed sequences are charged the attention of a causal prompt with as many pairs as they have on average: bidirectional attention of n
rows has those of a causal prompt of 1.41 n. Rows that pass only some layers or matrices (``extra`` fields) run at the rate of as many
rows of one layer. Caches and copies of logits move at the share of bandwidth that elementwise kernels reach.
"""

import gzip
import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from engines.cost.listed import Curve, Curves, attention_curves, between, product_curve
from engines.cost.roofline import (
    Calibration,
    CardCalibration,
    DecodeLine,
    Gpu,
    Roofline,
    StepParts,
    StepPrice,
    StepWork,
    gpu,
)
from engines.data import read_bytes
from engines.errors import UserError, require
from engines.models.shape import BLOCK_DIFFUSION, CATALOGUE, SHAPES, ModelShape, Precision, ReadShape

Framework = Literal["vllm", "sglang", "trtllm"]
FRAMEWORKS: tuple[Framework, ...] = ("vllm", "sglang", "trtllm")
Kernel = str
"""A name in ``KEYS``."""
_OF_HEADS = ("heads", "kv_heads", "batch")
_GEMM: tuple[Kernel, ...] = ("gemm", "gemm-fp8", "gemm-fp8-block")
_EXPERTS: tuple[Kernel, ...] = ("experts", "experts-fp8", "experts-fp8-block")
KEYS: Mapping[Kernel, tuple[str, ...]] = {
    **dict.fromkeys(_GEMM, ("outputs", "inputs")),
    "prompt": _OF_HEADS,
    "decode": _OF_HEADS,
    "prompt-64": _OF_HEADS,
    "decode-64": _OF_HEADS,
    **dict.fromkeys(_EXPERTS, ("width", "hidden", "chosen", "among")),
    "all-reduce": ("degree",),
}
"""The keys that tell the curves of a kernel apart. Curves run over rows (gemm, experts), tokens of each prompt (prompt), tokens of
context (decode), and numbers that are added up (all-reduce). Heads are 128 wide, or 64 if the name says so."""

EVERY_MODEL: tuple[Kernel, ...] = ("gemm", "prompt", "decode")
"""Kernels of every model. Only some models have experts, and only groups of cards have exchanges."""
ABOUT = ("package", "version", "system")
"""The facts that a run records about the source of its times."""
FOLDER = Path(__file__).parent / "kernel_times"
BLOCK_FOLDER = FOLDER / "block"
"""Tables of block-diffusion models. They are apart, so that runs of other models do not depend on them."""
LISTED_FOLDER = FOLDER / "listed"
"""All times that the package lists, for models that are in no other table."""
FP8_FOLDER = LISTED_FOLDER / "fp8"
"""Products and experts in FP8."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    card: str
    about: Mapping[str, Any] = field(repr=False, compare=False)
    digest: str
    """The digest of the file, or of all files in a folder: the rest follows from their content."""
    curves: Mapping[tuple[str, Kernel], Curves] = field(repr=False, compare=False)
    """By framework and kernel, then by key."""
    fix: ClassVar[str] = "extract it with repro calibrate --silicon, or use cost=roofline"

    def of(self, framework: str, kernel: Kernel) -> Curves:
        """All curves of a kernel. Raises UserError if there are none."""
        curves = self.curves.get((framework, kernel))
        require(
            bool(curves), f"kernels={framework!r} has no {kernel} table of {self.card}: use one of {self._with(kernel)}"
        )
        assert curves is not None
        return curves

    def curve(self, framework: str, kernel: Kernel, key: tuple[int, ...]) -> Curve:
        curves = self.of(framework, kernel)
        if key not in curves:
            text = ", ".join(f"{name}={value}" for name, value in zip(KEYS[kernel], key, strict=True))
            raise UserError(f"kernels={framework!r} has no {kernel} of {text} in its table of {self.card}: {self.fix}")
        return curves[key]

    def attention(self, framework: str, kernel: Kernel, shape: ModelShape) -> Mapping[float, Curve]:
        """The attention curves of a model's heads, by batch."""
        heads, kv_heads = heads_of(shape)
        curves = self._attention(self.of(framework, kernel), kernel, shape)
        require(
            bool(curves),
            f"kernels={framework!r} has no {kernel} of {heads} heads and {kv_heads} K/V heads in its table of "
            f"{self.card}: use cost=roofline",
        )
        return curves

    def _attention(self, curves: Curves, kernel: Kernel, shape: ModelShape) -> Mapping[float, Curve]:
        keys = [key for key in curves if key[:2] == heads_of(shape)]
        return {key[2]: curves[key] for key in keys}

    def has_fewer_kv_heads(self, framework: str, shape: ModelShape) -> bool:
        """Whether a decode of the model takes as long as decodes of several sequences with fewer K/V heads."""
        return False

    def is_estimated(self, framework: str, product: "MatrixProduct") -> bool:
        """Whether the product's times are derived from those of measured products."""
        if not tables_file(self.card, LISTED_FOLDER).is_file():
            return False  # a user's own times
        return product not in load_tables(self.card, LISTED_FOLDER).of(framework, "gemm")

    def _with(self, kernel: Kernel) -> str:
        return ", ".join(name for name in FRAMEWORKS if (name, kernel) in self.curves) or "cost=roofline"


class ListedTables(Tables):
    """All times that a package lists for a card. Other products and heads follow from them (``engines.cost.listed``)."""

    fix = "use other kernels, another degree, or cost=roofline"

    def curve(self, framework: str, kernel: Kernel, key: tuple[int, ...]) -> Curve:
        if kernel in _GEMM:
            return product_curve(key, self.of(framework, kernel), gpu(self.card))
        return super().curve(framework, kernel, key)

    def attention(self, framework: str, kernel: Kernel, shape: ModelShape) -> Mapping[float, Curve]:
        return super().attention(framework, self._of_width(kernel, shape), shape)

    def _attention(self, curves: Curves, kernel: Kernel, shape: ModelShape) -> Mapping[float, Curve]:
        return attention_curves(*heads_of(shape), curves, is_decode=kernel.startswith("decode"))

    def has_fewer_kv_heads(self, framework: str, shape: ModelShape) -> bool:
        return not between(*heads_of(shape), self.of(framework, self._of_width("decode", shape)))

    def _of_width(self, kernel: Kernel, shape: ModelShape) -> Kernel:
        if shape.canvas is not None:  # scaled by its heads' width (``Kernels``)
            return kernel
        width = shape.head_dim
        require(
            width in (64, 128),
            f"head_dim={width} of model={shape.name!r} is in no table of {self.card}, which have 64 and 128: use "
            f"cost=roofline",
        )
        return f"{kernel}-64" if width == 64 else kernel


@dataclass(frozen=True, kw_only=True)
class Card(Gpu):
    calibration: CardCalibration | None = None
    """Constants fitted to its steps; None: its steps are charged by the datasheet."""
    tables: Tables | None = None
    """Times of its kernels, of which its steps are then composed."""


def encode_tables(about: Mapping[str, Any], curves: Mapping[tuple[str, Kernel], Curves]) -> bytes:
    """The file's content, before it is packed."""
    lines = [json.dumps(about, sort_keys=True)]
    for (framework, kernel), group in curves.items():
        sizes = sorted({size for points, _ in group.values() for size in points})
        lines.append(",".join(["sizes", framework, kernel, *(f"{size:.0f}" for size in sizes)]))
        for key, (points, times) in sorted(group.items()):
            cells = {size: f"{1e6 * seconds:.4g}" for size, seconds in zip(points, times, strict=True)}
            lines.append(",".join([framework, kernel, *map(str, key), *(cells.get(size, "") for size in sizes)]))
    return ("\n".join(lines) + "\n").encode()


def write_tables(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0))


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    kind = ListedTables if folder in (LISTED_FOLDER, FP8_FOLDER) else Tables
    return kind(card=card, about=json.loads(head), digest=digest_of(content), curves=_curves(lines))


def load_folder(card: str, folder: Path) -> Tables:
    """A user's own tables of a card: every .csv and .csv.gz in a folder, in the format of the packed ones. Raises UserError for a file
    that is no table, and if no file has a kernel that every model needs."""
    files = sorted(path for path in folder.glob("*") if path.name.endswith((".csv", ".csv.gz")))
    require(bool(files), f"kernels={str(folder)!r} has no .csv or .csv.gz: give a folder of kernel tables")
    about: dict[str, Any] = {}
    by_group: dict[tuple[str, Kernel], dict[tuple[int, ...], Curve]] = {}
    contents = []
    for path in files:
        content = read_bytes("kernels", path)
        try:
            content = gzip.decompress(content) if path.name.endswith(".gz") else content
            head, *lines = content.decode().splitlines()
            about = json.loads(head) | about
            for group, curves in _curves(filter(None, lines)).items():
                by_group.setdefault(group, {}).update(curves)
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"kernels={str(path)!r} cannot be read as a kernel table ({type(error).__name__}: {error}): write it as "
                f"docs/silicon.md says"
            ) from None
        contents.append(content)
    for name in ABOUT:
        require(name in about, f"kernels={str(folder)!r} does not say its {name}: add it to a file's first line")
    for framework in dict.fromkeys(framework for framework, _ in by_group):
        for kernel in EVERY_MODEL:
            require(
                (framework, kernel) in by_group,
                f"kernels={str(folder)!r} has no {kernel} table of {framework}: add one, or leave kernels out",
            )
    return Tables(card=card, about=about, digest=digest_of(b"".join(contents)), curves=by_group)


def cards(folder: Path = FOLDER) -> list[str]:
    """The cards with tables of their own."""
    return sorted(path.name.removesuffix(".csv.gz") for path in folder.glob("*.csv.gz"))


class _Unread(Mapping[tuple[int, ...], Curve]):
    """Curves of a kernel. At a look-up it reads the keys of all curves, but only the times of the curve that is asked for."""

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self.texts: list[tuple[Sequence[float], str]] = []
        """For each curve its sizes, and the text of its keys and times."""
        self._read: dict[tuple[int, ...], Curve] = {}

    @cached_property
    def _lines(self) -> dict[tuple[int, ...], tuple[Sequence[float], str]]:
        rows = [(sizes, text.split(",", self._num_keys)) for sizes, text in self.texts]
        return {tuple(map(int, cells[: self._num_keys])): (sizes, cells[self._num_keys]) for sizes, cells in rows}

    def __getitem__(self, key: tuple[int, ...]) -> Curve:
        if key not in self._read:
            sizes, times = self._lines[key]
            pairs = [(size, 1e-6 * float(time)) for size, time in zip(sizes, times.split(","), strict=True) if time]
            points, seconds = zip(*pairs, strict=True)
            self._read[key] = points, seconds
        return self._read[key]

    def __contains__(self, key: object) -> bool:
        return key in self._lines

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def _curves(lines: Iterable[str]) -> Mapping[tuple[str, Kernel], Curves]:
    sizes: Sequence[float] = ()
    by_kernel: dict[tuple[str, Kernel], _Unread] = {}
    for line in lines:
        framework, kernel, rest = line.split(",", 2)
        if framework == "sizes":
            sizes = [float(cell) for cell in rest.split(",")[1:]]
            continue
        if (framework, kernel) not in by_kernel:
            by_kernel[framework, kernel] = _Unread(len(KEYS[kernel]))
        by_kernel[framework, kernel].texts.append((sizes, rest))
    return by_kernel


class MatrixProduct(NamedTuple):
    """A matrix product with weights [outputs, inputs]."""

    outputs: int
    inputs: int


class Heads(NamedTuple):
    heads: int
    kv_heads: int


class Experts(NamedTuple):
    """The experts of a layer on one rank: gate, up and down of each expert, with routing and gathering of rows."""

    width: int
    hidden: int
    """Hidden rows of one expert on this rank."""
    chosen: int
    among: int


def layer_products(shape: ModelShape) -> tuple[MatrixProduct, ...]:
    """The products that every row passes in a layer of ``shape``, a rank's share. q, k and v are one product, gate and up another. For a
    mixture these include the router, and the expert that every row gets."""
    if shape.num_experts > 1:
        shared = () if shape.shared_hidden is None else _mlp(shape, shape.shared_hidden)
        return (*_attention(shape), MatrixProduct(shape.num_experts, shape.d_model), *shared)
    return (*_attention(shape), *_mlp(shape, shape.mlp_hidden))


def dense_layer_products(shape: ModelShape) -> tuple[MatrixProduct, ...]:
    """The same for a mixture's layers with one MLP in place of experts; empty if there are none."""
    return () if shape.dense_hidden is None else (*_attention(shape), *_mlp(shape, shape.dense_hidden))


def full_layer_products(shape: ModelShape) -> tuple[MatrixProduct, ...]:
    """The same for a canvas model's layers without a window, whose values are their keys; empty if there are none."""
    if shape.canvas is None:
        return ()
    heads, d = shape.n_heads * shape.canvas.full_head_dim, shape.d_model
    keys = shape.canvas.full_kv_heads * shape.canvas.full_head_dim
    return MatrixProduct(heads + keys, d), MatrixProduct(d, heads), *layer_products(shape)[2:]


def _attention(shape: ModelShape) -> tuple[MatrixProduct, ...]:
    return MatrixProduct(shape.q_width + 2 * shape.kv_width, shape.d_model), MatrixProduct(shape.d_model, shape.q_width)


def _mlp(shape: ModelShape, hidden: int) -> tuple[MatrixProduct, ...]:
    return MatrixProduct(2 * hidden, shape.d_model), MatrixProduct(shape.d_model, hidden)


def head_product(shape: ModelShape) -> MatrixProduct:
    return MatrixProduct(shape.vocab_rows, shape.d_model)


def heads_of(shape: ModelShape) -> Heads:
    return Heads(shape.n_heads, shape.n_kv_heads)


def experts_of(shape: ModelShape) -> Experts | None:
    """The experts of a layer; None for a dense model."""
    if shape.num_experts == 1:
        return None
    return Experts(shape.d_model, shape.mlp_hidden, shape.experts_per_token, shape.num_experts)


TRANSFERRED: Mapping[str, str] = {"rtx4090": "l40s", "h20": "h200"}
"""Cards without tables, and the card of the same generation whose shares of peak and bandwidth they get."""
ELEMENTWISE_SHARE = 0.8
"""Share of memory bandwidth that norms, rotation and activations reach. AIConfigurator assumes this and the next constant."""
ELEMENTWISE_S = 3e-6
"""Seconds that each such kernel takes besides its traffic."""
_TABLED_WIDTH = 128
"""The width of heads in the tables of attention."""
_ELEMENTWISE_KERNELS = 5
"""Two norms, rotation, K/V store, activation."""
DECODED = (512, 8192)
"""A decode's attention is fitted by a line between these tokens of context: kernels change beyond."""


def has_tables(card: str | Gpu, shape: ModelShape | None = None) -> bool:
    """Whether the steps of a card can be composed of kernels."""
    if isinstance(card, Card):
        return card.tables is not None
    return tables_file(TRANSFERRED.get(str(card), str(card)), _folder(shape)).is_file()


def _folder(shape: ModelShape | None) -> Path:
    """The folder of a model's tables. Tables added for one family, or for any model, thus do not change the runs of other models."""
    if isinstance(shape, ReadShape):
        return LISTED_FOLDER
    if shape is not None and (shape.name in _OTHERS or shape.precision != "bf16" or shape.canvas is not None):
        return LISTED_FOLDER
    return BLOCK_FOLDER if shape is not None and shape.name in _BLOCK_DIFFUSION else FOLDER


_OTHERS = {shape.name for shape in CATALOGUE if shape not in SHAPES}
_BLOCK_DIFFUSION = {shape.name for shape in BLOCK_DIFFUSION}


def check_kernels(
    shape: ModelShape,
    card: Gpu,
    framework: str | None,
    degrees: Sequence[int] = (1,),
    attention: Sequence[Kernel] = ("prompt",),
) -> None:
    """Raises UserError if the model's kernels are in no table, of a user's own card or of a package's list. ``framework`` is None if no
    kernels are asked for."""
    if framework is None or not (isinstance(card, Card) or _folder(shape) == LISTED_FOLDER):
        return
    for degree in degrees:
        kernels_of(shape.on_rank(degree), card, framework, degree).check(attention)


@lru_cache(maxsize=64)
def composed_degrees(shape: ModelShape, card: Gpu, framework: str, degrees: tuple[int, ...]) -> tuple[int, ...]:
    """The degrees at which a package lists the model's kernels, or all for a model with its own table. Raises UserError if none."""
    if isinstance(card, Card) or _folder(shape) != LISTED_FOLDER:
        return degrees
    listed: list[int] = []
    errors: list[UserError] = []
    for degree in degrees:
        try:
            kernels_of(shape.on_rank(degree), card, framework, degree).check(("prompt", "decode"))
            listed.append(degree)
        except UserError as error:
            errors.append(error)
    if not listed:
        raise errors[0]
    return tuple(listed)


def tables_of(card: str | Gpu, shape: ModelShape | None = None) -> Tables:
    """The card's own tables, or those that are transferred to it; those of ``shape``'s family if it has separate ones."""
    if isinstance(card, Card):
        require(
            card.tables is not None,
            f"card={card.name!r} has no kernel tables: give kernels in its file, or use cost=roofline",
        )
        assert card.tables is not None
        return card.tables
    name = TRANSFERRED.get(str(card), str(card))
    if shape is None or shape.precision == "bf16":
        return load_tables(name, _folder(shape))
    has_fp8 = tables_file(name, FP8_FOLDER).is_file()
    require(has_fp8, f"precision={shape.precision!r} has no kernel times on {card}: use bf16")
    return _with_fp8(name)


@lru_cache(maxsize=16)
def _with_fp8(card: str) -> Tables:
    bf16, fp8 = load_tables(card, LISTED_FOLDER), load_tables(card, FP8_FOLDER)
    digest = digest_of(f"{bf16.digest} {fp8.digest}".encode())
    return ListedTables(card=card, about=bf16.about, digest=digest, curves={**bf16.curves, **fp8.curves})


class Kernels:
    """The kernel times of a model. ``shape`` is a rank's share of it at ``degree``; times are those of all its layers."""

    def __init__(self, shape: ModelShape, card: Gpu, framework: str, degree: int = 1) -> None:
        require(framework in FRAMEWORKS, f"kernels={framework!r} is unknown: use one of {', '.join(FRAMEWORKS)}")
        self.shape, self.card, self.framework, self.degree = shape, card, framework, degree
        self.tables = tables_of(card, shape)
        self._measured_on = gpu(self.tables.card) if self.is_transferred else card
        self._is_capped = False
        self._attention_rows: Callable[[Kernel], Mapping[float, Curve]] = cache(
            lambda kernel: self.tables.attention(framework, kernel, shape)
        )
        self._layers = self._layer_curve(layer_products(shape), degree, has_experts=shape.num_experts > 1)
        dense = dense_layer_products(shape)
        self._dense_layers = self._layer_curve(dense, degree, has_experts=False) if dense else None
        full = full_layer_products(shape)
        self._full_layers = self._layer_curve(full, degree, has_experts=True) if full else None
        self._head = self._product_curve(*head_product(shape))
        # Steps repeat: without caches, most of a simulation's time would go into looking up the same ones.
        self.layers_s: Callable[[float], float] = cache(self._layers_s)
        """Everything but attention, by rows: products or experts, norms, rotation, activations, and the all-reduces of a group."""
        self.head_s: Callable[[float], float] = cache(self._head_s)
        """Logits in one pass, by rows; the kernel that reduces them writes and reads them once more."""
        self.prompts_s: Callable[[int], PowerLaws] = cache(self._prompts_s)
        """Attention of one prompt over all layers, by the number of prompts in the step. It takes as long as a causal prompt with as
        many pairs."""
        self.decode_line: Callable[[int], DecodeLine] = cache(self._fitted_line)
        """Attention of a decode step over all layers, by its number of sequences."""
        self.estimated_share: Callable[[float, float], float] = cache(self._estimated_share)
        """By rows and logits of a step: the share of its products' time, including experts, that is derived from other products."""

    def __reduce__(self) -> "tuple[type[Kernels], tuple[ModelShape, Gpu, str, int]]":
        """Another process looks the tables up itself, because the caches of steps cannot be pickled."""
        return type(self), (self.shape, self.card, self.framework, self.degree)

    def check(self, attention: Sequence[Kernel]) -> None:
        """Raises UserError if the model's attention is in no table; its other kernels are looked up already."""
        for kernel in attention:
            self._attention_rows(kernel)

    @property
    def is_transferred(self) -> bool:
        return self.card.name != self.tables.card

    def _layers_s(self, rows: float) -> float:
        if not rows:
            return 0.0
        dense = self.shape.dense_layers or 0
        experts_s = (self.shape.n_layers - dense) * self._layers.at(rows)
        if self.shape.canvas is not None and self._full_layers is not None:
            experts_s += self.shape.canvas.full_layers * (self._full_layers.at(rows) - self._layers.at(rows))
        return experts_s if self._dense_layers is None else experts_s + dense * self._dense_layers.at(rows)

    def _head_s(self, rows: float) -> float:
        if not rows:
            return 0.0
        # A canvas model multiplies its probabilities by the embedding, after they were written and read.
        passes = 1 if self.shape.canvas is None else 1 + self.shape.canvas.takes_back
        return passes * (self._head.at(rows) + self.elementwise_s(rows * self.shape.logits_bytes_per_row))

    def elementwise_s(self, num_bytes: float, kernels: int = 1) -> float:
        return kernels * ELEMENTWISE_S + num_bytes / (ELEMENTWISE_SHARE * self.card.bandwidth)

    def prompt_s(self, pairs: float, batch: int = 1) -> float:
        return self.prompts_s(batch).at(pairs)

    def _layer_curve(self, products: Sequence[MatrixProduct], degree: int, *, has_experts: bool) -> "_Line":
        shape = self.shape
        parts: list[Callable[[float], float]] = []
        curves = [self._product_curve(*product, self._precision_of(product)) for product in products]
        experts = experts_of(shape) if has_experts else None
        if experts is not None:
            curves.append(self._experts_curve(*experts))
        parts.extend(curve.at for curve in curves)
        sizes = {size for curve in curves for size in curve.sizes}
        if degree > 1:
            exchanged = _Line(*self.tables.curve(self.framework, "all-reduce", (degree,)))
            parts.extend([lambda rows: exchanged.at(rows * shape.d_model)] * 2)
            sizes |= {max(1.0, size / shape.d_model) for size in exchanged.sizes}
        max_rows = min(curve.sizes[-1] for curve in curves)
        rows = sorted(size for size in sizes if size <= max_rows)
        kernels, row_bytes = self._elementwise(has_experts=has_experts)
        times = [sum(part(size) for part in parts) + self.elementwise_s(size * row_bytes, kernels) for size in rows]
        return _Line(rows, times)

    def _elementwise(self, *, has_experts: bool) -> tuple[int, int]:
        """How many kernels of a layer are no products, and how many bytes they read and write for each row."""
        shape, kernels = self.shape, _ELEMENTWISE_KERNELS
        # Norms: the stream and its addend, twice. Rotation: queries and keys. Store: keys and values.
        values = 2 * 4 * shape.d_model + 2 * (shape.q_width + shape.kv_width) + 4 * shape.kv_width
        if shape.qk_norm:
            kernels += 1
            values += 2 * (shape.q_width + shape.kv_width)
        # Experts' activation is within their time.
        hidden = shape.shared_hidden if has_experts else (shape.dense_hidden or shape.mlp_hidden)
        if hidden is None:
            kernels -= 1
        else:
            values += 3 * hidden
        return kernels, values * shape.dtype_bytes

    def _moved_curve(
        self, kernel: Kernel, key: tuple[int, ...], work: Callable[[float], tuple[float, float]]
    ) -> "_Line":
        sizes, times = self.tables.curve(self.framework, kernel, key)
        converted = self._moved(work)
        return _Line(sizes, [converted(m, t) for m, t in zip(sizes, times, strict=True)])

    def _precision_of(self, product: MatrixProduct) -> Precision:
        """The precision of a product. Routers stay bf16, and with dynamic scales a mixture's attention too (recipes of llm-compressor)."""
        shape, precision = self.shape, self.shape.precision
        is_mixture, is_dynamic = shape.num_experts > 1, precision == "fp8-dynamic"
        if is_mixture and (product.outputs == shape.num_experts or (is_dynamic and product in _attention(shape))):
            return "bf16"
        return "fp8" if is_dynamic else precision

    def _least_curve(
        self, kernel: Kernel, key: tuple[int, ...], work: Callable[[float], tuple[float, float]], precision: Precision
    ) -> "_Line":
        """A curve in ``precision``. FP8 counts as no slower than bfloat16: the FP8 tables have a floor, the time of a launch."""
        bf16 = self._moved_curve(kernel, key, work)
        if precision == "bf16":
            return bf16
        curve = self._moved_curve(f"{kernel}-{precision}", key, work)
        times = [min(time, bf16.at(size)) for size, time in zip(curve.sizes, curve.times, strict=True)]
        self._is_capped |= times != curve.times
        return _Line(curve.sizes, times)

    def _product_curve(self, outputs: int, inputs: int, precision: Precision = "bf16") -> "_Line":
        def work(m: float) -> tuple[float, float]:
            return 2 * m * outputs * inputs, 2 * (outputs * inputs + m * (outputs + inputs))

        return self._least_curve("gemm", (outputs, inputs), work, precision)

    def _experts_curve(self, width: int, hidden: int, chosen: int, among: int) -> "_Line":
        def work(m: float) -> tuple[float, float]:
            touched = among * (1 - (1 - chosen / among) ** m)
            return 6 * m * chosen * width * hidden, 2 * (3 * touched * width * hidden + 2 * m * width)

        # Experts with dynamic scales run CUTLASS kernels; those tabled by tensor are Triton's, which are slower.
        precision = self.shape.precision
        key = width, hidden, chosen, among
        return self._least_curve("experts", key, work, "fp8-block" if precision == "fp8-dynamic" else precision)

    def _moved(self, work: Callable[[float], tuple[float, float]]) -> Callable[[float, float], float]:
        """Converts a measured time to this card: by the ratio of what FLOP and bytes take at least on both cards, if they differ."""
        if not self.is_transferred:
            return lambda size, time: time
        here, there = self.card, self._measured_on

        def moved(size: float, time: float) -> float:
            flops, num_bytes = work(size)
            least_s = max(flops / here.peak_flops, num_bytes / here.bandwidth)
            return time * least_s / max(flops / there.peak_flops, num_bytes / there.bandwidth)

        return moved

    def _estimated_share(self, rows: float, logit_rows: float) -> float:
        shape, dense = self.shape, self.shape.dense_layers or 0
        products = [(product, shape.n_layers - dense, rows) for product in layer_products(shape)]
        products += [(product, dense, rows) for product in dense_layer_products(shape)]
        products.append((head_product(shape), 1, logit_rows))
        estimated_s = total_s = 0.0
        for product, times, num in products:
            precision = "bf16" if product == head_product(shape) else self._precision_of(product)
            product_s = times * self._product_curve(*product, precision).at(num)
            total_s += product_s
            if self.tables.is_estimated(self.framework, product):
                estimated_s += product_s
        experts = experts_of(shape)
        if experts is not None:
            total_s += (shape.n_layers - dense) * self._experts_curve(*experts).at(rows)
        return estimated_s / total_s

    def extrapolations(self, pairs: float, context: int) -> list[str]:
        """The parts of a run's attention that no table has, if a prompt has ``pairs`` of query and key, and a decode ``context`` tokens."""
        notes = []
        longest = max(curve[0][-1] for curve in self._attention_rows("prompt").values())
        if pairs > _causal(longest):
            notes.append(f"prompts with more pairs than one of {longest:,.0f} tokens")
        if context > DECODED[1]:
            notes.append(f"decodes over more than {DECODED[1]:,} tokens")
        if context and self.tables.has_fewer_kv_heads(self.framework, self.shape):
            notes.append(f"decodes of {self.shape.n_kv_heads} K/V heads on a card, as of several sequences with fewer")
        if self.shape.canvas is not None:
            notes.append(f"attention of heads wider than {_TABLED_WIDTH}, as of more heads of that width")
        if self._is_capped:
            notes.append(f"{self.shape.precision} where the tables have it slower than bf16, as that")
        return notes

    def _prompts_s(self, batch: int) -> "PowerLaws":
        heads, kv_heads = heads_of(self.shape)
        dim, size_bytes = self.shape.head_dim, self.shape.dtype_bytes

        def work(tokens: float) -> tuple[float, float]:
            moved_bytes = 2 * tokens * (heads + kv_heads) * dim * size_bytes
            return 4 * heads * dim * _causal(tokens), moved_bytes

        converted = self._moved(work)
        scale = self.shape.n_layers / batch
        if self.shape.canvas is not None:  # heads are wider than a table's
            scale = self.shape.attention_flops_per_pair / (4 * heads * _TABLED_WIDTH) / batch
        times = _at_batch(self._attention_rows("prompt"), batch)
        return PowerLaws(
            [_causal(length) for length in times], [scale * converted(length, t) for length, t in times.items()]
        )

    def _fitted_line(self, batch: int) -> DecodeLine:
        heads, kv_heads = heads_of(self.shape)
        dim, size_bytes = self.shape.head_dim, self.shape.dtype_bytes
        converted = self._moved(
            lambda context: (4 * heads * dim * batch * context, 2 * batch * context * kv_heads * dim * size_bytes)
        )
        times = {c: converted(c, t) for c, t in _at_batch(self._attention_rows("decode"), batch).items()}
        least_s, layers = min(times.values()), self.shape.n_layers
        low, high = DECODED
        points = [(batch * c, t) for c, t in times.items() if low <= c <= high]
        base, slope = _least_relative_squares(points)
        return DecodeLine(layers * base, layers * slope, layers * least_s)


def _causal(tokens: float) -> float:
    return tokens * (tokens + 1) / 2


def _at_batch(rows: Mapping[float, Curve], batch: int) -> dict[float, float]:
    """Seconds by length at a batch: by a power law between measured batches, and in proportion beyond the largest one measured."""
    batches = sorted(rows)
    by_batch = {size: dict(zip(*rows[size], strict=True)) for size in batches}
    seconds: dict[float, float] = {}
    for length in sorted({length for row in by_batch.values() for length in row}):
        measured = [size for size in batches if length in by_batch[size]]
        index = bisect_left(measured, batch)
        if index == len(measured):
            seconds[length] = by_batch[measured[-1]][length] * batch / measured[-1]
        elif measured[index] == batch or index == 0:
            seconds[length] = by_batch[measured[index]][length]
        else:
            low, high = measured[index - 1], measured[index]
            share = math.log(batch / low) / math.log(high / low)
            seconds[length] = by_batch[low][length] ** (1 - share) * by_batch[high][length] ** share
    return seconds


def _least_relative_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Base and slope, none negative, of the line through (x, y) with the least sum of squared relative errors."""
    # Columns 1/y and x/y against 1.
    aa = math.fsum([1 / (y * y) for _, y in points])
    ab = math.fsum([x / (y * y) for x, y in points])
    bb = math.fsum([x * x / (y * y) for x, y in points])
    a = math.fsum([1 / y for _, y in points])
    b = math.fsum([x / y for x, y in points])
    det = aa * bb - ab * ab
    base, slope = (a * bb - b * ab) / det, (b * aa - a * ab) / det
    if base < 0:
        return 0.0, b / bb
    return (base, slope) if slope >= 0 else (a / aa, 0.0)


class _Line:
    """Straight lines between points. Before the first point its time holds; beyond the last, times grow in proportion."""

    def __init__(self, sizes: Sequence[float], times: Sequence[float]) -> None:
        self.sizes, self.times = list(sizes), list(times)

    def at(self, size: float) -> float:
        sizes, times = self.sizes, self.times
        index = bisect_left(sizes, size)
        if index == len(sizes):
            return times[-1] * size / sizes[-1]
        high = times[index]
        if sizes[index] == size or not index:
            return high
        low = times[index - 1]
        return low + (high - low) * (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])


class PowerLaws:
    """Power laws between points. Before the first point its time holds; beyond the last, times grow in proportion."""

    def __init__(self, sizes: Sequence[float], times: Sequence[float]) -> None:
        self.sizes, self.times = list(sizes), list(times)
        self.powers = [
            math.log(times[i] / times[i - 1]) / math.log(sizes[i] / sizes[i - 1]) if i else 0.0
            for i in range(len(sizes))
        ]

    def at(self, size: float) -> float:
        sizes, times = self.sizes, self.times
        index = bisect_left(sizes, size)
        if index == len(sizes):
            return times[-1] * size / sizes[-1]
        if not index:
            return times[0]
        return times[index - 1] * (size / sizes[index - 1]) ** self.powers[index]


class Composed(StepPrice):
    """A price composed of kernel times. Only the overheads of a step count in ``calibration``."""

    def __init__(self, kernels: Kernels, calibration: Calibration | None = None) -> None:
        super().__init__(kernels.shape, kernels.card, calibration)
        self.kernels = kernels
        self._moved = ELEMENTWISE_SHARE * kernels.card.bandwidth

    def parts(self, work: StepWork) -> StepParts:
        if work.prompts or work.decoding:
            return self._causal_parts(work)
        linear_s = self.kernels.layers_s(work.query_rows)
        if work.extra_linear_flops:
            linear_s += self._extra_linear_s(work)
        logits_s = work.logit_chunks * self.kernels.head_s(work.logit_rows / work.logit_chunks)
        return linear_s, self._mean_attention_s(work), logits_s + work.copied_logit_bytes / self._moved

    def _causal_parts(self, work: StepWork) -> StepParts:
        kernels, prompts, decoding = self.kernels, work.prompts, work.decoding
        rows, num, attention_s = work.query_rows + decoding, len(prompts), 0.0
        if prompts:
            count, tokens = work.padding
            num += count
            rows += count * tokens
            prompt_s = kernels.prompts_s(num).at
            if count:
                attention_s = count * prompt_s(0.5 * tokens * (tokens + 1))
            for history, tokens in prompts:
                rows += tokens
                attention_s += prompt_s(tokens * (history + 0.5 * (tokens + 1)))
        if decoding:
            base_s, slope_s, floor_s = kernels.decode_line(decoding)
            attention_s += max(base_s + slope_s * work.context, floor_s)
        return kernels.layers_s(rows), attention_s, kernels.head_s(num + decoding)

    def decode_line(self, decoding: int) -> DecodeLine:
        return self.kernels.decode_line(decoding)

    def _extra_linear_s(self, work: StepWork) -> float:
        layers = self.shape.n_layers
        layer_flops = self.shape.linear_flops_per_token / layers
        rows = work.query_rows + work.extra_linear_flops / layer_flops
        rate = rows * layer_flops * layers / self.kernels.layers_s(rows)
        return max(work.extra_linear_flops / rate, work.extra_weight_bytes / self._moved)

    def _mean_attention_s(self, work: StepWork) -> float:
        shape = self.shape
        pairs = work.attention_pairs + work.extra_attention_flops / shape.attention_flops_per_pair
        num_bytes = shape.kv_bytes_per_token * (work.kv_read_rows + work.kv_written_rows) + work.extra_cache_bytes
        moved_s = num_bytes / self._moved
        if not pairs:
            return moved_s
        batch = max(1, work.num_sequences)
        return max(batch * self.kernels.prompt_s(pairs / batch, batch), moved_s)


@lru_cache(maxsize=64)
def kernels_of(shape: ModelShape, card: Gpu, framework: str, degree: int = 1) -> Kernels:
    """The same ``Kernels`` for all runs of a process, with their look-ups, because the steps of runs are much the same."""
    return Kernels(shape, card, framework, degree)


def price_on(shape: ModelShape, card: Gpu, framework: str | None, calibration: Calibration) -> StepPrice:
    """A price composed of a framework's kernels, or a roofline if ``framework`` is None."""
    if framework is None:
        return Roofline(shape, card, calibration)
    return Composed(kernels_of(shape, card, framework), calibration)
