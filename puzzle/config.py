# SPDX-License-Identifier: Apache-2.0
"""The YAML edge: `run.yaml` and search spaces, checked by pydantic, with errors that name file, line and key. No torch.

The recipe (what the result depends on) is everything but `machine`, which says how this machine makes it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from puzzle.costs import Scenario, Target
from puzzle.errors import ConfigError, did_you_mean, reason

RESERVED_NAMES = ("additive", "sweep", "rounds", "front", "baselines")  # files in RUN/solutions beside the child's
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Tracker = Literal["tensorboard", "wandb", "trackio"]
# Keys newer than the first run directories: what they do at their default is what those runs did.
_LATER = {"healing": ("patience",)}


class Section(BaseModel):
    """A mapping of the YAML: unknown keys are errors, numbers are finite, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _layer_range(value: Any) -> Any:
    """`"0-3"`, `5` or a list of layers, as a list of layers."""
    if isinstance(value, int):
        return [value]
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", value)
        if not match:
            raise ValueError(f"{value!r} is not a layer range such as '0-3'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the layer range {value!r} is empty")
        return list(range(first, last + 1))
    return value


def _target(text: str) -> str:
    try:
        Target.parse(text)
    except ConfigError as error:  # as pydantic wants it, which knows the place
        raise ValueError(str(error)) from None
    return text


def _names(value: Any) -> Any:
    """One name as a list of it."""
    return [value] if isinstance(value, str) else value


def _child_name(name: str) -> str:
    if name in RESERVED_NAMES:
        raise ValueError(f"{name!r} is the name of another file in RUN/solutions; choose another")
    return name


class LayerRule(Section):
    """Other variants for some layers; a subblock that is left out keeps the general list."""

    layers: Annotated[list[int], BeforeValidator(_layer_range, json_schema_input_type=int | str | list[int])] = Field(
        min_length=1, description="a layer, a range such as 0-3, or a list of layers"
    )
    attention: list[str] | None = Field(None, min_length=1, description="variants allowed there")
    ffn: list[str] | None = Field(None, min_length=1, description="variants allowed there")


class SearchSpace(Section):
    """The variants each layer may choose from. `parent` is always among them."""

    attention: list[str] = Field(
        min_length=1, description="parent, kv2 (a count), kv/4 (a share of the parent's KV heads), linear, no_op"
    )
    ffn: list[str] = Field(
        min_length=1, description="parent, ffn768 (a width), 50% (a share of the parent's), linear, no_op"
    )
    multiple_of: int = Field(32, ge=1, description="FFN widths given as a share are rounded to a multiple of this")
    rules: list[LayerRule] = Field([], description="other variants for some layers; later rules win")
    serve_with: Literal["transformers", "vllm", "llama.cpp"] = Field(
        "transformers", description="drop the variants that this runtime cannot load"
    )


class DataConfig(Section):
    """The text, and how many tokens each purpose gets. The splits share no document."""

    source: str = Field("python-docs", description="python-docs, a Hugging Face dataset, or a txt/jsonl/parquet file")
    subset: str | None = Field(None, description="the dataset's configuration name")
    split: str = Field("train", description="the dataset's split")
    text_column: str = Field("text", description="the column that holds the text")
    seq_length: int = Field(256, ge=8, description="tokens per packed sequence")
    calibration_tokens: int = Field(16_384, gt=0, description="for importance and closed forms")
    training_tokens: int = Field(131_072, gt=0, description="for local distillation and healing, read in order")
    scoring_tokens: int = Field(2_048, gt=0, description="for replacement scores")
    validation_tokens: int = Field(16_384, gt=0, description="for every figure in the report")


class BLDConfig(Section):
    """Blockwise local distillation."""

    tokens: int = Field(16_384, ge=0, description="training tokens each variant sees; 0 keeps the closed forms")
    batch_tokens: int = Field(1_024, gt=0, description="tokens per optimiser step")
    learning_rate: float = Field(1e-3, gt=0, description="peak of the cosine schedule (AdamW)")
    warmup: float = Field(0.05, ge=0, le=1, description="share of the steps")
    weight_decay: float = Field(0.0, ge=0)


class LibraryConfig(Section):
    """How variants get their weights."""

    importance: Literal["fisher", "contribution"] = Field("fisher", description="what ranks FFN channels")
    ridge: list[Annotated[float, Field(gt=0)]] = Field(
        [1e-4, 1e-3, 1e-2, 1e-1, 1.0],
        min_length=1,
        description="strengths tried for the closed forms, relative to the mean second moment",
    )
    bld: BLDConfig = BLDConfig()


