# SPDX-License-Identifier: Apache-2.0
"""What every kind of variant must keep, over the registry: a new kind is tested by adding its entries to ENTRIES."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_models import PARENTS, make_parent
from torch import Tensor, nn
from transformers import DynamicCache

from puzzle.architecture import (
    PARENT,
    SUBBLOCKS,
    AttentionConfig,
    BlockConfig,
    FFNConfig,
    ModelShape,
    Subblock,
    SubblockConfig,
    SubblockVariant,
    kv_values_per_token,
    subblock_params,
)
from puzzle.block_library import BlockLibrary, VariantRecord
from puzzle.checkpoint import Checkpoint, block_entry
from puzzle.depth import Depth, apply
from puzzle.errors import ConfigError
from puzzle.modeling import DeciLMConfig, DeciLMDecoderLayer, DeciLMForCausalLM
from puzzle.variants import KINDS, kind_of, subblock_config
from puzzle.variants.base import RUNTIMES, Moments, State, SubblockStats, VariantKind, ridge

# Entries of a search space that fit the tiny parents (4 heads, 2 KV heads, 96 FFN channels), and some that do not.
ENTRIES = {
    "grouped_query": {"kv1": "kv1", "kv/2": "kv1", "kv/8": "kv1", "kv2": PARENT, "kv/1": PARENT},
    "ffn_width": {"ffn24": "ffn24", "50%": "ffn48", "1%": "ffn8", "33.4%": "ffn32", "100%": PARENT, "ffn96": PARENT},
    "linear": {"linear": "linear"},
    "no_op": {"no_op": "no_op"},
}
MISFITS = {
    "grouped_query": {"kv4": "asks for 4 KV heads, the parent has 2", "kv0": "leaves no KV head"},
    "ffn_width": {
        "ffn97": "asks for 97 FFN channels, the parent has 96",
        "ffn0": "asks for 0 FFN channels",
        "0%": "'0%' is not a share",
        "101%": "'101%' is not a share",
    },
    "linear": {},
    "no_op": {},
}
LAST = {"attention": "o_proj", "ffn": "down_proj"}
PREFIX = {"attention": "self_attn.", "ffn": "mlp."}
CASES = [
    pytest.param(kind, subblock, name, id=f"{subblock}.{name}")
    for kind, entries in ENTRIES.items()
    for subblock in KINDS[kind].subblocks
    for name in sorted(set(entries.values()) - {PARENT})
]
WITH_WEIGHTS = [case for case in CASES if case.values[2] != "no_op"]
each_case = pytest.mark.parametrize(("kind", "subblock", "name"), CASES)
each_with_weights = pytest.mark.parametrize(("kind", "subblock", "name"), WITH_WEIGHTS)


@dataclass
class Layer:
    """One layer of a tiny parent with random normed inputs, and what initialisation gets to know of it."""

    checkpoint: Checkpoint
    module: DeciLMDecoderLayer
    x: Tensor  # [sequences, seq, hidden]
    context: dict

    def part(self, subblock: Subblock) -> nn.Module:
        return self.module.self_attn if subblock == "attention" else self.module.mlp

    def build(self, subblock: Subblock, config: SubblockConfig, state: State) -> nn.Module | None:
        return self.checkpoint.subblock(subblock, config, state, "cpu", torch.float32)

    def output(self, subblock: Subblock, module: nn.Module | None) -> Tensor:
        return apply(module, subblock, self.x, self.context)

    def moments(self, subblock: Subblock, module: nn.Module | None) -> Moments:
        """Of the last matrix's inputs (of the normed inputs without a module), against the parent's outputs."""
        parent, features = self.part(subblock), self.x
        target = self.output(subblock, parent)
        if module is not None:
            seen: list[Tensor] = []
            last = getattr(module, LAST[subblock])
            handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            self.output(subblock, module)
            handle.remove()
            features = seen[0]
            target = target if last.bias is None else target - last.bias
        f, y = features.flatten(0, 1).double(), target.flatten(0, 1).double()
        return Moments(f.T @ f, y.T @ f)

    def stats(self, subblock: Subblock) -> SubblockStats:
        width = self.checkpoint.shape.num_kv_heads if subblock == "attention" else 96
        return SubblockStats(
            inputs=self.moments(subblock, None),
            inner=self.moments(subblock, self.part(subblock)),
            importance=torch.rand(width, generator=torch.Generator().manual_seed(4), dtype=torch.float64),
            inner_of=lambda config, state: self.moments(subblock, self.build(subblock, config, state)),
        )

    def state(self, subblock: Subblock) -> State:
        return {k: v for k, v in self.module.state_dict().items() if k.startswith(PREFIX[subblock])}

    def starts(self, kind: VariantKind, subblock: Subblock, name: str) -> list[State]:
        return kind.starts(kind.config(name, subblock), self.state(subblock), self.stats(subblock))

    def error(self, subblock: Subblock, module: nn.Module | None) -> float:
        y = self.output(subblock, self.part(subblock))
        return float((self.output(subblock, module) - y).square().sum() / y.square().sum())


@pytest.fixture(scope="module", params=["plain", "biased", "head_dim"])
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layer:
    folder = make_parent(tmp_path_factory.mktemp(request.param), **PARENTS[request.param])
    checkpoint = Checkpoint(folder)
    x = torch.randn(8, 24, 64, generator=torch.Generator().manual_seed(2))
    return Layer(checkpoint, checkpoint.layer(1), x, Depth(checkpoint, "cpu").context(24))


@pytest.fixture(scope="module", params=PARENTS)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return Checkpoint(make_parent(tmp_path_factory.mktemp("p"), **PARENTS[request.param])).shape


SHAPE = ModelShape(3, 64, 4, 2, 16, 96, 257)


# --------------------------------------------------------------------------------------------------------------- names


def test_every_kind_has_entries() -> None:
    assert set(ENTRIES) == set(MISFITS) == set(KINDS), "add entries of the new kind here"
    for kind in KINDS.values():
        assert kind.subblocks and set(kind.subblocks) <= set(SUBBLOCKS)
        assert "transformers" in kind.runtimes and set(kind.runtimes) <= set(RUNTIMES)
        assert kind.source


@pytest.mark.parametrize("kind", KINDS)
def test_entries_expand_to_names(kind: str) -> None:
    for entry, name in ENTRIES[kind].items():
        assert KINDS[kind].expand(entry, SHAPE, 8) == name
        if name != PARENT:
            assert KINDS[kind].expand(name, SHAPE, 8) == name  # names are entries too


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_of_one_kind(kind: str) -> None:
    for other in set(KINDS) - {kind}:
        for entry in (*ENTRIES[kind], *MISFITS[kind]):
            if set(KINDS[other].subblocks) & set(KINDS[kind].subblocks):
                assert KINDS[other].expand(entry, SHAPE, 8) is None


@pytest.mark.parametrize("kind", KINDS)
def test_misfits_are_one_sentence(kind: str) -> None:
    for entry, words in MISFITS[kind].items():
        with pytest.raises(ConfigError) as caught:
            KINDS[kind].expand(entry, SHAPE, 8)
        assert words in str(caught.value) and repr(entry) in str(caught.value) and "\n" not in str(caught.value)


@each_case
def test_names_and_configs_round_trip(kind: str, subblock: Subblock, name: str) -> None:
    config = KINDS[kind].config(name, subblock)
    assert config is not None and config.name == name
    assert kind_of(name, subblock) is KINDS[kind]
    assert subblock_config(name, subblock, SHAPE) == config
    assert isinstance(config, AttentionConfig if subblock == "attention" else FFNConfig)


def test_names_of_no_kind() -> None:
    for name, subblock in (("kv2", "ffn"), ("ffn24", "attention"), ("lineaer", "ffn"), (PARENT, "ffn")):
        with pytest.raises(ConfigError, match=f"there is no {subblock} variant '{name}'"):
            kind_of(name, subblock)


# -------------------------------------------------------------------------------------------------------------- counts


def blocks_with(config: SubblockConfig, shape: ModelShape) -> dict:
    attention, ffn = AttentionConfig(shape.num_kv_heads), FFNConfig(shape.intermediate_size)
    is_attention = isinstance(config, AttentionConfig)
    return block_entry(BlockConfig(config, ffn) if is_attention else BlockConfig(attention, config), shape.num_heads)


def child_config(shape: ModelShape, blocks: list[dict]) -> DeciLMConfig:
    return DeciLMConfig(
        blocks,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=len(blocks),
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        attention_bias=shape.attention_output_bias,
        qkv_bias=shape.attention_bias,
        mlp_bias=shape.mlp_bias,
    )


@each_case
def test_counted_parameters_are_the_modules(kind: str, subblock: Subblock, name: str, shape: ModelShape) -> None:
    config = KINDS[kind].config(name, subblock)
    with torch.device("meta"):
        module = DeciLMForCausalLM(child_config(shape, [blocks_with(config, shape)])).model.layers[0]
    halves = (module.self_attn, getattr(module, "input_layernorm", None))
    if subblock == "ffn":
        halves = (module.mlp, getattr(module, "post_attention_layernorm", None))
    real = sum(p.numel() for half in halves if half is not None for p in half.parameters())
    assert subblock_params(config, shape) == real


@each_case
def test_counted_cache_is_the_real_one(kind: str, subblock: Subblock, name: str, shape: ModelShape) -> None:
    """One layer of this variant before a plain one: what a DynamicCache holds after some tokens."""
    config, plain = KINDS[kind].config(name, subblock), AttentionConfig(shape.num_kv_heads)
    blocks = [blocks_with(config, shape), blocks_with(plain, shape)]
    model = DeciLMForCausalLM(child_config(shape, blocks)).eval()
    batch, seq = 2, 5
    output = model(torch.zeros(batch, seq, dtype=torch.long), use_cache=True)
    cache: DynamicCache = getattr(output, "cache", None) or output.past_key_values
    filled = [entry for entry in cache.layers if entry.get_seq_length()]
    held = sum(tensor.numel() for entry in filled for tensor in (entry.keys, entry.values))
    attention = config if subblock == "attention" else plain
    assert held == batch * seq * sum(kv_values_per_token(c, shape) for c in (attention, plain))
    assert kv_values_per_token(FFNConfig(intermediate_size=96), shape) == 0


# ------------------------------------------------------------------------------------------------------------- weights


@each_with_weights
def test_starts_fit_and_come_from_the_parent(kind: str, subblock: Subblock, name: str, layer: Layer) -> None:
    config, parent = KINDS[kind].config(name, subblock), layer.state(subblock)
    before = {k: v.clone() for k, v in parent.items()}
    starts = layer.starts(KINDS[kind], subblock, name)
    assert starts
    for start in starts:
        module = layer.build(subblock, config, start)  # strict: just the names and shapes of the module
        assert {k.removeprefix(PREFIX[subblock]) for k in start} == set(module.state_dict())
        assert torch.isfinite(layer.output(subblock, module)).all()
        assert all(tensor.dtype == torch.float32 for tensor in start.values())
    assert all(torch.equal(parent[k], before[k]) for k in parent)


@each_with_weights
def test_starts_keep_the_parents_dtype(kind: str, subblock: Subblock, name: str, layer: Layer) -> None:
    parent = {k: v.bfloat16() for k, v in layer.state(subblock).items()}
    for start in KINDS[kind].starts(KINDS[kind].config(name, subblock), parent, layer.stats(subblock)):
        assert all(tensor.dtype == torch.bfloat16 for tensor in start.values())


@each_with_weights
def test_refits_help(kind: str, subblock: Subblock, name: str, layer: Layer) -> None:
    """Least squares is never worse than its start, nor, when weak, than zero, on the tokens it was fitted to."""
    config, stats = KINDS[kind].config(name, subblock), layer.stats(subblock)
    for start in layer.starts(KINDS[kind], subblock, name):
        refit = KINDS[kind].refit(config, start, stats)
        if refit is None:
            continue
        weight, moments = refit
        hidden, features = start[weight].shape
        assert moments.gram.shape == (features, features) and moments.cross.shape == (hidden, features)
        assert hidden == 64
        first = layer.error(subblock, layer.build(subblock, config, start))
        for strength in (1e-9, 1e-3, 1e-1):
            fitted = {**start, weight: ridge(start[weight], moments, strength)}
            error = layer.error(subblock, layer.build(subblock, config, fitted))
            assert error <= first * (1 + 1e-4), (strength, first, error)
            if strength == 1e-9 and not layer.checkpoint.shape.mlp_bias:
                assert error <= 1 + 1e-4


@each_with_weights
def test_gradients_reach_each_weight(kind: str, subblock: Subblock, name: str, layer: Layer) -> None:
    config = KINDS[kind].config(name, subblock)
    for start in layer.starts(KINDS[kind], subblock, name):
        module = layer.build(subblock, config, {k: v.clone() for k, v in start.items()}).requires_grad_(True)
        target = layer.output(subblock, layer.part(subblock))
        (layer.output(subblock, module) - target).square().sum().backward()
        for weight, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, weight


RECORD = VariantRecord("f", "kind", 0.5, 0.25, 0.125, 64, "distilled")


@each_with_weights
def test_saved_and_loaded_again(kind: str, subblock: Subblock, name: str, layer: Layer, tmp_path: Path) -> None:
    library, variant = BlockLibrary(tmp_path), SubblockVariant(1, subblock, name)
    config = KINDS[kind].config(name, subblock)
    for start in layer.starts(KINDS[kind], subblock, name):
        library.save(variant, start, RECORD)
        again = library.load(variant)
        assert set(again) == set(start)
        outputs = [layer.output(subblock, layer.build(subblock, config, state)) for state in (start, again)]
        assert torch.equal(*outputs)
        assert library.record(variant) == RECORD


@each_case
def test_a_child_with_the_variant_computes_it(kind: str, subblock: Subblock, name: str, layer: Layer) -> None:
    """The variant's tensors under their checkpoint names, in a whole child: the same logits as its module gives."""
    checkpoint, config = layer.checkpoint, KINDS[kind].config(name, subblock)
    state = layer.starts(KINDS[kind], subblock, name)[0]
    blocks = [checkpoint.parent_block] * 3
    halves = {"attention": blocks[1].attention, "ffn": blocks[1].ffn, subblock: config}
    blocks[1] = BlockConfig(**halves)
    model = DeciLMForCausalLM(checkpoint.child_config_with(blocks)).eval()
    tensors = {f"model.layers.{i}.{n}": t for i in range(3) for n, t in checkpoint.layer_state(i).items()}
    dropped = f"model.layers.1.{PREFIX[subblock]}"
    tensors = {n: t for n, t in tensors.items() if not n.startswith(dropped)}
    tensors |= {f"model.layers.1.{n}": t for n, t in state.items()}
    tensors |= {n: checkpoint.tensor(n) for n in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    if config.no_op:
        norm = "input_layernorm" if subblock == "attention" else "post_attention_layernorm"
        del tensors[f"model.layers.1.{norm}.weight"]
    model.load_state_dict(tensors)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    module = layer.build(subblock, config, state)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, walk_with(checkpoint, subblock, module, tokens))


def walk_with(checkpoint: Checkpoint, replaced: Subblock, module: nn.Module | None, tokens: Tensor) -> Tensor:
    """The parent's logits with one subblock of layer 1 replaced."""
    depth = Depth(checkpoint, "cpu")
    states, context = depth.embed(tokens), depth.context(tokens.shape[1])
    for i, layer in enumerate(depth.layers()):
        norms = {"attention": layer.input_layernorm, "ffn": layer.post_attention_layernorm}
        parts = {"attention": layer.self_attn, "ffn": layer.mlp} | ({replaced: module} if i == 1 else {})
        for subblock in SUBBLOCKS:
            states = states + apply(parts[subblock], subblock, norms[subblock](states), context)
    return depth.norm()(states) @ depth.head_weight().T
