"""Sections of a job file that say what is trained: the model, its optimizers and first values."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from embershard.proto import spec

if TYPE_CHECKING:  # a job is checked in a second, without torch; only what builds from it needs more
    from torch import nn

    from embershard.worker.data.batch import Schema
    from embershard.worker.models.layers import Device
    from embershard.worker.models.recommender import Recommender

Needs = Literal["features", "pairs", "dense", "sequences"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


ONE_OR_MORE = BeforeValidator(_as_tuple, json_schema_input_type=str | tuple[str, ...])


def is_off(value: object) -> bool:
    """Whether a field says `off`, which YAML 1.1 reads as false."""
    return value is False or value == "off"


class Section(BaseModel):
    """A part of a job: frozen, and without fields that it does not know."""

    # a section's validator is built when it is used: most of them are used as a part of Job's
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def _code_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
        raise ValueError(f"must be module:name, as in my_models:Tower, got {value!r}")
    return value


class CodeSection(Section):
    """A class or function of yours. A class is called with `args`; so is a function, if there are any."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    code: Annotated[str, Field(alias="class"), AfterValidator(_code_name)]
    """Its name, `module:name`."""
    args: dict[str, Any] = {}
    """Its arguments by name."""

    @property
    def short_name(self) -> str:
        """The name without its module."""
        return self.code.rpartition(":")[2]


def as_code(value: object) -> object:
    """A text as the section that it stands for."""
    return {"class": value} if isinstance(value, str) else value


Code = Annotated[CodeSection, BeforeValidator(as_code, json_schema_input_type=str | CodeSection)]


class ModelSection(Section):
    """A model and its shape."""

    name: str
    needs: ClassVar[Needs] = "features"
    """What its data must have; pairs: one user and one item per sample, dense: at least one dense feature."""
    reads_sequences: ClassVar[bool] = False
    """Whether it takes features that are sequences."""
    labels: ClassVar[bool] = False
    """Whether it has a logit for each label of the data."""

    @property
    def takes_dim(self) -> bool:
        """Whether `embedding.dim` decides its shape."""
        return True

    def build(self, schema: Schema, dim: int, device: Device) -> Recommender:
        """The model for this data, its tables on `device`."""
        from embershard.worker.job.registry import MODELS

        model: Callable[..., Recommender] = MODELS[self.name]
        shape = {"dim": dim, **self.shape(schema)}
        wanted = inspect.signature(model).parameters
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "name"}
        return model(**{key: shape[key] for key in shape if key in wanted}, **fields, device=device)

    def shape(self, schema: Schema) -> dict[str, object]:
        """Return the arguments of model constructors that the data decides, such as the number of ids."""
        return {
            "num_ids": schema if schema.fields else schema.table_rows,
            "num_fields": schema.num_vectors,
            "num_dense": schema.num_dense,
            "num_labels": len(schema.labels),
        }


class NcfSection(ModelSection):
    """The models of the NCF paper; `factors` sets the widths of all layers."""

    name: Literal["gmf", "mlp", "neumf"]
    factors: Count = 8
    needs = "pairs"

    @property
    def takes_dim(self) -> bool:
        """Whether `embedding.dim` decides its shape."""
        return False


class ShallowSection(ModelSection):
    """The models LR and FM, without other fields."""

    name: Literal["lr", "fm"]

    @property
    def takes_dim(self) -> bool:
        """Whether `embedding.dim` decides its shape."""
        return self.name != "lr"


class DeepSection(ModelSection):
    """The models Wide&Deep and DeepFM."""

    name: Literal["wide_deep", "deepfm"]
    hidden: tuple[Count, ...] = (400, 400, 400)  # widths of the layers of the MLP
    batch_norm: bool = False  # after each layer of an MLP
    dropout: Share = 0.0  # probability, after each layer of an MLP


