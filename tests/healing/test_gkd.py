# SPDX-License-Identifier: Apache-2.0
"""Healing of a tiny child: against a loop written by hand, broken and resumed, with bad luck, and in two processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from healing_runs import BATCH, CONFIG, POINTS, SEQ, Stop, curve, run, same_files, stop_at, weights
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from puzzle.config import HealingConfig
from puzzle.errors import ConfigError, UnsupportedError
from puzzle.healing import trainer


def held_out_losses(parent: Path, child: Path, ids: torch.Tensor) -> tuple[float, float]:
    """KL(parent || child) and the child's next-token loss, in float64 from whole logits."""
    logs = []
    for folder in (parent, child):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        with torch.no_grad():
            logs.append(model(input_ids=ids).logits.log_softmax(-1))
    p, q = logs
    lm = functional.nll_loss(q[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return (p.exp() * (p - q)).sum(-1).mean().item(), lm.item()


@pytest.mark.parametrize(("child", "compute_dtype"), [("child", "float32"), ("half", "float32"), ("half", "bfloat16")])
def test_healing_lowers_the_held_out_kl(models, tokens, tmp_path, capfd, child, compute_dtype):
    steps = []
    capfd.readouterr()
    out = run(
        models, tokens, tmp_path, child=child, compute_dtype=compute_dtype, progress=lambda *call: steps.append(call)
    )
    assert capfd.readouterr() == ("", "")
    points = curve(tmp_path)
    assert [p["step"] for p in points] == POINTS
    assert [p["tokens"] for p in points] == [step * BATCH * SEQ for step in POINTS]
    assert points[-1]["kl"] < 0.6 * points[0]["kl"]
    assert points[-1]["train_loss"] < points[1]["train_loss"]
    assert all(p["train_loss"] == pytest.approx(p["train_kl"] + p["train_cosine"], rel=1e-5) for p in points[1:])
    best = min(points, key=lambda p: p["kl"])
    for folder, point in ((models[child], points[0]), (out, best)):  # what was judged is what is on disk
        expected = held_out_losses(models["parent"], folder, tokens["held_out"])
        assert (point["kl"], point["lm_loss"]) == pytest.approx(expected, rel=1e-5)
    assert steps == [("healing", i, 30) for i in range(1, 31)]
    assert f"kept the child of step {best['step']}" in (tmp_path / "state" / "healing.log").read_text()
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["curve.json", "healing.log"]


def test_out_has_the_files_names_and_dtypes_of_the_child(models, tokens, tmp_path):
    child, out = models["half"], run(models, tokens, tmp_path, child="half")
    files = {p.relative_to(child) for p in child.rglob("*") if p.is_file()}
    assert {p.relative_to(out) for p in out.rglob("*") if p.is_file()} == files
    shards = [p for p in files if p.suffix == ".safetensors"]
    assert len(shards) > 1
    for file in files:
        if file in shards:
            before, after = load_file(child / file), load_file(out / file)
            assert {k: (v.dtype, v.shape) for k, v in before.items()} == {
                k: (v.dtype, v.shape) for k, v in after.items()
            }
        else:
            assert (out / file).read_bytes() == (child / file).read_bytes()
    assert any(not torch.equal(v, weights(out)[k]) for k, v in weights(child).items())


def by_hand(models, tokens, config: HealingConfig, steps: int) -> dict[str, torch.Tensor]:
    """The same training in a plain loop over whole logits."""
    parent, child = (AutoModelForCausalLM.from_pretrained(models[m], dtype=torch.float32) for m in ("parent", "child"))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in child.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in child.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, round(config.warmup * steps), steps)
    for step in range(steps):
        rows = [(step * BATCH + i) % len(tokens["training"]) for i in range(BATCH)]
        ids = tokens["training"][rows]
        with torch.no_grad():
            teacher = parent(input_ids=ids, output_hidden_states=True)
        student = child(input_ids=ids, output_hidden_states=True, labels=ids)
        p, q = ((x.logits / config.temperature).log_softmax(-1) for x in (teacher, student))
        kl = (p.exp() * (p - q)).sum(-1).mean() * config.temperature**2
        cosines = [  # layer 2 of the child has nothing
            functional.cosine_similarity(student.hidden_states[i + 1], teacher.hidden_states[i + 1], dim=-1).mean()
            for i in (0, 1, 3)
        ]
        loss = config.kl_weight * kl + config.cosine_weight * (1 - sum(cosines) / 3) + config.lm_weight * student.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(child.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return child.state_dict()


def test_training_equals_a_loop_written_by_hand(models, tokens, tmp_path):
    """Losses, order of the data (beyond its end), AdamW, schedule, clipping; with every weight and a temperature."""
    config = HealingConfig(
        tokens=10 * BATCH * SEQ, batch_tokens=BATCH * SEQ, learning_rate=1e-3, warmup=0.3, weight_decay=0.1,
        kl_weight=2.0, cosine_weight=0.5, lm_weight=0.1, temperature=2.0, evaluations=1,
    )  # fmt: skip
    healed, expected = weights(run(models, tokens, tmp_path, config)), by_hand(models, tokens, config, 10)
    before = weights(models["child"])
    for name, value in healed.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)
        assert (value - before[name]).abs().max() > 1e-4


def test_accumulation_and_checkpointing_change_only_rounding(models, tokens, tmp_path):
    plain = weights(run(models, tokens, tmp_path / "plain"))
    saving = CONFIG.model_copy(update={"gradient_accumulation": 2, "gradient_checkpointing": True})
    for name, value in weights(run(models, tokens, tmp_path / "saving", saving)).items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_broken_and_resumed_equals_unbroken(models, tokens, tmp_path, compute_dtype):
    whole = run(models, tokens, tmp_path / "whole", compute_dtype=compute_dtype)
    for step in (3, 17, 29):
        with pytest.raises(Stop):
            run(models, tokens, tmp_path, compute_dtype=compute_dtype, progress=stop_at(step))
    seen = []
    out = run(models, tokens, tmp_path, compute_dtype=compute_dtype, progress=lambda _, done, __: seen.append(done))
    assert seen == list(range(24, 31))
    assert same_files(out, whole)
    assert curve(tmp_path) == curve(tmp_path / "whole")


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from accelerate.state import AcceleratorState
from puzzle.config import HealingConfig
from puzzle.healing.gkd import heal

parent, child, root, config, kill_at = sys.argv[1:]
tokens = torch.load(Path(root) / "tokens.pt", weights_only=True)

def progress(what, done, total):
    if done == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)

