"""What a whole run depends on, found before it starts: its source's content, its model folder, its configuration."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from artifacts.store import file_sha256, payload_digest
from schemas.config import RunConfig
from tasks.ingest import source_digest
from tasks.stages import ALL_STAGES


class RunInputs(NamedTuple):
    source_sha256: str
    model_sha256: str
    """Of the user's own model folder; empty for a model that is made from its name."""
    template_sha256: str
    """Of the user's own chat template file; empty for one that is known by name."""
    sha256: str
    """Of all these, of the configuration and of the stages' versions: equal when a run would find nothing new."""


def run_inputs(config: RunConfig) -> RunInputs:
    """Digests of everything that a run reads.

    Raises:
        UserError: a source path is missing or an empty folder.
    """
    folder, template = Path(config.model.name).expanduser(), Path(config.model.chat_template).expanduser()
    source = source_digest(config.source, Path(config.store))
    model_sha256 = payload_digest(folder, "listing")[0] if folder.is_dir() else ""
    template_sha256 = file_sha256(template) if template.is_file() else ""
    sections = config.model_dump(mode="json", exclude={"store": True, "source": {"paths"}})
    versions = {stage.name: stage.version() for stage in ALL_STAGES}
    text = json.dumps([source, model_sha256, template_sha256, sections, versions], sort_keys=True)
    return RunInputs(source, model_sha256, template_sha256, hashlib.sha256(text.encode()).hexdigest())