class XDeepFMSection(DeepSection):
    """xDeepFM; `cin` is the number of feature maps of each layer of the compressed interaction network."""

    name: Literal["xdeepfm"]  # type: ignore[assignment]
    cin: Annotated[tuple[Count, ...], Field(min_length=1)] = (100, 100)


class MMoESection(ModelSection):
    """MMoE: experts that all labels share, MLPs with layers of the widths `expert`; a gate and a tower per label."""

    name: Literal["mmoe"]
    experts: Count = 4  # number of experts
    expert: Annotated[tuple[Count, ...], Field(min_length=1)] = (256,)
    tower: tuple[Count, ...] = (64,)  # widths of the layers of each label's MLP
    batch_norm: bool = False  # after each layer of an expert
    dropout: Share = 0.0  # probability, after each layer of an MLP
    labels = True


class PLESection(MMoESection):
    """PLE: in each level every label has `experts` of its own, and all labels share `shared_experts`."""

    name: Literal["ple"]  # type: ignore[assignment]
    levels: Count = 2  # number of levels
    experts: Count = 2  # experts of each label in each level
    shared_experts: Count = 2


class DINSection(ModelSection):
    """DIN: `target` and `history` name features of the data in pairs: a category, and a sequence of its values."""

    name: Literal["din"]
    target: Annotated[tuple[str, ...], Field(min_length=1), ONE_OR_MORE]
    history: Annotated[tuple[str, ...], Field(min_length=1), ONE_OR_MORE]
    attention: tuple[Count, ...] = (80, 40)  # widths of the layers that weigh an item of the history
    hidden: tuple[Count, ...] = (200, 80)  # widths of the layers of the MLP
    batch_norm: bool = False  # after each layer of an MLP
    dropout: Share = 0.0  # probability, after each layer of an MLP
    reads_sequences = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.target) != len(self.history):
            raise ValueError(f"DINSection: history must name a sequence for each of {', '.join(self.target)}")
        return self


class DcnSection(ModelSection):
    """DCN-V2: cross layers, which multiply features with each other, and an MLP."""

    name: Literal["dcn_v2"]
    cross_layers: Count = 3  # number of cross layers
    structure: Literal["stacked", "parallel"] = "parallel"
    """stacked: the MLP reads the output of the cross layers; parallel: both read the embeddings."""
    hidden: tuple[Count, ...] = (400, 400, 400)  # widths of the layers of the MLP
    batch_norm: bool = False  # after each layer of an MLP
    dropout: Share = 0.0  # probability, after each layer of an MLP


class DlrmSection(ModelSection):
    """DLRM: products of pairs of embeddings and of an MLP of the dense features, which a second MLP reads."""

    name: Literal["dlrm"]
    bottom: tuple[Count, ...] = (512, 256, 64)  # widths of the layers of the MLP of the dense features
    hidden: tuple[Count, ...] = (512, 256)  # widths of the layers of the top MLP
    interaction: Literal["dot", "cat"] = "dot"
    """dot: the dot products of all pairs of vectors; cat: the concatenated vectors."""
    batch_norm: bool = False  # after each layer of an MLP
    dropout: Share = 0.0  # probability, after each layer of the top MLP


class PersiaSection(ModelSection):
    """PERSIA's model for the Adult data."""

    name: Literal["persia_dnn"]
    needs = "dense"


class TwoTowerSection(ModelSection):
    """Two towers, trained with a softmax over the items of the batch, corrected for item frequency."""

    name: Literal["two_tower"]
    hidden: tuple[Count, ...] = ()  # widths of the layers of each tower's MLP; [] for no MLP
    normalize: bool = True  # scale the towers' outputs to length 1, so that scores are cosines
    temperature: Annotated[float, Field(gt=0.0)] = 0.1  # by which scores are divided
    dropout: Share = 0.0  # probability, of the user's vector in training
    needs = "pairs"