heal(Path(parent), Path(child), Path(root) / "out", tokens["training"], tokens["held_out"],
     HealingConfig.model_validate_json(config), seed=0, compute_dtype="float32", device="cpu",
     state=Path(root) / "state", progress=progress)
state = AcceleratorState()
(Path(root) / "processes").write_text(f"{state.distributed_type.value} {state.num_processes}")
"""


def run_elsewhere(
    models, tokens, root: Path, config: HealingConfig, *launcher, kill_at: int = -1, prelude: str = "", environment=()
) -> int:
    """`run` in processes of its own; returns the exit code."""
    root.mkdir(exist_ok=True)
    torch.save(tokens, root / "tokens.pt")
    (root / "script.py").write_text(prelude + SCRIPT)
    arguments = [root / "script.py", models["parent"], models["child"], root, config.model_dump_json(), kill_at]
    command = [sys.executable, *launcher, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **dict(environment)}, timeout=300
    ).returncode


def test_killed_while_a_checkpoint_is_written(models, tokens, tmp_path):
    whole = run(models, tokens, tmp_path / "whole")
    assert run_elsewhere(models, tokens, tmp_path, CONFIG, kill_at=20) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    checkpoints = tmp_path / "state" / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["checkpoint-15", "checkpoint-8"]
    half = checkpoints / "checkpoint-23"  # as a kill between two of Trainer's files leaves it
    half.mkdir()
    (half / "model.safetensors").write_bytes((checkpoints / "checkpoint-15" / "model.safetensors").read_bytes()[:999])
    seen = []
    out = run(models, tokens, tmp_path, progress=lambda _, done, __: seen.append(done))
    assert seen[0] == 16
    assert same_files(out, whole)


def test_a_checkpoint_of_another_recipe_is_not_continued(models, tokens, tmp_path):
    with pytest.raises(Stop):
        run(models, tokens, tmp_path, progress=stop_at(20))
    other = CONFIG.model_copy(update={"learning_rate": 5e-3})
    seen = []
    out = run(models, tokens, tmp_path, other, progress=lambda _, done, __: seen.append(done))
    assert seen[0] == 1
    assert same_files(out, run(models, tokens, tmp_path / "fresh", other))


def test_the_unhealed_child_wins_over_worse_ones(models, tokens, tmp_path):
    out = run(models, tokens, tmp_path, CONFIG.model_copy(update={"learning_rate": 30.0}))
    points = curve(tmp_path)
    assert min(p["kl"] for p in points[1:]) > points[0]["kl"]
    assert same_files(out, models["child"])
    assert "no step lowered the held-out KL" in (tmp_path / "state" / "healing.log").read_text()


def test_the_best_child_is_kept_not_the_last(models, tokens, tmp_path):
    """Two sequences learnt by heart: the held-out KL falls, then rises."""
    few = {**tokens, "training": tokens["training"][:2]}
    out = run(models, few, tmp_path, CONFIG.model_copy(update={"evaluations": 10, "lm_weight": 3.0}))
    points = curve(tmp_path)
    best = min(points, key=lambda p: p["kl"])
    assert 0 < best["step"] < 30
    assert held_out_losses(models["parent"], out, tokens["held_out"])[0] == pytest.approx(best["kl"], rel=1e-5)


def test_nan_stops_and_keeps_the_best_before(models, tokens, tmp_path, monkeypatch):
    original, calls = trainer.gkd_loss, []

    def failing(*args, **kwargs):
        losses = original(*args, **kwargs)
        calls.extend([1] if args[5] == CONFIG else [])  # not while judging
        return {k: v * float("nan") for k, v in losses.items()} if len(calls) == 20 else losses

    monkeypatch.setattr(trainer, "gkd_loss", failing)
    with pytest.warns(RuntimeWarning, match="stopped at step 19 of 30: the loss is nan; the best child before is kept"):
        out = run(models, tokens, tmp_path)
    points = curve(tmp_path)
    best = min(points, key=lambda p: p["kl"])
    assert best["step"] == points[-1]["step"] == 15
    assert held_out_losses(models["parent"], out, tokens["held_out"])[0] == pytest.approx(best["kl"], rel=1e-5)


def test_weights_that_overflow_leave_the_child_as_it_was(models, tokens, tmp_path):
    with pytest.warns(RuntimeWarning, match=r"healing stopped at step \d of 30: the loss is nan"):
        out = run(models, tokens, tmp_path, CONFIG.model_copy(update={"learning_rate": 1e38}))
    assert same_files(out, models["child"])


def test_no_tokens_copy_the_child(models, tokens, tmp_path):
    assert same_files(run(models, tokens, tmp_path, HealingConfig(tokens=0)), models["child"])
    assert not (tmp_path / "state").exists()


def test_heals_in_place(models, tokens, tmp_path):
    expected = weights(run(models, tokens, tmp_path / "elsewhere"))
    folder = tmp_path / "elsewhere" / "copy"
    run(models, tokens, tmp_path / "first", HealingConfig(tokens=0))
    child = tmp_path / "first" / "out"
    assert not folder.exists()
    run({**models, "child": child}, tokens, tmp_path / "first")
    assert all(torch.equal(v, expected[k]) for k, v in weights(child).items())


@pytest.mark.parametrize(
    ("changes", "data", "error", "text"),
    [
        ({"kl_weight": 0.0, "cosine_weight": 0.0}, {}, ConfigError, "all 0"),
        ({"gradient_accumulation": 3}, {}, ConfigError, r"4 sequences .*1 processes x gradient_accumulation 3"),
        ({}, {"training": torch.zeros(0, 16, dtype=torch.long)}, ConfigError, r"training tokens .* not \[0, 16\]"),
        ({}, {"held_out": torch.zeros(16, dtype=torch.long)}, ConfigError, r"held-out tokens .* not \[16\]"),
        ({}, {"compute_dtype": "float16"}, UnsupportedError, "float16 needs a GPU"),
        ({}, {"device": "cuda:1"}, UnsupportedError, "CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_mistakes_are_named(models, tokens, tmp_path, changes, data, error, text):
    given = {**tokens, **{k: v for k, v in data.items() if k in tokens}}
    rest = {k: v for k, v in data.items() if k not in tokens}
    with pytest.raises(error, match=text):
        run(models, given, tmp_path, CONFIG.model_copy(update=changes), **rest)
    assert not (tmp_path / "state").exists()


def test_models_that_do_not_fit_are_refused(models, tokens, tmp_path):
    smaller = LlamaConfig.from_pretrained(models["parent"], vocab_size=60)
    LlamaForCausalLM(smaller).save_pretrained(tmp_path / "stranger")
    with pytest.raises(UnsupportedError, match="stranger has vocab_size 60, its parent 61"):
        run({**models, "child": tmp_path / "stranger"}, tokens, tmp_path)


# Accelerate gives FSDP to GPUs only; told that these processes have some, it runs on CPUs as well.
CPU_FSDP = """
from accelerate import PartialState
from accelerate.utils import DistributedType

