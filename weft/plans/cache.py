"""Plans that were made before, on disk: the same step, measurements and budget plan nothing anew."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import PlanError
from weft.plans.decisions import Decisions


class PlanCache:
    """A folder with one file a plan; None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else folder / "plans"

    def path(self, identity: Mapping[str, str], given: Any) -> Path | None:
        """Where the plan for a step is; `given` is what else it depends on: measurements and budget."""
        if self.folder is None:
            return None
        key = json.dumps([dict(identity), given], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def find(self, identity: Mapping[str, str], given: Any) -> Decisions | None:
        path = self.path(identity, given)
        if path is None or not path.is_file():
            return None
        try:
            found = Decisions.from_json(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError, PlanError) as error:
            warnings.warn(f"a plan kept from before is not usable, and is made anew: {error}", stacklevel=2)
            return None
        return found if dict(found.identity) == dict(identity) else None

    def keep(self, decisions: Decisions, given: Any) -> None:
        path = self.path(decisions.identity, given)
        if path is not None:
            try:
                write_whole(path, decisions.to_json())
            except OSError as error:
                warnings.warn(f"the plan is not kept: {path.parent} cannot be written ({error})", stacklevel=2)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
