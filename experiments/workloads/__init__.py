"""What arrives when: arrivals, lengths, texts and priorities, each from its own random stream."""

from .workload import Workload, WorkloadSettings, build_workload

__all__ = ["Workload", "WorkloadSettings", "build_workload"]