original = PartialState.__init__

def as_gpus(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU

PartialState.__init__ = as_gpus
"""


def fsdp_environment() -> dict[str, str]:
    """What `accelerate launch` makes of the config file we ship."""
    config = yaml.safe_load((Path(__file__).parents[2] / "docs" / "fsdp2.yaml").read_text())
    assert config["distributed_type"] == "FSDP"
    return {
        "ACCELERATE_USE_FSDP": "true",
        **{k.upper(): str(v).lower() if isinstance(v, bool) else str(v) for k, v in config["fsdp_config"].items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "child"), [("MULTI_CPU", "child"), ("FSDP", "child"), ("FSDP", "half")])
def test_two_processes_equal_one(models, tokens, tmp_path, kind, child):
    """Gloo on a CPU, 20 steps, each process half of every batch, judged after each; killed at step 12 and resumed."""
    config = CONFIG.model_copy(update={"tokens": 20 * BATCH * SEQ, "evaluations": 20})
    models = {**models, "child": models[child]}
    one = weights(run(models, tokens, tmp_path / "one", config))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    kwargs = {"prelude": CPU_FSDP, "environment": fsdp_environment()} if kind == "FSDP" else {}
    assert run_elsewhere(models, tokens, tmp_path / "two", config, *launcher, kill_at=12, **kwargs) != 0
    assert run_elsewhere(models, tokens, tmp_path / "two", config, *launcher, **kwargs) == 0
    assert (tmp_path / "two" / "processes").read_text() == f"{kind} 2"
    rounding = 2**-7 if child == "half" else 0  # the last bit of a bfloat16
    for name, value in weights(tmp_path / "two" / "out").items():
        torch.testing.assert_close(value, one[name], rtol=rounding, atol=1e-4)
    for a, b in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