class FeatureTowersSection(ModelSection):
    """Two towers over features: those of `item` and all others, trained as `two_tower`."""

    name: Literal["feature_towers"]
    item: Annotated[tuple[str, ...], Field(min_length=1), ONE_OR_MORE]
    """The features of the item; all others are those of the user, or of the moment."""
    hidden: tuple[Count, ...] = ()  # widths of the layers of each tower's MLP, before a last linear one
    normalize: bool = True  # scale the towers' outputs to length 1, so that scores are cosines
    temperature: Annotated[float, Field(gt=0.0)] = 0.1  # by which scores are divided
    dropout: Share = 0.0  # probability, of the user's vector in training


class SimpleXSection(ModelSection):
    """SimpleX: the sum of a user's embedding, with the weight `gamma`, and of the items that the user took."""

    name: Literal["simplex"]
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    pooling: Literal["mean", "user_attention"] = "mean"  # of the items that the user took
    dropout: Share = 0.0  # probability, of the user's vector in training
    needs = "pairs"

    def shape(self, schema: Schema) -> dict[str, object]:
        """Users and items in one table, and the length of a history."""
        history = sum(field.width for field in schema.fields if field.name == "history")
        return {"num_ids": schema.table_rows, "history": history}


class SASRecSection(ModelSection):
    """SASRec: self-attention over the items that a user took last."""

    name: Literal["sasrec"]
    blocks: Count = 2  # number of transformer blocks
    heads: Count = 1  # number of attention heads
    dropout: Share = 0.5  # probability
    pre_norm: bool = False
    """true: normalise only the inputs of attention and feed-forward layers; false: as the authors' code does."""
    needs = "sequences"

    def shape(self, schema: Schema) -> dict[str, object]:
        """The items, and the length of a history."""
        return {"num_ids": schema.table_rows, "history": schema.fields[0].width}


class UserModelSection(CodeSection):
    """A model of yours: an nn.Module class, or a function that returns a module.

    It is called with `args`, and with those of num_ids, num_fields, num_dense, features, dim and schema that its
    signature has and `args` does not (docs/howto/own-model.md).
    """

    needs: ClassVar[Needs] = "features"
    takes_dim: ClassVar[bool] = True
    reads_sequences: ClassVar[bool] = True
    labels: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Its name in what is shown."""
        return self.code

    def build(self, schema: Schema, dim: int, device: Device) -> nn.Module:
        """The model for this data. UserCodeFailed or BadModule where it cannot be made."""
        from embershard.worker.models.user_defined import build_model

        return build_model(self.code, self.args, schema, dim)


class LossSection(Section):
    """A built-in loss by its name; bpr and sampled_softmax compare the item of a sample with other items."""

    name: Literal["bpr", "sampled_softmax"]

    @property
    def code(self) -> str:
        """The name of the loss, as a user's own loss has one."""
        return self.name

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the loss function, by name."""
        return self.model_dump(exclude={"name"})


class BceSection(LossSection):
    """Binary cross-entropy; `label_weights` are the weights of several labels, in their order."""

    name: Literal["bce"]  # type: ignore[assignment]
    label_weights: tuple[Annotated[float, Field(ge=0.0)], ...] = ()

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the loss function: the weights alone, which a loss over lists has not."""
        return {"label_weights": self.label_weights} if self.label_weights else {}


class CclSection(LossSection):
    """The cosine contrastive loss (SimpleX): 1 - cosine of the item taken, and negatives above `margin`."""

    name: Literal["ccl"]  # type: ignore[assignment]
    margin: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.9  # a negative counts only if its cosine is above it
    negative_weight: Annotated[float, Field(ge=0.0)] = 150.0  # weight of the negatives in the loss


class OptimizerSection(Section):
    """A row optimizer: the fields of its class in proto/spec.py."""

    name: str

    def build(self) -> spec.Optimizer:
        """The optimizer; ValueError names a value out of range."""
        return spec.Optimizer.of(self.name, self.model_dump(exclude={"name"}))

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.build()
        return self


