"""Where steps are logged besides the report: TensorBoard here, the other trackers through the library's `report_to`."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from schemas.errors import UserError
from schemas.spec import TrainSpec
from schemas.training import Tracker


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """UserError naming the first tracker whose package is not installed.

    A folder of that name, such as W&B leaves its runs in, is found too; what is installed has an origin.
    """
    for name in trackers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise UserError(f"tracker {name} is not installed", where="trackers", fix=f"pip install {name}")


class Board(TensorBoardCallback):
    """TensorBoard's callback. Where its folder cannot be written it says so once, and training goes on without it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.lost = False
        self._attempt(self._open)

    def _open(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.tb_writer = SummaryWriter(log_dir=str(self.folder))

    def _attempt(self, write: Any, *args: Any, **kwargs: Any) -> None:
        if self.lost:
            return
        try:
            write(*args, **kwargs)
        except OSError as error:
            self.lost = True
            print(f"{self.folder}: {error.strerror or error}; nothing more is logged there", flush=True)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._attempt(super().on_train_begin, *args, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self._attempt(super().on_log, *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._attempt(super().on_train_end, *args, **kwargs)


def _say_nothing_of_the_system(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writing thread keeps its error for whoever writes next, and ends with it: a traceback beside."""
    is_board = type(args.thread).__module__.startswith("tensorboard.")
    if not (is_board and isinstance(args.exc_value, OSError)):
        threading.__excepthook__(args)


def tracker_callbacks(spec: TrainSpec, trackers: Sequence[Tracker]) -> list[TrainerCallback]:
    """TensorBoard's callback with its files under the spec's log folder: the working folder does not outlive a run."""
    if "tensorboard" not in trackers or spec.log_folder is None:
        return []
    threading.excepthook = _say_nothing_of_the_system
    return [Board(Path(spec.log_folder) / f"{spec.stage}-{spec.digest()[:16]}")]
