# SPDX-License-Identifier: Apache-2.0
"""What each stage of a run needs, following what the code of that stage does. No torch.

Two things are not known before a run: how many exact scores the search asks for, and how many rounds of refinement
help. The constants below are what runs of SmolLM2-135M came to; everything else is counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from puzzle.architecture import (
    PARENT,
    SUBBLOCKS,
    BlockConfig,
    ModelShape,
    Subblock,
    SubblockConfig,
    SubblockVariant,
    outer_params,
    subblock_params,
)
from puzzle.config import RunConfig
from puzzle.devices import BYTES
from puzzle.plan.devices import Device
from puzzle.plan.work import Work, causal, distillation_flops, forward_flops, head_flops, last_features, matrix_weights
from puzzle.variants import subblock_config

# Not known before: of the scores of single changes.
EXACT_SWEEPS, EXACT_A_PLACE = 5, 1.0  # sweeps until all that is chosen is exact, and exact scores per subblock
ROUNDS = 3  # of refinement, where the config allows as many
ROUND_SWEEPS, ROUND_EXACT = 4, 1.5  # per radius: sweeps, and exact scores per change that the radius allows
BASELINES = 8  # architectures of simpler methods that the report compares

# Bytes of float32 (and bfloat16) logits that are read and written per logit, from the passes that the code makes.
REFERENCE_BYTES = 20  # log-softmax, arg max
COMPARE_BYTES = 52  # log-softmax, arg max, exp, difference, product, sum
SAMPLE_BYTES = 52  # log-softmax, exp, cumulative sum, and the gradient of the log-softmax
GRADIENT_BYTES = 48  # two softmaxes, labels drawn
HEALING_BYTES = 140  # casts, log-softmax of both models and KL, twice (the chunks are checkpointed), and backwards
OPTIMISER_BYTES = 40  # per weight and step: AdamW reads four and writes three numbers; gradient norms and casts

# Fixed by the code of the stages.
FITTED, HELD_OUT = 0.8, 0.2  # of the calibration tokens
BLD_JUDGEMENTS = 2
IMPORTANCE_TOKENS, LOGIT_TOKENS, JUDGED_TOKENS = 1_024, 256, 1_024  # at a time
SAMPLE_TOKENS = 64
STACK_BYTES = 2**30
REPORT_BYTES = 3_000_000  # the page with its plotting library
PROCESS_BYTES = 500_000_000  # Python and torch, in the memory of a CPU


@dataclass(frozen=True)
class StageEstimate:
    """What one stage needs."""

    stage: str
    tokens: int  # of text that it reads
    disk_bytes: int = 0  # that it leaves in the run directory
    temporary_bytes: int = 0  # on disk while it runs
    peak_bytes: int = 0  # of the device's memory
    work: tuple[Work, ...] = ()

    @property
    def flops(self) -> float:
        return sum(w.flops for w in self.work)

    def seconds(self, device: Device) -> float:
        return sum(w.seconds(device) for w in self.work)


@dataclass(frozen=True)
class Setting:
    """What the stages' needs depend on. `dtype` is that of training, `stored` that of the checkpoint's weights."""

    config: RunConfig  # with `compute_dtype` resolved
    shape: ModelShape
    stored: str
    variants: tuple[SubblockVariant, ...]
    child: tuple[BlockConfig, ...]  # a child that meets the targets
    front: int  # architectures that the report compares, without the simpler methods'

    @property
    def dtype(self) -> str:
        return self.config.compute_dtype

    @property
    def seq(self) -> int:
        return self.config.data.seq_length

    @cached_property
    def parent(self) -> tuple[BlockConfig, ...]:
        one = BlockConfig(*(self._config(PARENT, s) for s in SUBBLOCKS))  # type: ignore[arg-type]
        return (one,) * self.shape.num_layers

    @cached_property
    def trained(self) -> tuple[tuple[SubblockVariant, SubblockConfig], ...]:
        """The variants that have weights of their own."""
        return tuple((v, self._config(v.name, v.subblock)) for v in self.variants if v.name not in (PARENT, "no_op"))

    @property
    def changes(self) -> list[SubblockVariant]:
        return [v for v in self.variants if v.name != PARENT]

    @property
    def places(self) -> int:
        return 2 * self.shape.num_layers

    def _config(self, name: str, subblock: Subblock) -> SubblockConfig:
        return subblock_config(name, subblock, self.shape)

    def forward(self, blocks: Sequence[BlockConfig], tokens: float) -> float:
        """FLOPs of layers, without the head."""
        return sum(self.half(half, tokens) for block in blocks for half in (block.attention, block.ffn))

    def half(self, config: SubblockConfig, tokens: float) -> float:
        return forward_flops(config, self.shape, tokens, causal(self.seq))

    def head(self, tokens: float) -> float:
        return head_flops(self.shape, tokens)

    def logits(self, tokens: float) -> float:
        return tokens * self.shape.vocab_size

    def params(self, blocks: Sequence[BlockConfig]) -> int:
        """Of a whole model."""
        halves = (half for block in blocks for half in (block.attention, block.ffn))
        return outer_params(self.shape) + sum(subblock_params(half, self.shape) for half in halves)

    def read(self, tokens: int) -> int:
        """Tokens in whole sequences."""
        return max(1, tokens // self.seq) * self.seq

    def resident(self, device_bytes: float) -> int:
        """Peak memory, with the process itself where device and host are one."""
        return round(device_bytes + (PROCESS_BYTES if self.config.device == "cpu" else 0))


def estimate(setting: Setting) -> list[StageEstimate]:
    """Every stage that takes time or disk, in the order of a run."""
    stages: tuple[Callable[[Setting], StageEstimate], ...] = (
        data, costs, library, scores, refine, compare, assemble, heal, evaluate, report,
    )  # fmt: skip
    return [stage(setting) for stage in stages]


# ------------------------------------------------------------------------------------------------ before the library


def data(s: Setting) -> StageEstimate:
    """Tokenised text, compressed to about the bits that a token's number needs."""
    config = s.config.data
    splits = (config.calibration_tokens, config.training_tokens, config.scoring_tokens, config.validation_tokens)
    tokens = sum(s.read(n) for n in splits)
    return StageEstimate("data", tokens, disk_bytes=round(tokens * math.log2(s.shape.vocab_size) / 8))


