"""How one direction of one table travels, as a text: `none`, `int8`, `topk:0.01+fp16s`, `module:function`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

BUILTIN_VALUES = ("none", "fp16s", "bf16", "int8", "onebit")
MAX_RANK = 256  # 64 MiB of products take a shard half a second
_RATIO = ("topk", "rows", "randomk", "dgc")
_SELECTIONS = (*_RATIO, "powersgd", "delta")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_KNOWN = (
    "none, fp16s, bf16, int8, onebit, topk:RATIO, rows:RATIO, randomk:RATIO, dgc:RATIO, powersgd:RANK, delta, "
    "module:function; +fp16s, +bf16, +int8 or +module:function after a ratio or a rank"
)


@dataclass(frozen=True, kw_only=True)
class CodecName:
    """A codec, parsed: which rows or elements of a table are sent (`select`, `number`), and in which form (`values`).

    `select`: all; topk (elements), rows (whole rows by L2 norm), randomk (elements) or dgc, of which `number` is the
    ratio sent, in (0, 1]; powersgd, of which it is the rank; delta, what changed since the last pull. `values`: none
    (float32), fp16s, bf16, int8, onebit or a user-defined `module:function`. ValueError says what is wrong.
    """

    select: str = "all"
    number: float = 0.0
    values: str = "none"

    def __post_init__(self) -> None:
        reason = self._mistake()
        if reason:
            raise ValueError(f"codec {str(self)!r}: {reason}")

    @staticmethod
    def parse(text: str) -> CodecName:
        """The codec that `NAME[:NUMBER][+VALUES]` names. ValueError says what is wrong and what is known."""
        head, plus, values = text.partition("+")
        name, _, number = head.partition(":")
        try:
            if name in _SELECTIONS:
                return CodecName(select=name, number=_number(head, number), values=values if plus else "none")
            if plus:
                raise ValueError(f"codec {text!r}: {head!r} already says how values travel, so nothing follows it")
            return CodecName(values=text)
        except ValueError as error:
            raise ValueError(f"{error} (known: {_KNOWN})") from None

    def __str__(self) -> str:
        if self.select == "all":
            return self.values
        number = f":{float(self.number)!r}".removesuffix(".0") if self.select != "delta" else ""
        return f"{self.select}{number}" + (f"+{self.values}" if self.values != "none" else "")

    @property
    def is_plain(self) -> bool:
        """Whether everything is sent, as float32."""
        return self.select == "all" and self.values == "none"

    @property
    def is_lossless(self) -> bool:
        """Whether a pull with it gives the bits that the shard keeps."""
        return self.is_plain or self.select == "delta"

    @property
    def is_custom(self) -> bool:
        """Values travel as a user-defined function writes them."""
        return ":" in self.values

    @property
    def has_feedback(self) -> bool:
        """Whether gradients that are not sent now stay in a residual on the worker."""
        return self.select not in ("all", "delta") or self.values == "onebit"

    @property
    def for_pull(self) -> bool:
        """Whether rows can be pulled with this codec: it keeps no residual."""
        return not self.has_feedback

    @property
    def dense_only(self) -> bool:
        """Whether this codec is for dense weights only."""
        return self.select in ("powersgd", "delta") or self.values == "onebit"

    def check(self, direction: str, dense: bool) -> None:
        """ValueError with the reason unless it can serve this direction ("push" or "pull") of such a table."""
        reason = ""
        if direction == "pull" and not self.for_pull:
            reason = "it keeps what it does not send for later, and a pull has no later; use none, fp16s, bf16 or int8"
        elif direction == "push" and self.select == "delta":
            reason = "it sends the weights that changed, so it serves pulls"
        elif not dense and self.values == "onebit":
            reason = "it serves dense weights: a row that is exactly zero cannot say so in one bit; use int8"
        elif not dense and self.select == "powersgd":
            reason = "it serves dense weights: the rows of a batch are no matrix that stays from step to step; use topk"
        elif not dense and self.select == "delta":
            reason = "it serves dense weights: every batch pulls other rows; use fp16s, bf16 or int8"
        if reason:
            raise ValueError(
                f"codec {str(self)!r} on the {direction} of {'dense weights' if dense else 'rows'}: {reason}"
            )

    def _mistake(self) -> str:
        if self.select not in ("all", *_SELECTIONS):
            return f"there is no {self.select!r}"
        if self.values not in BUILTIN_VALUES and not _FUNCTION.fullmatch(self.values):
            return f"there is no {self.values!r}"
        if self.select in _RATIO and not 0 < self.number <= 1:
            return f"its ratio must be above 0 and at most 1, got {self.number:g}"
        if self.select == "dgc" and self.number == 1:
            return "at ratio 1 its masking turns momentum off; to send everything, write none"
        if self.select == "powersgd" and not (1 <= self.number <= MAX_RANK and self.number % 1 == 0):
            return f"its rank must be a whole number from 1 to {MAX_RANK}, got {self.number:g}"
        if self.select in ("all", "delta") and self.number != 0:
            return "it takes no number"
        if self.values == "onebit" and self.select != "all":
            return "onebit says the sign of every element, so it cannot follow a selection"
        if self.values != "none" and self.select == "delta":
            return "it sends what changed exactly, so no values codec can follow it"
        return ""


def _number(head: str, number: str) -> float:
    """The number of `NAME:NUMBER`; ValueError where it is missing, none or not finite."""
    name = head.partition(":")[0]
    if name == "delta":
        if head != name:
            raise ValueError(f"codec {head!r}: it takes no number")
        return 0.0
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        what = "rank" if name == "powersgd" else "ratio"
        raise ValueError(
            f"codec {head!r}: its {what} must be a number, as in {name}:{'4' if what == 'rank' else '0.01'}"
        )
    return value
