"""Describe a table: frozen, validated data that worker and shard agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Self, TypeVar

from embershard.proto.codec.name import CodecName

MAX_DIM = 65_536  # a row of this dim is 256 KiB: far above any embedding, and far below a message's limit
MAX_FLOAT32 = 3.4028234663852886e38  # what a row, a gradient or a learning rate can be
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,199}")


def _check(owner: str, name: str, value: float, ok: bool, want: str) -> None:
    fits = abs(value) <= MAX_FLOAT32  # NaN does not
    if not ok or not fits:
        raise ValueError(f"{owner}: {name} must be {want if fits else 'a finite float32'}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class _Params:
    """Settings that travel as (kind, {name: number}); the field order is the order of the shard's `hyper` array."""

    kind: ClassVar[str]

    def params(self) -> dict[str, float]:
        """Every setting as a number, in field order."""
        return {f.name: float(getattr(self, f.name)) for f in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class Initializer(_Params):
    """First values of a row, a function of (seed, table, id) alone."""

    @staticmethod
    def of(kind: str, params: Mapping[str, float]) -> Initializer:
        """The initializer of a wire description. ValueError names what is unknown."""
        cls = _INITIALIZERS.get(kind)
        if cls is None:
            raise ValueError(f"unknown initializer {kind!r} (known: {', '.join(sorted(_INITIALIZERS))})")
        return _build(cls, params)


@dataclass(frozen=True, kw_only=True)
class Constant(Initializer):
    """Set the first values of a row to `value`."""

    kind = "constant"
    value: float = 0.0

    def __post_init__(self) -> None:
        _check("Constant", "value", self.value, abs(self.value) <= MAX_FLOAT32, "a finite float32")


@dataclass(frozen=True, kw_only=True)
class Uniform(Initializer):
    """Draw the first values of a row uniformly from [low, high)."""

    kind = "uniform"
    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _check("Uniform", "low", self.low, self.low <= self.high, "at most high")
        _check("Uniform", "low", self.low, abs(self.low) <= MAX_FLOAT32, "a finite float32")
        _check("Uniform", "high", self.high, abs(self.high) <= MAX_FLOAT32, "a finite float32")


@dataclass(frozen=True, kw_only=True)
class Normal(Initializer):
    """Draw the first values of a row from a normal distribution; the defaults are those of torch's nn.Embedding."""

    kind = "normal"
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check("Normal", "mean", self.mean, abs(self.mean) <= MAX_FLOAT32, "a finite float32")
        _check("Normal", "std", self.std, 0 <= self.std <= MAX_FLOAT32, "a finite float32 >= 0")


_INITIALIZERS: dict[str, type[Initializer]] = {c.kind: c for c in (Constant, Uniform, Normal)}


_HOW_TORCH_COMPUTES = "it only says how torch computes: leave it out"
_OF_TORCH = {  # settings of torch's optimizers that shards do not have, or by another name
    "betas": "give beta1 and beta2",
    "initial_accumulator_value": "it is called initial_accumulator here",
    "decoupled_weight_decay": "use AdamW",
    "maximize": "minimise the negative loss instead",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), _HOW_TORCH_COMPUTES),
}


@dataclass(frozen=True, kw_only=True)
class Optimizer(_Params):
    """A row optimizer and its settings.

    `clip_value` clamps every gradient float, `clip_norm` then scales a gradient row down to that L2 norm; 0 turns
    either off. `weight_decay` is lazy: a row decays when it is pushed.
    """

    lr: float

    def __new__(cls, *positional: object, **settings: object) -> Self:
        """Refuse what only an optimizer of torch takes. TypeError names the setting, and what to give instead."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                remedy = _OF_TORCH.get(name, "leave it out")
                raise TypeError(f"{cls.__name__}: no setting {name!r} (known: {', '.join(known)}); {remedy}")
        if positional:
            remedy = f"give each setting its name, as {cls.__name__}(lr=0.1), and no parameters of the model"
            raise TypeError(f"{cls.__name__}: takes settings by their names alone; {remedy}")
        return super().__new__(cls)

    @property
    def name(self) -> str:
        """Name under which the shard finds the compiled function."""
        return self.kind

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name, value in self.params().items():
            _check(owner, name, value, value >= 0, ">= 0")
            if not isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, value)  # a tensor would change with what torch does to it

    @staticmethod
    def of(name: str, params: Mapping[str, float]) -> Optimizer:
        """The optimizer of a wire description; a name with a colon is user-defined."""
        if ":" in name:
            settings = dict(params)
            common = {key: settings.pop(key, 0.0) for key in ("clip_value", "clip_norm")}
            return Custom(function=name, lr=settings.pop("lr", 0.0), settings=settings, **common)
        cls = OPTIMIZERS.get(name)
        if cls is None:
            raise ValueError(f"unknown optimizer {name!r} (known: {', '.join(sorted(OPTIMIZERS))})")
        return _build(cls, params)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """SGD: w -= lr * g, with momentum and Nesterov as in torch.optim.SGD (dampening 0)."""

    kind = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum <= 0:
            raise ValueError("SGD: nesterov needs a momentum > 0")


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad with lr_decay 0."""

    kind = "adagrad"
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row, the mean of the squared gradient (Naumov et al. 2019, FBGEMM)."""

    kind = "rowwise_adagrad"
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba 2015) with a step counter per row: bias correction uses the number of pushes of the row."""

    kind = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            _check(type(self).__name__, name, getattr(self, name), getattr(self, name) < 1, "below 1")


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    kind = "adamw"
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class FTRL(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013); lr is the paper's alpha."""

    kind = "ftrl"
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("FTRL", "lr", self.lr, self.lr > 0, "> 0")


