"""The GPU monitor on a fake NVML: what it samples, what it does without one, and what report and card show of it."""

# ruff: noqa: N802 - the names of NVML

from __future__ import annotations

import base64
import csv
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from artifacts.cards import card
from artifacts.gpu_samples import gpu_picture
from artifacts.store import Store
from engine.monitor import AllocatorPeaks, GpuMonitor, Sample, gpu_uses, load_nvml, monitor_of
from schemas.refs import Ref
from schemas.reports import Trained, TrainReport
from tasks.launch import store_training

GIB = 2**30


class Memory(NamedTuple):
    total: int
    used: int


class Busy(NamedTuple):
    gpu: int


class FakeNvml:
    """The functions of pynvml that the monitor calls; memory in use goes through `used_gib`, then stays at its last."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, used_gib: tuple[float, ...] = (1.0,), *, has_power: bool = True, fails_at: int = -1) -> None:
        self.used_gib, self.has_power, self.fails_at = used_gib, has_power, fails_at
        self.n_samples, self.open = 0, 0
        self.uuid = ""
        self.sampled = threading.Event()

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> str:
        assert handle == "handle"
        return "NVIDIA Test"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Memory:
        if self.n_samples == self.fails_at:
            self.sampled.set()
            raise self.NVMLError("GPU is lost")
        used = self.used_gib[min(self.n_samples, len(self.used_gib) - 1)]
        self.n_samples += 1
        if self.n_samples >= len(self.used_gib):
            self.sampled.set()
        return Memory(24 * GIB, int(used * GIB))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Busy:
        return Busy(90 if self.n_samples % 2 else 50)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.has_power:
            raise self.NVMLError("Not Supported")
        return 300_000 + self.n_samples

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


def sampled(path: Path, nvml: FakeNvml) -> GpuMonitor:
    with GpuMonitor(path, nvml, "GPU-1234", sample_s=0.01) as monitor:
        assert nvml.sampled.wait(60)
    return monitor


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def report(out: Path, **fields: Any) -> TrainReport:
    known: dict[str, Any] = {"stage": "sft", "n_examples": 1, "n_steps": 1, "n_tokens_seen": 9, "n_tokens_scored": 2}
    known |= {"padding_share": 0.0, "first_loss": 2.0, "last_loss": 1.0, "wall_s": 1.0, "world_size": 1}
    known |= {"backend": "none", "plan": "single", "peak_memory_bytes": 2 * GIB, "gpus": gpu_uses(out)}
    return TrainReport(**known | fields)


def test_samples_go_to_the_csv_and_the_peak_into_the_report(tmp_path: Path) -> None:
    nvml = FakeNvml((1.0, 20.5, 3.0))
    monitor = sampled(tmp_path / "gpu" / "rank0.csv", nvml)
    assert (monitor.status, nvml.open, nvml.uuid) == ("NVML every 0.01 s", 0, "GPU-1234")
    rows = rows_of(tmp_path / "gpu" / "rank0.csv")
    assert len(rows) == nvml.n_samples >= 3
    assert tuple(rows[0]) == Sample._fields
    assert float(rows[1]["used_bytes"]) == 20.5 * GIB
    (use,) = gpu_uses(tmp_path)
    assert (use.rank, use.name, use.n_samples) == (0, "NVIDIA Test", len(rows))
    assert (use.peak_used_bytes, use.total_bytes) == (20.5 * GIB, 24 * GIB)
    assert use.mean_busy_percent is not None
    assert 50 < use.mean_busy_percent < 90
    assert use.peak_power_w == pytest.approx(300.0, abs=1.0)


def test_one_sample_at_least_and_a_resumed_run_goes_on_with_its_csv(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "rank0.csv"
    for used in (5.0, 2.0):
        with GpuMonitor(path, FakeNvml((used,)), "GPU-1", sample_s=60):
            pass
    rows = rows_of(path)
    assert [float(row["used_bytes"]) / GIB for row in rows] == [5.0, 2.0]
    assert gpu_uses(tmp_path)[0].peak_used_bytes == 5.0 * GIB


def test_what_a_card_does_not_tell_is_left_empty(tmp_path: Path) -> None:
    sampled(tmp_path / "gpu" / "rank0.csv", FakeNvml(has_power=False))
    assert {row["power_w"] for row in rows_of(tmp_path / "gpu" / "rank0.csv")} == {""}
    (use,) = gpu_uses(tmp_path)
    assert use.peak_power_w is None
    assert "power" not in base64.b64decode(gpu_picture(tmp_path / "gpu").split(",")[1]).decode()


def test_nvml_that_fails_midway_ends_sampling_and_says_so(tmp_path: Path) -> None:
    nvml = FakeNvml((1.0,) * 9, fails_at=2)
    monitor = sampled(tmp_path / "gpu" / "rank0.csv", nvml)
    assert monitor.status == "off: GPU is lost"
    assert nvml.open == 0
    assert gpu_uses(tmp_path)[0].n_samples == 2


@pytest.mark.parametrize(
    ("nvml", "uuid", "status"),
    [(None, "GPU-1", "off: nvidia-ml-py is not installed"), (FakeNvml(), None, "off: no GPU")],
)
def test_without_a_binding_or_a_gpu_nothing_is_sampled(
    tmp_path: Path, nvml: Any, uuid: str | None, status: str
) -> None:
    with GpuMonitor(tmp_path / "gpu" / "rank0.csv", nvml, uuid) as monitor:
        pass
    assert monitor.status == status
    assert gpu_uses(tmp_path) == ()
    assert not (tmp_path / "gpu").exists()


def test_a_rank_on_a_cpu_has_no_monitor(tmp_path: Path) -> None:
    with monitor_of(tmp_path, 1, torch.device("cpu"), load_nvml()) as monitor:
        assert monitor.status == "off: no GPU"
    assert AllocatorPeaks(torch.device("cpu")).lap() == {}


def test_csv_is_stored_and_drawn_on_the_card(tmp_path: Path) -> None:
    """Two ranks, the second with fewer samples and a line that was cut off in the middle."""
    out = tmp_path / "work"
    (out / "adapter").mkdir(parents=True)
    (out / "adapter" / "x").write_text("weights")
    sampled(out / "gpu" / "rank0.csv", FakeNvml((1.0, 7.0, 4.0)))
    sampled(out / "gpu" / "rank1.csv", FakeNvml((2.0, 9.5)))
    with (out / "gpu" / "rank1.csv").open("a") as lines:
        lines.write("1700000000.0,NVIDIA")
    trained = store_training(report(out, peak_reserved_bytes=3 * GIB).model_dump_json(), out, Store(tmp_path / "store"))
    assert not out.exists()
    assert isinstance(trained.gpu_samples, Ref)
    assert trained.gpu_samples in trained.refs()
    assert [use.peak_used_bytes / GIB for use in trained.report.gpus] == [7.0, 9.5]
    page = card(Trained.model_validate_json(trained.model_dump_json())).markdown
    assert "2.00 GiB allocated, 3.00 GiB reserved" in page
    assert "9.50 of 24.00" in page
    assert "![GPUs over the run](data:image/svg+xml" in page
    picture = base64.b64decode(gpu_picture(Path(trained.gpu_samples.path)).split(",")[1]).decode()
    assert "memory in use (GiB)" in picture
    assert "rank 1" in picture


def test_without_samples_the_card_has_no_picture(tmp_path: Path) -> None:
    ref = Ref(kind="adapter", path="/a", sha256="0" * 64, n_bytes=1)
    assert "NVML" not in card(Trained(adapter=ref, report=report(tmp_path))).markdown
    assert gpu_picture(tmp_path) == ""


@pytest.mark.parametrize("n_torn", range(1, 75, 3))
def test_a_line_that_was_torn_costs_itself_and_not_the_run(tmp_path: Path, n_torn: int) -> None:
    """As a full disk tears one: the run that goes on appends to it."""
    path = tmp_path / "gpu" / "rank0.csv"
    for _ in range(2):
        with GpuMonitor(path, FakeNvml((5.0,)), "GPU-1", sample_s=60):
            pass
        path.write_text(path.read_text()[:-n_torn])
    with GpuMonitor(path, FakeNvml((7.0,)), "GPU-1", sample_s=60):
        pass
    (use,) = gpu_uses(tmp_path)
    assert use.peak_used_bytes == 7.0 * GIB
    assert gpu_picture(tmp_path / "gpu").startswith("data:")
