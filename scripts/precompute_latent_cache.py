"""The earlier name of `python -m ups_store.build`: the same flags, the same stores.

Where `logging.wandb.enabled` is set, the seconds by phase and the throughput go to Weights & Biases, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups_store.build.__main__ import main

if TYPE_CHECKING:
    from ups_store.build.stores import BuildReport


def begin(config: Path | None, overrides: Sequence[str]) -> Callable[[BuildReport], None] | None:
    """Whom the build's report is told: a run of Weights & Biases, if the configuration wants one.

    Raises:
        ConfigError: If wandb isn't installed; before hours of work.
    """
    values = _values(config, overrides)
    settings = (values.get("logging") or {}).get("wandb") or {}
    if not settings.get("enabled"):
        return None
    from ups.config.run import WandbConfig
    from ups.train.sinks import WandbSink, import_wandb

    import_wandb()
    folder = Path((values.get("checkpoint") or {}).get("dir") or "checkpoints")

    def tell(report: BuildReport) -> None:
        sink = WandbSink(
            WandbConfig(**settings), stage="build", folder=folder, run_config=values, run_id=None
        )
        sink.write({"event": "startup", "stage": "build", **report.startup.metrics()})
        sink.close(has_failed=False)

    return tell


def _values(config: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The whole configuration, of which the build takes only its own sections."""
    from omegaconf import OmegaConf

    from ups_store.build.overrides import parse_overrides
    from ups_store.build.yaml_file import read_yaml

    file = read_yaml(config) if config else {}
    values = OmegaConf.to_container(OmegaConf.merge(file, parse_overrides(overrides)), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


if __name__ == "__main__":
    main(begin)
