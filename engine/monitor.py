"""What the GPU does while a stage trains: NVML, sampled by a thread, one CSV a rank in the stage's working folder.

NVML sees what PyTorch's allocator does not: CUDA's own context, libraries, and other processes on the same card. The
binding is nvidia-ml-py (module pynvml), passed in as an argument. Where it or the GPU is missing, nothing is sampled
and the report says why. Units: bytes, percent, watts, degrees Celsius, seconds since 1970.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from artifacts.gpu_samples import Sample, read_samples
from schemas.reports import GpuUse

SAMPLE_S = 2.0


def load_nvml() -> Any | None:
    """The NVML binding, or None where it is not installed."""
    return importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None


def device_uuid(device: torch.device) -> str:
    """How NVML names this device, whatever CUDA_VISIBLE_DEVICES has made of its number."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class GpuMonitor:
    """Context in which a thread appends a `Sample` of one device to a CSV every `sample_s`, the first one at once.

    A CSV that is there already is gone on with: a resumed run is one run. What a card does not tell (a virtual one its
    power) is left empty; an NVML that fails altogether ends the sampling, not the training. `status` says how it went.
    """

    def __init__(self, path: Path, nvml: Any | None, uuid: str | None, *, sample_s: float = SAMPLE_S) -> None:
        self.path, self.sample_s = path, sample_s
        self._nvml, self._uuid = nvml, uuid
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.status = f"NVML every {sample_s:g} s"
        if uuid is None:
            self.status = "off: no GPU"
        elif nvml is None:
            self.status = "off: nvidia-ml-py is not installed"

    def __enter__(self) -> GpuMonitor:
        if self._uuid is None or self._nvml is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="gpu-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        nvml: Any = self._nvml
        try:
            nvml.nvmlInit()
            try:
                self._sample_until_ended(nvml.nvmlDeviceGetHandleByUUID(self._uuid))
            finally:
                nvml.nvmlShutdown()
        except (nvml.NVMLError, OSError) as error:
            self.status = f"off: {error}"

    def _sample_until_ended(self, handle: Any) -> None:
        is_new = not self.path.is_file()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            if is_new:
                lines.writerow(Sample._fields)
            else:
                file.write("\n")  # ends a line that a full disk or a power cut tore
            while True:
                lines.writerow(self._sample(handle))
                file.flush()
                if self._ended.wait(self.sample_s):
                    return

    def _sample(self, handle: Any) -> Sample:
        nvml: Any = self._nvml

        def told(query: Any, *arguments: Any) -> Any | None:
            try:
                return query(handle, *arguments)
            except nvml.NVMLError:
                return None

        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = told(nvml.nvmlDeviceGetUtilizationRates)
        power_mw = told(nvml.nvmlDeviceGetPowerUsage)
        return Sample(
            unix_s=round(time.time(), 2),
            gpu=str(nvml.nvmlDeviceGetName(handle)),
            used_bytes=memory.used,
            total_bytes=memory.total,
            busy_percent=None if busy is None else busy.gpu,
            power_w=None if power_mw is None else power_mw / 1000,
            celsius=told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        )


def monitor_of(out: Path, rank: int, device: torch.device, nvml: Any | None) -> GpuMonitor:
    """The monitor of one rank's device; its CSV is `out`/gpu/rank<r>.csv."""
    uuid = device_uuid(device) if device.type == "cuda" else None
    return GpuMonitor(out / "gpu" / f"rank{rank}.csv", nvml, uuid)


def gpu_uses(out: Path) -> tuple[GpuUse, ...]:
    """One summary for each rank whose CSV is in `out`/gpu, in the order of ranks."""
    found = []
    files = sorted((out / "gpu").glob("rank*.csv"), key=lambda path: int(path.stem.removeprefix("rank")))
    for file in files:
        if rows := read_samples(file):
            busy = [row.busy_percent for row in rows if row.busy_percent is not None]
            found.append(
                GpuUse(
                    rank=int(file.stem.removeprefix("rank")),
                    name=rows[0].gpu,
                    n_samples=len(rows),
                    total_bytes=rows[0].total_bytes,
                    peak_used_bytes=max(row.used_bytes for row in rows),
                    mean_busy_percent=sum(busy) / len(busy) if busy else None,
                    peak_power_w=max((row.power_w for row in rows if row.power_w is not None), default=None),
                )
            )
    return tuple(found)


class AllocatorPeaks:
    """Peaks of PyTorch's allocator, step by step and over all; zero off the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated_bytes = self.reserved_bytes = 0

    def lap(self) -> dict[str, int]:
        """Peaks since the last lap, as entries of the step log (none off the GPU)."""
        if self._device.type != "cuda":
            return {}
        step = {
            "allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }
        torch.cuda.reset_peak_memory_stats(self._device)
        self.allocated_bytes = max(self.allocated_bytes, step["allocated_bytes"])
        self.reserved_bytes = max(self.reserved_bytes, step["reserved_bytes"])
        return step
