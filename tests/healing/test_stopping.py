# SPDX-License-Identifier: Apache-2.0
"""Healing that stops early, and trackers: neither changes what is learnt until then."""

import pytest
from healing_runs import CONFIG, Stop, curve, run, same_files, stop_at

from puzzle.config import HealingConfig, validate
from puzzle.errors import ConfigError
from puzzle.healing import trainer

PATIENT = CONFIG.model_copy(update={"evaluations": 15, "lm_weight": 3.0, "patience": 3})


@pytest.fixture(scope="module")
def few(tokens):
    """Two sequences, learnt by heart: the held-out KL falls, then rises."""
    return {**tokens, "training": tokens["training"][:2]}


@pytest.fixture(scope="module")
def stopped(models, few, tmp_path_factory):
    root = tmp_path_factory.mktemp("stopped")
    run(models, few, root, PATIENT)
    return root


def test_patience_ends_after_that_many_evaluations_without_a_better_one(models, few, stopped, tmp_path):
    out = run(models, few, tmp_path, PATIENT.model_copy(update={"patience": None}))
    whole, points = curve(tmp_path), curve(stopped)
    kls = [p["kl"] for p in whole]
    last = next(i for i in range(len(kls)) if i - kls[: i + 1].index(min(kls[: i + 1])) == 3)
    assert 3 < last < 15
    assert points == whole[: last + 1]
    if min(kls) == min(kls[: last + 1]):
        assert same_files(out, stopped / "out")


def test_patience_counts_from_the_first_evaluation_after_the_unhealed_child(models, tokens, tmp_path):
    run(models, tokens, tmp_path, PATIENT.model_copy(update={"patience": 1, "learning_rate": 30.0}))
    assert [p["step"] for p in curve(tmp_path)] == [0, 2]


def test_killed_anywhere_it_stops_at_the_same_place(models, few, stopped, tmp_path, monkeypatch):
    end = curve(stopped)[-1]["step"]
    for step in (end - 3, end - 1):
        with pytest.raises(Stop):
            run(models, few, tmp_path, PATIENT, progress=stop_at(step))
    saved = trainer._Flow.on_save

    def killed(flow, args, state, control, **kwargs):  # once the last checkpoint is whole
        saved(flow, args, state, control, **kwargs)
        if state.global_step == end:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(trainer._Flow, "on_save", killed)
        with pytest.raises(Stop):
            run(models, few, tmp_path, PATIENT)
    steps = []
    out = run(models, few, tmp_path, PATIENT, progress=lambda _, done, __: steps.append(done))
    assert steps == [end + 1]
    assert same_files(out, stopped / "out")
    assert curve(tmp_path) == curve(stopped)


def test_tensorboard_gets_the_curve_and_changes_nothing(models, tokens, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plain = run(models, tokens, tmp_path / "plain")
    out = run(models, tokens, tmp_path, CONFIG.model_copy(update={"report_to": ["tensorboard"]}))
    assert same_files(out, plain)
    assert curve(tmp_path) == curve(tmp_path / "plain")
    logged = events.EventAccumulator(str(tmp_path / "state" / "tensorboard")).Reload()
    kls = {e.step: e.value for e in logged.Scalars("eval/kl")}
    assert kls == {p["step"]: pytest.approx(p["kl"], rel=1e-6) for p in curve(tmp_path)}
    assert len(logged.Scalars("train/learning_rate")) == 30


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named(models, tokens, tmp_path, monkeypatch, tracker):
    monkeypatch.setattr(trainer, "get_available_reporting_integrations", lambda: [])
    with pytest.raises(ConfigError, match=f"report_to: {tracker} is not installed; pip install {tracker}"):
        run(models, tokens, tmp_path, CONFIG.model_copy(update={"report_to": [tracker]}))
    assert not (tmp_path / "state").exists()


def test_one_tracker_needs_no_list():
    assert validate(HealingConfig, {"report_to": "wandb"}, "here").report_to == ["wandb"]
    with pytest.raises(ConfigError, match="report_to"):
        validate(HealingConfig, {"report_to": "tensorbord"}, "here")
