"""Weights of inverse losses and numbers of query points over a stage, and that the stages use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from numbered_batches import batch_of
from operator_runs import configure

from ups.config import TrainingConfig
from ups.config.training import QuerySamplingConfig
from ups.train.autoencoder import make_autoencoder_stage
from ups.train.joint import make_joint_stage
from ups.train.schedules import Schedule, inverse_weights, num_queries

CPU = torch.device("cpu")
ONE = "data.tasks=[burgers1d]"


@pytest.mark.parametrize(
    ("epochs", "expected"), [(0, 0), (4.9, 0), (5, 0), (7.5, 0.01), (10, 0.02), (100, 0.02)]
)
def test_inverse_losses_start_after_the_warm_up_and_grow_for_as_long(epochs: float, expected: float) -> None:
    training = TrainingConfig(
        inverse_loss_warmup_epochs=5, inverse_loss_max_weight=0.05, lambda_inv_enc=0.02, lambda_inv_dec=0.5
    )
    weights = inverse_weights(training, epochs)
    assert weights["decoder_inverse"] == pytest.approx(expected)
    assert weights["encoder_inverse"] == pytest.approx(min(0.05, 25 * expected))


def test_inverse_losses_have_weight_one_by_default() -> None:
    assert inverse_weights(TrainingConfig(), 0.0) == {"decoder_inverse": 1.0, "encoder_inverse": 1.0}


def test_query_points_go_from_the_first_number_to_the_last_and_stay() -> None:
    sampling = QuerySamplingConfig.model_validate(
        {"num_queries": 20, "curriculum": {"enabled": True, "start_queries": 100, "share": 0.5}}
    )
    at = [num_queries(sampling, progress=p, num_points=64) for p in (0.0, 0.25, 0.5, 1.0)]
    assert at == [64, 42, 20, 20]  # a grid has no more points than it has
    off = QuerySamplingConfig(num_queries=20)
    assert num_queries(off, progress=0.0, num_points=64) == 20
    assert num_queries(QuerySamplingConfig(), progress=0.0, num_points=64) == 64


def test_length_of_a_stage_counts_optimiser_steps_not_batches() -> None:
    schedule = Schedule(steps_per_epoch=10, total_steps=40, accum_steps=3)
    assert (schedule.step_of(59), schedule.epochs_before(60), schedule.progress(60)) == (19, 2.0, 0.5)


def test_stage_autoencoder_asks_at_more_points_as_it_goes_on(run: Path) -> None:
    sampling = ["training.query_sampling.num_queries=24", "training.query_sampling.curriculum.enabled=true"]
    config = configure(run, ONE, *sampling, "training.query_sampling.curriculum.start_queries=4")
    stage = make_autoencoder_stage(config, device=CPU)
    assert [len(batch_of(stage, number).points) for number in (0, 15, 75, 100)] == [4, 8, 24, 24]
    asked = []
    stage.losses(
        lambda values, query, *a, **k: asked.append(len(query)) or values.flatten(1, -2)[:, :4],
        batch_of(stage, 0),
    )
    assert asked == [4]


def test_stage_joint_weighs_its_inverse_losses(run: Path) -> None:
    settings = ["training.use_inverse_losses=true", "stages.joint.epochs=4", "stages.joint.steps_per_epoch=5"]
    weighted = ["training.lambda_inv_enc=0.5", "training.lambda_inv_dec=0"]
    stage = make_joint_stage(configure(run, ONE, *settings), device=CPU)
    halved = make_joint_stage(configure(run, ONE, *settings, *weighted), device=CPU)
    plain, some = (each.losses(each.model, batch_of(each, 0)) for each in (stage, halved))
    assert set(plain) == {"prediction", "decoder_inverse", "encoder_inverse"}
    assert set(some) == {"prediction", "decoder_inverse"}  # without a weight it isn't even computed
    torch.testing.assert_close(some["decoder_inverse"], 0.5 * plain["decoder_inverse"])
    torch.testing.assert_close(some["prediction"], plain["prediction"])
    late = make_joint_stage(
        configure(run, ONE, *settings, "training.inverse_loss_warmup_epochs=1"), device=CPU
    )
    assert batch_of(late, 4).weights == {}
    assert batch_of(late, 7).weights["decoder_inverse"] == pytest.approx(0.4)
