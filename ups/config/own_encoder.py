"""Whether the autoencoder in a run's folder is the one that its configuration describes."""

from __future__ import annotations

from pathlib import Path

from ups.config.architecture import DecoderConfig, EncoderConfig
from ups.errors import ConfigError
from ups.trained.checkpoint import read_document
from ups.trained.specs import AUTOENCODER, parse_spec

_OF_NETWORKS = ("width", "depth", "num_heads", "radius", "isometry")  # which a linear one hasn't
_BEFORE = {"basis": "none", "residual": True, "isometry": False}  # of files of earlier versions


def check_own_encoder(path: Path, *, encoder: EncoderConfig, decoder: DecoderConfig) -> None:
    """Refuse an autoencoder that a run trained by another `encoder` or `decoder` than is said now.

    Its training would begin again, and so would the stores of its latents. One that is given by
    `latent.checkpoint`, or that no run trained, is taken as it is, and so is what the configuration leaves
    open.

    Args:
        path: Of the autoencoder that the run would train itself; nothing is refused where none is there.
    """
    if not path.exists():
        return
    document = read_document(path, kind=AUTOENCODER)
    if not document.get("config"):
        return
    spec = parse_spec(document, path)
    found = {"encoder": {**_BEFORE, "patch_size": spec.patch_size, **spec.encoder}, "decoder": spec.decoder}
    is_linear = not (encoder.residual or found["encoder"]["residual"])
    differing = {
        f"{section}.{key}": (found[section].get(key), value)
        for section, wanted in (("encoder", encoder), ("decoder", decoder))
        for key, value in wanted.model_dump(exclude_unset=True).items()
        if found[section].get(key) != value and not (is_linear and key in _OF_NETWORKS)
    }
    if differing:
        raise ConfigError(
            "the autoencoder that is there was trained by another configuration",
            kind="other_encoder",
            path=path,
            expected=", ".join(f"{key} = {wanted}" for key, (_, wanted) in differing.items()),
            found=", ".join(str(was) for was, _ in differing.values()),
            hint="train it again with `ups train --stage autoencoder`, or configure what it has; a run with "
            "another checkpoint.dir uses it as it is by latent.checkpoint",
        )
