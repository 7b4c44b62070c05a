# SPDX-License-Identifier: Apache-2.0
"""The child's modelling code: to the bit transformers' Llama where nothing is replaced, right where something is."""

import copy
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from references import naive_child
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaModel

import puzzle.modeling
from puzzle.checkpoint import Checkpoint
from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM, DeciLMModel

CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
KV1, KV2, KV4 = ({"n_heads_in_group": 4 // heads} for heads in (1, 2, 4))
NO_OP, LINEAR, PARENT = {"no_op": True}, {"replace_with_linear": True}, {}
WIDE, NARROW = {"intermediate_size": 96}, {"intermediate_size": 24}
CHILDREN = {  # (attention, ffn) per layer
    "mixed": [(KV1, NARROW), (NO_OP, PARENT), (KV4, NO_OP), (LINEAR, LINEAR), (PARENT, WIDE)],
    "no attention in layer 0": [(NO_OP, NARROW), (KV1, PARENT), (PARENT, LINEAR)],
    "linear in layer 0": [(LINEAR, NO_OP), (KV2, NARROW), (NO_OP, PARENT)],
    "attention in the last layer alone": [(NO_OP, PARENT), (LINEAR, PARENT), (KV1, PARENT)],
    "an empty layer": [(KV2, PARENT), (NO_OP, NO_OP), (KV1, PARENT)],
    "no attention at all": [(NO_OP, PARENT), (LINEAR, NARROW), (NO_OP, LINEAR)],
    "no ffn at all": [(KV1, NO_OP), (KV2, NO_OP)],
}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 100,
    "eos_token_id": None,
    "pad_token_id": 100,
}


def make_child(name: str, **settings: object) -> DeciLMForCausalLM:
    """A child with random weights, its norms and biases too."""
    torch.manual_seed(3)
    blocks = [{"attention": attention, "ffn": ffn} for attention, ffn in CHILDREN[name]]
    model = DeciLMForCausalLM(DeciLMConfig(blocks, num_hidden_layers=len(blocks), **{**SIZES, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module", params=CHILDREN)
def child(request: pytest.FixtureRequest) -> DeciLMForCausalLM:
    return make_child(request.param)


@pytest.fixture
def prompt() -> Tensor:
    return torch.randint(100, (3, 7), generator=torch.Generator().manual_seed(5))


def generate(model: DeciLMForCausalLM, prompt: Tensor, **options: object) -> Tensor:
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt), **options}
    return model.generate(prompt, **settings)


def step_by_step(model: DeciLMForCausalLM, prompt: Tensor, steps: int) -> Tensor:
    """Greedy decoding by the definition: the whole text again for each token."""
    for _ in range(steps):
        prompt = torch.cat([prompt, model(prompt, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return prompt


# ------------------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_unchanged_child_is_the_parent_to_the_bit(any_parent: Path, attention: str, tokens: Tensor) -> None:
    parent = AutoModelForCausalLM.from_pretrained(any_parent, attn_implementation=attention, dtype=torch.float32)
    config = copy.deepcopy(Checkpoint(any_parent).child_config)
    config._attn_implementation = attention
    child = DeciLMForCausalLM(config)
    child.load_state_dict(parent.state_dict())
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[1, :1] = 0
    for options in ({}, {"attention_mask": mask}, {"use_cache": False}):
        wanted = parent(tokens, labels=tokens, output_hidden_states=True, **options)
        found = child(tokens, labels=tokens, output_hidden_states=True, **options)
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.loss, wanted.loss)
        assert len(found.hidden_states) == len(wanted.hidden_states) == 4
        assert all(map(torch.equal, found.hidden_states, wanted.hidden_states))
    if attention == "eager":
        pairs = [model(tokens, output_attentions=True).attentions for model in (child, parent)]
        assert all(map(torch.equal, *pairs)) and len(pairs[0]) == 3
    wanted.loss.backward()
    found.loss.backward()
    gradients = dict(parent.named_parameters())
    assert all(torch.equal(p.grad, gradients[name].grad) for name, p in child.named_parameters())
    assert torch.equal(*(generate(model, tokens[:2, :9]) for model in (child.eval(), parent.eval())))


@pytest.mark.parametrize("first", ["sdpa", "eager"])
def test_the_attention_can_be_switched(first: str, prompt: Tensor) -> None:
    """Masks and layers must switch together: eager attention on sdpa's missing mask would look into the future."""
    model = make_child("mixed", attn_implementation=first)
    wanted = model(prompt).logits
    model.set_attn_implementation("eager" if first == "sdpa" else "sdpa")
    found = model(prompt).logits
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- heterogeneous


def test_logits_of_naive_loops(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    wanted = torch.stack([naive_child.logits(child.state_dict(), child.config, row) for row in prompt])
    torch.testing.assert_close(child.double()(prompt).logits, wanted, rtol=0, atol=1e-4)  # rotary angles are float32
    torch.testing.assert_close(child.float()(prompt).logits, wanted.float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 12}, {"tie_word_embeddings": True}],
    ids=lambda s: next(iter(s)),
)
def test_logits_of_naive_loops_for_other_families(settings: dict, prompt: Tensor) -> None:
    model = make_child("mixed", **settings)
    wanted = naive_child.logits(model.state_dict(), model.config, prompt[0])
    torch.testing.assert_close(model(prompt[:1]).logits[0], wanted.float(), rtol=0, atol=1e-3)


def test_generation_with_and_without_cache(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    wanted = step_by_step(child, prompt, 8)
    assert torch.equal(generate(child, prompt, use_cache=True), wanted)
    assert torch.equal(generate(child, prompt, use_cache=False), wanted)


def test_logits_with_cache(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    """Prefill in two parts and single tokens after them give the logits of one pass."""
    cache = DynamicCache(config=child.config)
    parts = [child(part, use_cache=True, **{CACHE: cache}).logits for part in prompt.split([3, 2, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), child(prompt, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_static_cache(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    assert torch.equal(generate(child, prompt, cache_implementation="static"), step_by_step(child, prompt, 8))


def test_left_padding(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    """Rows of other lengths in one batch continue as they do alone."""
    lengths = (7, 4, 2)
    batch, mask = prompt.clone(), torch.ones_like(prompt)
    for row, length in enumerate(lengths):
        batch[row, : 7 - length], mask[row, : 7 - length] = 100, 0
    found = generate(child, batch, attention_mask=mask)[:, 7:]
    for row, length in enumerate(lengths):
        assert torch.equal(found[row], generate(child, prompt[row : row + 1, 7 - length :])[0, length:])


def test_beam_search(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    found = [generate(child, prompt, num_beams=3, use_cache=cached, max_new_tokens=5) for cached in (True, False)]
    assert torch.equal(*found)


def test_only_attention_takes_cache(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    cache = DynamicCache(config=child.config)
    child(prompt, use_cache=True, **{CACHE: cache})
    attending = [block["attention"] for block in child.config.block_configs]
    attending = [entry for entry in attending if not (entry.get("no_op") or entry.get("replace_with_linear"))]
    filled = [layer.keys for layer in cache.layers if layer.get_seq_length()]
    heads = [4 // entry["n_heads_in_group"] if entry else 2 for entry in attending]
    assert [keys.shape for keys in filled] == [(3, n, 7, 8) for n in heads]


def test_gradient_checkpointing_gives_the_same_gradients(child: DeciLMForCausalLM, prompt: Tensor) -> None:
    model = copy.deepcopy(child).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(prompt, labels=prompt, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0].values())


def test_saved_and_loaded_again(child: DeciLMForCausalLM, prompt: Tensor, tmp_path: Path) -> None:
    child.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["block_configs"] == child.config.block_configs
    for model_class in (DeciLMForCausalLM, AutoModelForCausalLM):
        again = model_class.from_pretrained(tmp_path, dtype=torch.float32)
        assert again.config.block_configs == child.config.block_configs
        assert torch.equal(again(prompt).logits, child(prompt).logits)
    body = DeciLMModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(child.lm_head(body(prompt).last_hidden_state), child(prompt).logits)


def test_tied_weights_stay_tied(prompt: Tensor, tmp_path: Path) -> None:
    model = make_child("mixed", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = DeciLMForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again(prompt).logits, model(prompt).logits)


def test_no_weights_for_what_is_left_out() -> None:
    names = set(make_child("mixed").state_dict())
    assert not [n for n in names if n.startswith(("model.layers.1.self_attn", "model.layers.1.input_layernorm"))]
    assert not [n for n in names if n.startswith(("model.layers.2.mlp", "model.layers.2.post_attention_layernorm"))]
    assert {"model.layers.3.self_attn.linear_attn.weight", "model.layers.3.mlp.linear_mlp.weight"} <= names


def test_bfloat16_computes_close_to_float32(prompt: Tensor) -> None:
    model = make_child("mixed")
    wanted = model(prompt).logits
    found = copy.deepcopy(model).bfloat16()(prompt).logits
    assert found.dtype == torch.bfloat16
    assert 0 < (found.float() - wanted).norm() / wanted.norm() < 0.05


def test_configs_that_make_no_model() -> None:
    with pytest.raises(ValueError, match="1 block_configs for 3 layers"):
        DeciLMConfig([{"attention": {}, "ffn": {}}], num_hidden_layers=3)
    with pytest.raises(ValueError, match="window_length"):
        DeciLMConfig([{"attention": {"window_length": 8}, "ffn": {}}], num_hidden_layers=1)


@pytest.mark.slow
def test_compiled(prompt: Tensor) -> None:
    child = make_child("mixed")
    wanted = child(prompt, use_cache=False).logits
    torch.testing.assert_close(torch.compile(child)(prompt, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)


WITHOUT_PUZZLE = """
import sys, torch
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "puzzle":
            raise ImportError("puzzle is not installed here")
sys.meta_path.insert(0, Blocker())
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
folder, exchange = sys.argv[1:]
try:
    AutoConfig.from_pretrained(folder, trust_remote_code=False)
    raise SystemExit("the config loaded without remote code")
except ValueError:
    pass
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
prompt = load_file(exchange)["prompt"]
result = {"logits": model(prompt).logits, "tokens": model.generate(prompt, max_new_tokens=8, do_sample=False)}
save_file({name: tensor.detach() for name, tensor in result.items()}, exchange)
assert not any(name.split(".")[0] == "puzzle" for name in sys.modules)
"""


def test_remote_code_without_puzzle(prompt: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, exchange = make_child("mixed"), tmp_path / "child", tmp_path / "exchange.safetensors"
    model.config.architectures = ["DeciLMForCausalLM"]
    model.config.auto_map = {
        "AutoConfig": "modeling.DeciLMConfig",
        "AutoModelForCausalLM": "modeling.DeciLMForCausalLM",
    }
    model.save_pretrained(folder)
    shutil.copyfile(puzzle.modeling.__file__, folder / "modeling.py")
    save_file({"prompt": prompt}, exchange)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    command = [sys.executable, "-I", "-c", WITHOUT_PUZZLE, folder, exchange]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = load_file(exchange)
    assert torch.equal(found["logits"], model(prompt).logits)
    assert torch.equal(found["tokens"], generate(model, prompt))
