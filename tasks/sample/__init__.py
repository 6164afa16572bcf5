"""Sample runs made on the spot: scripted agents debug small faulty packages for real and are recorded."""

from schemas.sample import SampleReport
from tasks.sample.generate import generate_samples

__all__ = ["SampleReport", "generate_samples"]
