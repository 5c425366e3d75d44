"""Files in a folder that all hosts see: a version, or what changed since the one that is staged, is read from there."""

from pathlib import Path

from slipstream.buffer.wire.weights.delta import DeltaError
from slipstream.buffer.wire.weights.layout import TensorFileError, read_exactly, read_tensors
from slipstream.buffer.wire.weights.protocol import Announce, Part
from slipstream.rollout_servers.engines.staging import SourceGone, Staging, TransferFailed
from slipstream.rollout_servers.weights.receivers.base import Receiver


class FileReceiver(Receiver):
    """Reads into memory, without mapping: the learner deletes old files."""

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Reads the parts one after another."""
        assert announce.source is not None, "file is read from a source"
        folder, manifest = Path(announce.source.place), announce.manifest
        held = staging.version
        data = staging.begin(manifest).numpy()
        for part in announce.source.parts:
            path = folder / part.name
            try:
                if part.base is None:
                    read_tensors(path, part.version, manifest.tensors, data.data)
                else:
                    staging.change(_read(path, part), manifest, held=held)
            except FileNotFoundError:
                raise SourceGone(f"version {manifest.version}: there is no {path} (any more)") from None
            except (OSError, TensorFileError, DeltaError) as error:
                raise TransferFailed(f"version {manifest.version} could not be read from {path}: {error}") from None
            held = part.version
        staging.finish(manifest)

    def close(self) -> None:
        """Nothing is kept open."""


def _read(path: Path, part: Part) -> memoryview:
    """Raises: OSError, TensorFileError."""
    content = memoryview(bytearray(part.size_bytes))
    with path.open("rb", buffering=0) as file:
        read_exactly(file, content)
    return content
