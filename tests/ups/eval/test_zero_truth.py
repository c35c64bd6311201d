"""Validation frames that are zero in a channel: their relative error isn't defined, and isn't averaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from memory_fields import fields_of

from ups.config import RunConfig
from ups.data.batches import FrameBatch
from ups.data.fields import Fields, FieldsInfo
from ups.data.windows import Trajectories
from ups.distributed.ranks import ALONE
from ups.errors import ConfigError
from ups.eval.forecasters import Persistence
from ups.eval.metrics import DefinedErrors, nrmse_per_sample
from ups.eval.reconstruction import measure_floor
from ups.grid import GridSpec
from ups.models.any_point_decoder import grid_queries
from ups.train.autoencoder import AutoencoderStage
from ups.train.validation import RolloutValidation
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import AutoencoderSpec, TaskSpec

GRID = GridSpec((8,), (True,), (("fields", 2),))
CHANNELS = ("density", "velocity")


def in_memory(fields: np.ndarray) -> Fields:
    info = FieldsInfo("gas", GRID, CHANNELS, {}, {}, (), steady=False)
    return fields_of(info, {"fields": fields})


def validation(fields: np.ndarray) -> RolloutValidation:
    return RolloutValidation({"gas": Trajectories(in_memory(fields), stored_t=None)}, num=4)


@pytest.fixture
def fields() -> np.ndarray:
    """Shape (4, 3, 8, 2); the velocity of the second frame of one trajectory is zero."""
    values = np.random.default_rng(0).standard_normal((4, 3, 8, 2)).astype(np.float32)
    values[2, 1, :, 1] = 0
    return values


def test_frame_without_truth_is_left_out_of_the_validation_and_counted(fields: np.ndarray) -> None:
    own = validation(fields)
    found = own.nrmse(Persistence())["gas"]
    truth = torch.from_numpy(fields[:, 1:]).double()
    errors = nrmse_per_sample(torch.from_numpy(fields[:, :1]).double().expand_as(truth), truth)
    assert found == pytest.approx(errors[errors.isfinite()].mean().item())
    assert own.left_out == {"gas": 1}
    assert validation(fields[:2]).nrmse(Persistence())["gas"] == pytest.approx(errors[:2].mean().item())


def test_counts_of_what_was_left_out_are_those_of_the_last_validation(fields: np.ndarray) -> None:
    own = validation(fields)
    assert own.left_out == {}
    for _ in range(2):
        own.nrmse(Persistence())
        assert own.left_out == {"gas": 1}


def test_truth_that_is_zero_throughout_is_refused_naming_task_and_channels(fields: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"frames of gas are zero .* channel density or velocity") as caught:
        validation(np.zeros_like(fields)).nrmse(Persistence())
    assert caught.value.kind == "zero_truth"


def test_prediction_that_is_not_finite_is_no_reason_to_leave_it_out(fields: np.ndarray) -> None:
    fields[0, 0] = np.nan  # given, so predicted for ever
    assert np.isnan(validation(fields).nrmse(Persistence())["gas"])
    truth = torch.ones(1, 1, 8, 2)
    found = DefinedErrors()
    found.add(torch.full_like(truth, torch.inf), truth, items=torch.zeros(1, dtype=torch.int64))
    errors, defined = found.joined(ALONE)
    assert errors[defined].tolist() == [torch.inf] * 2


def make_autoencoder() -> Autoencoder:
    plain = {"fields": {"mean": [0.0] * 2, "std": [1.0] * 2}}
    sizes = {"width": 8, "depth": 1, "num_heads": 2}
    spec = AutoencoderSpec(
        tasks={"gas": TaskSpec(GRID, CHANNELS, False, plain)},
        parameters=(),
        latent_dim=2,
        num_tokens=2,
        patch_size=4,
        encoder=sizes,
        decoder={**sizes, "radius": 1},
    )
    return Autoencoder(spec).eval()


def floor_of(fields: np.ndarray) -> tuple[float, int, int]:
    batch = FrameBatch(
        task="gas",
        array="fields",
        values=torch.from_numpy(fields[:, 1]),
        parameters=torch.zeros(4, 0),
        steps=torch.ones(4, dtype=torch.int64),
        items=torch.arange(4),
    )
    floor = measure_floor(make_autoencoder(), [batch], queries={"gas": grid_queries((8,))})
    return floor.nrmse["gas"], floor.num_frames["gas"], floor.left_out["gas"]


def test_floor_leaves_out_frames_without_truth_and_counts_them(fields: np.ndarray) -> None:
    nrmse, num_frames, left_out = floor_of(fields)
    assert np.isfinite(nrmse)
    assert (num_frames, left_out) == (4, 1)
    with pytest.raises(ConfigError, match="gas") as caught:
        floor_of(np.zeros_like(fields))
    assert caught.value.kind == "zero_truth"


def test_report_of_the_autoencoder_counts_them_too(fields: np.ndarray, tmp_path: Path) -> None:
    settings = {"data": {"tasks": ["cfd1d"], "root": "data"}, "checkpoint": {"dir": tmp_path}}
    stage = AutoencoderStage(
        RunConfig.model_validate(settings),
        make_autoencoder(),
        train={"gas": in_memory(fields)},
        val={"gas": in_memory(fields)},
        device=torch.device("cpu"),
    )
    stage.export({}, stage.model.state_dict())
    assert stage.finish()["nrmse_left_out"] == {"gas": 1}