def costs(s: Setting) -> StageEstimate:
    """Stacks of each distinct variant, timed in turns; see `puzzle.scoring.latency`."""
    distinct = {(v.subblock, v.name) for v in s.variants if v.name != "no_op"}
    configs = [subblock_config(name, subblock, s.shape) for subblock, name in sorted(distinct)]
    size = BYTES[s.config.workload.dtype]
    layers = max(1, min(s.shape.num_layers, STACK_BYTES // max(1, size * _layer_params(s))))
    stacks = [(config,) * layers for config in configs] + [tuple(_halves(s.parent[:layers])), ()]
    held = size * (outer_params(s.shape) + sum(subblock_params(c, s.shape) for stack in stacks for c in stack))
    return StageEstimate("costs", 0, peak_bytes=s.resident(held), work=_timing(s, stacks))


def _layer_params(s: Setting) -> int:
    return sum(subblock_params(half, s.shape) for half in _halves(s.parent[:1]))


def _halves(blocks: Iterable[BlockConfig]) -> list[SubblockConfig]:
    return [half for block in blocks for half in (block.attention, block.ffn)]


def _timing(s: Setting, models: Sequence[Sequence[SubblockConfig]]) -> tuple[Work, ...]:
    """Rounds of a prefill and of decode steps, of models given as the subblocks they consist of."""
    scenario, measure = s.config.workload, s.config.measure
    rounds = measure.warmup + measure.repeats
    steps, prompt = rounds * measure.decode_steps, scenario.batch * scenario.prompt
    weights = sum(matrix_weights(half, s.shape) for model in models for half in model)
    head = len(models) * s.shape.hidden_size * s.shape.vocab_size
    halves = sum(len(model) for model in models)
    first = sum(forward_flops(half, s.shape, prompt, causal(scenario.prompt)) for model in models for half in model)
    read = BYTES[scenario.dtype] * (weights + head)
    return (
        Work("prefill", scenario.dtype, rounds * first, rounds * read, rounds * halves),
        Work("decode", scenario.dtype, 2 * steps * scenario.batch * (weights + head), steps * read, steps * halves),
    )


# -------------------------------------------------------------------------------------------------------- the library


def library(s: Setting) -> StageEstimate:
    """Importance, moments, closed forms, and distillation of all variants on the parent's activations."""
    bld = s.config.library.bld
    if not s.trained:
        return StageEstimate("library", 0)
    calibration, training = s.read(s.config.data.calibration_tokens), math.ceil(bld.tokens / s.seq) * s.seq
    work = (_importance(s, calibration), *_walk(s, calibration, training), *_closed_forms(s, calibration))
    work += (_distillation(s, training), _judging(s, calibration)) if training else (_judging(s, calibration),)
    size, norms = BYTES[s.stored], s.shape.hidden_size
    weights = size * sum(subblock_params(config, s.shape) - norms for _, config in s.trained)
    sums = 8 * s.shape.num_layers * (s.shape.intermediate_size + s.shape.num_kv_heads)
    peak = s.resident(max(_importance_bytes(s), _library_bytes(s, calibration, training)))
    return StageEstimate("library", calibration + training, weights + sums, 0, peak, work)


def _importance(s: Setting, tokens: int) -> Work:
    """A forward pass; for `fisher` also gradients of all inputs, which are as many FLOPs, through the head as well."""
    layers = s.forward(s.parent, tokens)
    passes = tokens / IMPORTANCE_TOKENS
    if s.config.library.importance != "fisher":
        return Work("importance", s.dtype, layers, calls=passes * s.places)
    flops = 2 * (layers + s.head(tokens))
    return Work("importance", s.dtype, flops, s.logits(tokens) * SAMPLE_BYTES, 2 * passes * s.places)


def _walk(s: Setting, calibration: int, training: int) -> tuple[Work, Work]:
    """Each layer runs twice on either text: for its subblocks' outputs, and for the next layer's input."""
    judged = 2 * s.forward(s.parent, calibration)
    return (
        Work("walk", "float32", judged),
        Work("walk, training", s.dtype, 2 * s.forward(s.parent, training)),
    )


def _closed_forms(s: Setting, calibration: int) -> tuple[Work, Work]:
    """Second moments in float32, least squares of each start and ridge strength in float64."""
    fit, hidden, moments, solving = FITTED * calibration, s.shape.hidden_size, 0.0, 0.0
    for _, subblock in sorted({(v.layer, v.subblock) for v, _ in s.trained}):
        config = subblock_config(PARENT, subblock, s.shape)
        moments += (
            s.half(config, fit) + _moments(fit, hidden, hidden) + _moments(fit, last_features(config, s.shape), hidden)
        )
    for variant, config in s.trained:
        n = last_features(config, s.shape)
        if variant.subblock == "attention" and not config.linear:  # moments of its own attention's output
            moments += _starts(variant, config) * (s.half(config, fit) + _moments(fit, n, hidden))
        once = 2.0 * hidden * n * n + n**3 / 3 + 2.0 * n * n * hidden  # residual, Cholesky factor, two triangles
        solving += _starts(variant, config) * len(s.config.library.ridge) * once
    return Work("moments", "float32", moments), Work("closed forms", "float64", solving)


def _moments(tokens: float, features: int, hidden: int) -> float:
    return 2 * tokens * features * (features + hidden)


def _starts(variant: SubblockVariant, config: SubblockConfig) -> int:
    """First weights to choose from: pooled and chosen heads, product and zero; the kept channels alone."""
    return 2 if config.linear or variant.subblock == "attention" else 1


def _judging(s: Setting, calibration: int) -> Work:
    """Held-out errors: of each start, of each refit, and while training, in float32."""
    trained = BLD_JUDGEMENTS if s.config.library.bld.tokens else 0
    flops = 0.0
    for variant, config in s.trained:
        times = _starts(variant, config) * (1 + len(s.config.library.ridge)) + trained
        flops += times * s.half(config, HELD_OUT * calibration)
    return Work("judging", "float32", flops)


def _distillation(s: Setting, training: int) -> Work:
    steps = math.ceil(training / max(s.seq, s.config.library.bld.batch_tokens // s.seq * s.seq))
    flops = sum(distillation_flops(config, s.shape, training, causal(s.seq)) for _, config in s.trained)
    weights = sum(subblock_params(config, s.shape) for _, config in s.trained)
    return Work("distillation", s.dtype, flops, steps * weights * OPTIMISER_BYTES, 3 * steps * len(s.trained))


def _importance_bytes(s: Setting) -> float:
    graph = 0 if s.config.library.importance != "fisher" else _graph(s, s.parent, IMPORTANCE_TOKENS)
    return 4 * s.params(s.parent) + graph + 5 * 4 * s.logits(LOGIT_TOKENS)


def _graph(s: Setting, blocks: Sequence[BlockConfig], tokens: int) -> float:
    """What autograd keeps of layers until the backward pass: per half the input, the normed input, and inner values."""
    size = BYTES[s.dtype]
    per_token = 0
    for half in _halves(blocks):
        if not half.no_op:
            inner = 4 * last_features(half, s.shape)  # gate, its activation, up, product; queries, keys, values, output
            per_token += s.shape.hidden_size * (4 + 4 + size) + inner * size
    return float(tokens * per_token)


def _library_bytes(s: Setting, calibration: int, training: int) -> float:
    """One layer in float32, the states of both texts, inputs and outputs of its halves, moments, and its trainees."""
    hidden, widest = s.shape.hidden_size, max(s.shape.intermediate_size, s.shape.num_heads * s.shape.head_dim)
    states = 4 * hidden * (5 * calibration + training)
    inner = 4 * 3 * widest * FITTED * calibration
    moments = 8 * (5 * widest * widest + 2 * hidden * widest)
    by_layer: dict[int, int] = {}
    for variant, config in s.trained:
        by_layer[variant.layer] = by_layer.get(variant.layer, 0) + subblock_params(config, s.shape)
    trainees = 24 * max(by_layer.values())  # first, present and best weights, gradient, two moments, in float32
    return 4 * _layer_params(s) + states + max(inner + moments, trainees)


# ------------------------------------------------------------------------------------------------- scores and search


def _exact(
    s: Setting, what: str, count: float, sweeps: float, tokens: int, around: Sequence[BlockConfig]
) -> tuple[Work, Work]:
    """Exact scores of changes of a model. A change travels half of the depth on average; each ends at the head."""
    model = s.forward(around, tokens)
    layers = Work(what, "float32", sweeps * model + count * model / 2)
    heads = (2 * sweeps + count) * s.head(tokens)
    return layers, _comparison(s, f"{what}, compared", heads, tokens, sweeps, sweeps + count)


def _comparison(s: Setting, what: str, flops: float, tokens: float, references: float, models: float) -> Work:
    moved = s.logits(tokens) * (references * REFERENCE_BYTES + models * COMPARE_BYTES)
    return Work(what, "float32", flops, moved)


def _gradients(s: Setting, tokens: int, around: Sequence[BlockConfig]) -> tuple[Work, Work]:
    """The gradient pass: forwards twice, once more to be differentiated, backwards per gradient; all variants once."""
    gradients = 1 + s.config.scoring.samples
    model = s.forward(around, tokens)
    variants = sum(s.half(subblock_config(v.name, v.subblock, s.shape), tokens) for v in s.variants)
    head = Work("gradient scores, head", "float32", 4 * s.head(tokens), s.logits(tokens) * GRADIENT_BYTES)
    return Work("gradient scores", "float32", (3 + gradients) * model + variants), head


def _scoring_bytes(s: Setting, tokens: int, carried: float) -> int:
    """A layer and the head in float32, states of all depths and of what is carried, gradients, a few logits."""
    gradients = 2 * (1 + s.config.scoring.samples)
    states = 4 * s.shape.hidden_size * tokens * (s.shape.num_layers + 2 + carried + gradients)
    head = 4 * s.shape.hidden_size * s.shape.vocab_size
    return s.resident(4 * _layer_params(s) + head + states + 6 * 4 * s.logits(LOGIT_TOKENS))


def scores(s: Setting) -> StageEstimate:
    """Gradient scores of all variants, exact ones as the method has it."""
    tokens, method, changes = s.read(s.config.data.scoring_tokens), s.config.scoring.method, len(s.changes)
    parent = Work("parent", "float32", s.forward(s.parent, tokens))
    if method == "exact":
        count, sweeps, work = float(changes), 1.0, (parent,)
    else:
        auto = method == "auto"
        count = min(changes, EXACT_A_PLACE * s.places) if auto else 0.0
        sweeps = (EXACT_SWEEPS if auto else 0) + 1.0  # the parent's own row is one
        work = (parent, *_gradients(s, tokens, s.parent))
    work += _exact(s, "exact scores", count, sweeps, tokens, s.parent)
    return StageEstimate("scores", tokens, peak_bytes=_scoring_bytes(s, tokens, count / sweeps), work=work)


def rounds(s: Setting) -> int:
    """Of refinement, as expected."""
    return min(s.config.search.refine, ROUNDS)


def refine(s: Setting) -> StageEstimate:
    """Per round gradient scores around the child, exact ones within each radius, and the true score of each trial."""
    tokens, radii, n = s.read(s.config.data.scoring_tokens), s.config.search.radii, rounds(s)
    if not n:
        return StageEstimate("refine", 0)
    allowed = sum(min(r, s.places) for r in radii)
    start = Work("parent and child", "float32", s.forward((*s.parent, *s.child), tokens))
    sweeps = len(radii) * (ROUND_SWEEPS + 1)  # the true score of a trial is one more
    each = (*_gradients(s, tokens, s.child), *_exact(s, "exact scores", ROUND_EXACT * allowed, sweeps, tokens, s.child))
    peak = _scoring_bytes(s, tokens, max(radii))
    return StageEstimate("refine", tokens, peak_bytes=peak, work=(start, *(work for _ in range(n) for work in each)))


def compare(s: Setting) -> StageEstimate:
    """The front and what simpler methods find, judged as wholes; they are about as large as the child."""
    if not s.config.search.compare_tokens:
        return StageEstimate("compare", 0)
    tokens = s.read(min(s.config.search.compare_tokens, s.config.data.validation_tokens))
    judged = s.front + BASELINES
    layers = Work("models", "float32", 2 * s.forward(s.parent, tokens) + judged * s.forward(s.child, tokens))
    heads = _comparison(s, "compared", (1 + judged) * s.head(tokens), tokens, 1, judged)
    return StageEstimate("compare", tokens, peak_bytes=_scoring_bytes(s, tokens, judged), work=(layers, heads))


# ---------------------------------------------------------------------------------------------------------- the child


def assemble(s: Setting) -> StageEstimate:
    """The child's files, not yet healed; written from mapped files, a shard in memory."""
    return StageEstimate("assemble", 0, disk_bytes=BYTES[s.stored] * s.params(s.child))


def heal(s: Setting) -> StageEstimate:
    """Distillation of the whole child; and its held-out judgements, in float32."""
    config, child = s.config.healing, s.params(s.child)
    files = BYTES[s.stored] * child
    if not config.tokens:
        return StageEstimate("heal", 0, disk_bytes=files)
    batch = max(s.seq, config.batch_tokens // s.seq * s.seq)
    steps = math.ceil(config.tokens / batch)
    tokens, held = steps * batch, s.read(s.config.data.scoring_tokens)
    own = s.forward(s.child, tokens)
    again = own if config.gradient_checkpointing else 0.0
    # the chunks of logits are computed twice, the child's alone are differentiated, by weights and by inputs
    heads = (2 * 2 + 2) * s.head(tokens)
    judgements = config.evaluations + 1
    judged = s.forward(s.parent, held) + judgements * s.forward(s.child, held) + 2 * judgements * s.head(held)
    work = (
        Work("parent", s.dtype, s.forward(s.parent, tokens), calls=steps * s.places),
        Work("child", s.dtype, 3 * own + again, calls=3 * steps * s.places),
        Work("heads", s.dtype, heads, s.logits(tokens) * HEALING_BYTES),
        Work("optimiser", "float32", bytes=steps * child * OPTIMISER_BYTES),
        Work("judging", "float32", judged, s.logits(held) * judgements * (REFERENCE_BYTES + COMPARE_BYTES)),
    )
    checkpoints = min(2, config.evaluations) * 12 * child  # float32 weights and two moments
    return StageEstimate("heal", tokens, files, checkpoints, _healing_bytes(s, batch), work)


def _healing_bytes(s: Setting, batch: int) -> int:
    config, child, parent = s.config.healing, s.params(s.child), s.params(s.parent)
    micro = batch // config.gradient_accumulation
    graph = _graph(s, s.child[:1] if config.gradient_checkpointing else s.child, micro)
    states = 4 * s.shape.hidden_size * micro * 2 * s.shape.num_layers  # of both models, for the cosine distance
    training = 16 * child + BYTES[s.dtype] * parent + graph + states + 6 * 4 * s.logits(2 * LOGIT_TOKENS)
    return s.resident(max(training, 4 * (child + parent)))


def evaluate(s: Setting) -> StageEstimate:
    """Parent, child and unhealed child in float32: judged, continued, timed with some of the front."""
    tokens = s.read(s.config.data.validation_tokens)
    models = (s.parent, s.child, s.child)
    layers = sum(s.forward(model, tokens) for model in models)
    params = sum(s.params(model) for model in models)
    checked = min(s.config.measure.front_checks, s.front)
    timed = [_halves(model) for model in (*models, *(s.child,) * checked)]
    halves = sum(len(_halves(model)) for model in models)
    work = (
        Work("models", "float32", layers),
        _comparison(s, "compared", 3 * s.head(tokens), tokens, 1, 3),
        Work("samples", "float32", 2.0 * SAMPLE_TOKENS * params, 4.0 * SAMPLE_TOKENS * params, SAMPLE_TOKENS * halves),
        *_timing(s, timed),
    )
    stacks = checked * BYTES[s.config.workload.dtype] * s.params(s.child)
    peak = 4 * params + max(stacks, 4 * 4 * s.logits(JUDGED_TOKENS))
    return StageEstimate("evaluate", tokens, peak_bytes=s.resident(peak), work=work)


def report(s: Setting) -> StageEstimate:
    return StageEstimate("report", 0, disk_bytes=REPORT_BYTES)
