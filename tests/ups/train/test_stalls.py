"""A training that makes no progress ends with exit code 4, and leaves stacks and its state."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from test_trainer import Regression, make_config, records, train

from ups.train.saved_state import SavedState

STALLS = """
import sys, threading
from pathlib import Path
from test_trainer import CPU, Regression, make_config
from ups.train.interrupt import listening_to_stalls
from ups.train.trainer import Trainer

def that_never_returns(number):
    if number == 7:
        threading.Event().wait()

folder = Path(sys.argv[1])
stage = Regression(on_batch=that_never_returns)
with listening_to_stalls(lambda error: print(error.kind, flush=True)):
    try:
        Trainer(stage, make_config(folder, "training.stall_timeout_s=3"), device=CPU).fit()
    finally:
        print("not ended by the watch")
"""


def test_stalled_step_ends_with_stacks_and_the_state_goes_on(tmp_path: Path) -> None:
    search = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", STALLS, tmp_path / "parts"],
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (4, "stalled\n"), done.stderr
    written = (tmp_path / "parts" / "autoencoder.stalled.txt").read_text()
    for text in (done.stderr, written):
        assert "stage autoencoder stalled: step after step 7 wasn't over in 3 s" in text
        assert "in that_never_returns" in text
        assert "in train_step" in text
    assert "no CUDA state" in written
    assert [record["step"] for record in records(tmp_path / "parts", "stalled")] == [7]
    config = make_config(tmp_path / "parts")
    state = SavedState.read(tmp_path / "parts" / "autoencoder.training.safetensors")
    assert state.document["position"]["step"] == 5
    train(Regression(), config)  # without the deadline, which doesn't count
    assert records(tmp_path / "parts", "end")[-1]["step"] == 10


def test_training_that_gets_on_isnt_ended_and_leaves_no_thread(tmp_path: Path) -> None:
    train(Regression(), make_config(tmp_path, "training.stall_timeout_s=60"))
    assert not (tmp_path / "autoencoder.stalled.txt").exists()
    assert all(thread.name != "stall-watch" for thread in threading.enumerate())