class ScenarioConfig(Section):
    """The workload that costs are measured under."""

    batch: int = Field(1, gt=0, description="sequences at once")
    prompt: int = Field(128, gt=0, description="prompt tokens per sequence")
    generated: int = Field(128, gt=0, description="generated tokens per sequence")
    dtype: Dtype = Field("auto", description="weights and cache while serving; auto: compute_dtype")


class MeasureConfig(Section):
    """How latencies are measured."""

    warmup: int = Field(2, ge=0, description="rounds thrown away")
    repeats: int = Field(7, gt=0, description="rounds kept; the median counts")
    decode_steps: int = Field(8, gt=0, description="decode steps per round")
    front_checks: int = Field(5, ge=0, description="architectures of the front timed as wholes, to check the sums")


class ScoringConfig(Section):
    """Replacement scores."""

    method: Literal["auto", "exact", "fisher"] = Field(
        "auto", description="fisher: from gradients; auto: exact for those near the front"
    )
    samples: int = Field(4, ge=1, description="labels drawn per token for the gradient pass")


class SearchConfig(Section):
    """The mixed-integer program, and what follows it."""

    solver: Literal["highs", "cbc"] = "highs"
    time_limit: float = Field(60.0, gt=0, description="seconds per solve")
    points: int = Field(9, ge=2, description="points of the Pareto sweep")
    refine: int = Field(
        8, ge=0, description="rounds of scoring again around the child, at most; they end where they no longer help"
    )
    refine_seconds: float | None = Field(
        None, gt=0, description="no round starts after so many; the child then depends on the machine's speed"
    )
    radii: list[Annotated[int, Field(ge=1)]] = Field(
        [4, 8, 16], min_length=1, description="numbers of changes a round may make"
    )
    compare_tokens: int = Field(
        4_096, ge=0, description="held-out tokens that judge the front and simpler methods for the report; 0: none"
    )


class HealingConfig(Section):
    """Global knowledge distillation."""

    tokens: int = Field(131_072, ge=0, description="training tokens; 0 for no healing")
    batch_tokens: int = Field(1_024, gt=0, description="tokens per optimiser step")
    learning_rate: float = Field(3e-4, gt=0, description="peak of the cosine schedule (AdamW)")
    warmup: float = Field(0.05, ge=0, le=1, description="share of the steps")
    weight_decay: float = Field(0.0, ge=0)
    kl_weight: float = Field(1.0, ge=0, description="KL(parent || child) on the logits")
    cosine_weight: float = Field(1.0, ge=0, description="mean cosine distance of the layers' hidden states")
    lm_weight: float = Field(0.0, ge=0, description="next-token loss; the paper found that it hurts")
    temperature: float = Field(1.0, gt=0, description="of the KL loss")
    gradient_accumulation: int = Field(1, gt=0, description="parts a step is cut into, to save memory")
    gradient_checkpointing: bool = Field(False, description="compute activations again for the backward pass, likewise")
    evaluations: int = Field(4, gt=0, description="points of the held-out curve; a checkpoint is saved at each")
    patience: int | None = Field(
        None, gt=0, description="stop after so many evaluations without a better held-out KL; default: never"
    )
    report_to: Annotated[list[Tracker], BeforeValidator(_names, json_schema_input_type=Tracker | list[Tracker])] = (
        Field([], description="trackers that get the curve: tensorboard (in RUN/healing), wandb, trackio")
    )


class MachineConfig(Section):
    """How this machine does the work; nothing here changes the result beyond rounding."""

    threads: int | None = Field(None, gt=0, description="CPU threads; default: all cores, or OMP_NUM_THREADS")