@dataclass(frozen=True, kw_only=True)
class RMSprop(Optimizer):
    """RMSprop (Hinton), as torch.optim.RMSprop (not centered)."""

    kind = "rmsprop"
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # above 1 the mean square turns negative, and its root into NaN
        _check("RMSprop", "alpha", self.alpha, self.alpha <= 1, "at most 1")


@dataclass(frozen=True, kw_only=True)
class Custom(Optimizer):
    """A user-defined row optimizer, `module:function`, from a module that the shards import (`--import`)."""

    kind = "custom"
    function: str
    settings: Mapping[str, float] = field(default_factory=dict)
    clip_value: float = 0.0
    clip_norm: float = 0.0

    @property
    def name(self) -> str:
        """The address of the function, `module:function`."""
        return self.function

    def params(self) -> dict[str, float]:
        """lr, the own settings in their order, the clips."""
        own = {key: float(value) for key, value in self.settings.items()}
        return {"lr": float(self.lr), **own, "clip_value": self.clip_value, "clip_norm": self.clip_norm}

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:\w+", self.function):
            raise ValueError(f"Custom: function must read 'module:function', got {self.function!r}")
        object.__setattr__(self, "lr", float(self.lr))
        for name, value in self.params().items():
            _check("Custom", name, value, True, "finite")

    def __hash__(self) -> int:
        return hash((self.function, tuple(self.params().items())))


OPTIMIZERS: dict[str, type[Optimizer]] = {c.kind: c for c in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, FTRL, RMSprop)}
# of local steps, whose rows other workers change too: not FTRL, by which a row is a function of its state
LOCAL_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "rmsprop", "adam", "adamw")


P = TypeVar("P", bound=_Params)


def _build(cls: type[P], params: Mapping[str, float]) -> P:
    known = {f.name: f.type for f in dataclasses.fields(cls)}
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown setting {', '.join(unknown)} (known: {', '.join(known)})")
    missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in params]
    if missing:
        raise ValueError(f"{cls.__name__}: setting {', '.join(missing)} is missing (known: {', '.join(known)})")
    values = {key: bool(value) if known[key] in (bool, "bool") else float(value) for key, value in params.items()}
    return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Define a table: a named set of rows of one dim, with its optimizer and initializer.

    `id_space` names the kind of ids (such as "user"): tables with the same id space place an id on the same shard,
    so that one Route serves all of them. By default each table has its own. `seed` determines the first values of
    all rows. The codecs encode the rows and gradients of this worker; other workers may use other ones.
    """

    name: str
    dim: int
    optimizer: Optimizer
    initializer: Initializer = field(default_factory=Normal)
    id_space: str = ""
    seed: int = 0
    push_codec: CodecName = field(default_factory=CodecName)
    pull_codec: CodecName = field(default_factory=CodecName)

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("id_space", self.id_space or self.name)):
            if not _NAME.fullmatch(text):
                want = "1 to 200 letters, digits and _ . - /, a letter, digit or _ first"
                raise ValueError(f"TableSpec: {what} must be {want}, got {text!r}")
        for what, value, least, end, most in (
            ("dim", self.dim, 1, MAX_DIM + 1, f"{MAX_DIM}"),
            ("seed", self.seed, 0, 2**63, "2**63-1"),
        ):
            try:
                number = int(operator.index(value))  # one of numpy's becomes an int, which ctypes and msgpack want
            except TypeError:
                number = -1
            if not least <= number < end:
                raise ValueError(
                    f"TableSpec {self.name!r}: {what} must be a whole number in {least}..{most}, got {value!r}"
                )
            object.__setattr__(self, what, number)

    @cached_property
    def space_key(self) -> int:
        """64-bit key of the id space, the second argument of mix64."""
        return name_key(self.id_space or self.name)

    @property
    def row_seed(self) -> int:
        """64-bit seed of this table's first values: (seed, table)."""
        return name_key(f"{self.seed}/{self.name}")

    def difference(self, other: Self) -> str:
        """The settings that differ, as `field: mine, not theirs`; empty when equal."""
        mine, theirs = self.settings(), other.settings()
        keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        return ", ".join(f"{key}: {mine.get(key)}, not {theirs.get(key)}" for key in keys)

    def settings(self) -> dict[str, str | int | float]:
        """Every setting that all who use the table share, by name, flat."""
        flat: dict[str, str | int | float] = {
            "dim": self.dim,
            "id_space": self.id_space or self.name,
            "seed": self.seed,
            "optimizer": self.optimizer.name,
            "initializer": self.initializer.kind,
        }
        flat.update({f"optimizer.{key}": value for key, value in self.optimizer.params().items()})
        flat.update({f"initializer.{key}": value for key, value in self.initializer.params().items()})
        return flat


def name_key(name: str) -> int:
    """Stable 64-bit key of a name (BLAKE2b, little endian)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