class CustomOptimizerSection(OptimizerSection):
    """A row optimizer of yours, `module:function`, of a module that the shards import (`--import`)."""

    lr: float
    settings: dict[str, float] = {}  # its own settings
    clip_value: float = 0.0
    clip_norm: float = 0.0

    def build(self) -> spec.Optimizer:
        """The optimizer; ValueError names a value out of range."""
        clips = {"clip_value": self.clip_value, "clip_norm": self.clip_norm}
        return spec.Optimizer.of(self.name, {"lr": self.lr, **self.settings, **clips})


class InitializerSection(Section):
    """First values of rows: the fields of its class in proto/spec.py."""

    name: str

    def build(self) -> spec.Initializer:
        """The initializer; ValueError names a value out of range."""
        return spec.Initializer.of(self.name, self.model_dump(exclude={"name"}))

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.build()
        return self


def _mirror(cls: type[spec.Optimizer] | type[spec.Initializer], base: type[Section]) -> type[Section]:
    """A section with the text, fields and defaults of a dataclass of proto/spec.py, so that they are written once."""
    fields: dict[str, tuple[object, object]] = {"name": (Literal[cls.kind], ...)}
    for f in dataclasses.fields(cls):
        kind = bool if f.type in (bool, "bool") else float
        fields[f.name] = (kind, ... if f.default is dataclasses.MISSING else f.default)
    create: Callable[..., type[Section]] = create_model
    made = create(f"{cls.__name__}Section", __base__=base, __module__=__name__, **fields)
    shared = inspect.getdoc(spec.Optimizer) if issubclass(cls, spec.Optimizer) else None
    made.__doc__ = "\n\n".join([inspect.getdoc(cls) or "", (shared or "").partition("\n\n")[2]]).strip()
    return made


def _choice(sections: Mapping[str, type[Section]], colon: str = "") -> object:
    """A field that is one of these sections, by its `name`; a name with a colon, or a class, is that of `colon`."""

    def tag(value: object) -> str | None:
        if colon and (isinstance(value, CodeSection) or (isinstance(value, dict) and value.keys() & {"class", "code"})):
            return colon
        name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
        return colon if colon and ":" in str(name) else name

    tagged = [Annotated[section, Tag(name)] for name, section in sections.items()]
    return Annotated[reduce(or_, tagged), Discriminator(tag)]


def _as_loss(value: object) -> object:
    """A text as the section that it stands for."""
    return {"class" if ":" in value else "name": value} if isinstance(value, str) else value


CUSTOM = "module:function"

if TYPE_CHECKING:
    AnyModel = ModelSection | UserModelSection
    AnyLoss = LossSection | CodeSection
    AnyOptimizer = OptimizerSection
    AnyInitializer = InitializerSection
else:
    _losses = {"bce": BceSection, "bpr": LossSection, "sampled_softmax": LossSection, "ccl": CclSection}
    _loss = _choice({**_losses, CUSTOM: CodeSection}, CUSTOM)
    AnyLoss = Annotated[_loss, BeforeValidator(_as_loss, json_schema_input_type=str | _loss)]
    _ctr = (
        XDeepFMSection,
        DINSection,
        MMoESection,
        PLESection,
        ShallowSection,
        DeepSection,
        DcnSection,
        DlrmSection,
        PersiaSection,
    )
    _models = (*_ctr, NcfSection, TwoTowerSection, FeatureTowersSection, SimpleXSection, SASRecSection)
    _by_name = {name: cls for cls in _models for name in get_args(cls.model_fields["name"].annotation)}
    AnyModel = _choice({**_by_name, CUSTOM: UserModelSection}, CUSTOM)
    _optimizers = {kind: _mirror(cls, OptimizerSection) for kind, cls in spec.OPTIMIZERS.items()}
    AnyOptimizer = _choice({**_optimizers, CUSTOM: CustomOptimizerSection}, CUSTOM)
    _initializers = (spec.Constant, spec.Uniform, spec.Normal)
    AnyInitializer = _choice({cls.kind: _mirror(cls, InitializerSection) for cls in _initializers})