class RunConfig(Section):
    """Everything a run needs. The file RUN/run.yaml holds it with the defaults filled in."""

    parent: str = Field(description="a Hugging Face folder or hub name")
    search_space: SearchSpace
    targets: list[Annotated[str, AfterValidator(_target)]] = Field(
        min_length=1, description="such as throughput>=1.5x, memory<=6GiB"
    )
    data: DataConfig = DataConfig()
    library: LibraryConfig = LibraryConfig()
    scenario: ScenarioConfig = ScenarioConfig()
    measure: MeasureConfig = MeasureConfig()
    scoring: ScoringConfig = ScoringConfig()
    search: SearchConfig = SearchConfig()
    healing: HealingConfig = HealingConfig()
    device: str = Field("auto", description="cpu, cuda, cuda:1; auto takes the first there is")
    compute_dtype: Dtype = Field(
        "auto", description="training arithmetic; auto: bfloat16 where the hardware has it. Judging is always float32"
    )
    sample_prompt: str = Field("The difference between a list and a tuple is", description="continued in the report")
    seed: int = Field(0, ge=0, lt=2**32)
    name: Annotated[str, AfterValidator(_child_name)] = Field(
        "child", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder name of the child"
    )
    machine: MachineConfig = MachineConfig()

    @model_validator(mode="after")
    def _enough_training_tokens(self) -> "RunConfig":
        if self.library.bld.tokens > self.data.training_tokens:
            raise ValueError(
                f"library.bld.tokens ({self.library.bld.tokens}) is more than data.training_tokens "
                f"({self.data.training_tokens})"
            )
        return self

    @property
    def workload(self) -> Scenario:
        """The scenario with `auto` resolved."""
        s = self.scenario
        dtype = self.compute_dtype if s.dtype == "auto" else s.dtype
        return Scenario(s.batch, s.prompt, s.generated, dtype, self.device)

    def recipe(self) -> dict[str, Any]:
        """What the result depends on."""
        return self.model_dump(mode="json", exclude={"machine": True, "healing": {"report_to"}})

    def identity(self) -> dict[str, Any]:
        """The recipe as fingerprints see it: a key that an older run does not know counts once it is set."""
        found = self.recipe()
        for section, keys in _LATER.items():
            defaults = type(getattr(self, section))().model_dump(mode="json")
            found[section] = {k: v for k, v in found[section].items() if k not in keys or v != defaults[k]}
        return found


class DeviceConfig(Section):
    """A device of the table that `puzzle plan` uses."""

    kind: Literal["cuda", "cpu"]
    flops: dict[Literal["float64", "float32", "bfloat16", "float16"], Annotated[float, Field(gt=0)]] = Field(
        description="peak FLOP/s by dtype; float32 and float64 at least"
    )
    bandwidth: float = Field(gt=0, description="bytes/s between memory and processor")
    memory: float = Field(gt=0, description="bytes")
    compute_efficiency: float = Field(0.4, gt=0, le=1, description="share of the peak that whole layers reach")
    memory_efficiency: float = Field(
        0.6, gt=0, le=1, description="share of the bandwidth that elementwise work reaches"
    )
    call_us: float = Field(150.0, ge=0, description="microseconds to start one subblock")
    source: str = Field("", description="where the figures come from")

    @model_validator(mode="after")
    def _peaks(self) -> "DeviceConfig":
        missing = [dtype for dtype in ("float32", "float64") if dtype not in self.flops]
        if missing:
            raise ValueError(f"flops lacks {missing[0]}, which every run computes in")
        return self


Model = TypeVar("Model", bound=Section)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({why})") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML ({getattr(error, 'problem', reason(error))})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping of keys to values is expected")
    return data


def validate(model: type[Model], data: dict[str, Any], source: str | Path) -> Model:
    """Turn YAML data into a config section.

    Raises:
        ConfigError: one sentence on the first thing that is wrong, with file, line and key.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{_place(source, first['loc'])}: {_complaint(model, first)}") from None


def _complaint(model: type[BaseModel], error: Any) -> str:
    key = str(error["loc"][-1]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{did_you_mean(key, _known_keys(model, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"the key {key!r} is missing"
    if error["type"] == "model_type":
        return f"a mapping of keys to values is expected (found {error['input']!r})"
    message: str = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message
    return f"{message[0].lower()}{message[1:]} (found {error['input']!r})"


def _known_keys(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [*get_args(annotation), annotation]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def _place(source: str | Path, loc: tuple[Any, ...]) -> str:
    """`file, line 7, data.seq_length`, the line only where the source is a file that has the key."""
    key = ".".join(str(part) for part in loc)
    line = None
    if isinstance(source, Path) and source.is_file():
        node = yaml.compose(source.read_text(encoding="utf-8"))
        for part in loc:
            if isinstance(node, yaml.MappingNode):
                found = [(k, v) for k, v in node.value if k.value == part]
                if not found:
                    break
                line, node = found[0][0].start_mark.line + 1, found[0][1]
            elif isinstance(node, yaml.SequenceNode) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
    return ", ".join(str(p) for p in (source, f"line {line}" if line else "", key) if p)


def search_space_schema() -> dict[str, Any]:
    """The JSON Schema of a search space's YAML, for editors."""
    schema = SearchSpace.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Puzzle search space"}


def load_search_space(path: Path) -> SearchSpace:
    return validate(SearchSpace, read_yaml(path), path)
