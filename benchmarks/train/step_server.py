"""Trains so many steps for every line on stdin, and says what they took; of any version of `ups`.

python step_server.py CONFIG [key=value ...]
"""

import json
import sys
import time
from pathlib import Path

import torch

from ups.config import load_config
from ups.train.stage import make_stage
from ups.train.trainer import Trainer


def main() -> None:
    """Answer lines with {"seconds": of processor time, "loss": mean total} until stdin ends."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    config = load_config(Path(sys.argv[1]), overrides=sys.argv[2:])
    device = torch.device("cpu")
    trainer = Trainer(make_stage("operator", config, device=device), config, device=device, restart=True)
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            trainer.train_step()
        seconds = time.process_time() - began
        print(json.dumps({"seconds": seconds, "loss": sum(trainer.meter.read().values())}), file=answers)
        answers.flush()


if __name__ == "__main__":
    main()
