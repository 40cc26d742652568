"""Versions, devices, memory, limits and settings of this process's machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft._torch import NEWEST, OLDEST
from weft.doctor.findings import Finding
from weft.options import host_memory
from weft.report.plan import human_bytes

VARIABLES = ("OMP_", "MKL_", "GLOO_", "NCCL_", "TORCH_", "CUDA_", "MASTER_", "KMP_", "GOMP_", "PYTORCH_")
LEAST_SHM = 2**30
LEAST_FILES = 4096


def check_machine() -> list[Finding]:
    return [*_versions(), *_devices(), _backends(), _threads(), *_memory(), _shared_memory(), _files(), _variables()]


def _versions() -> list[Finding]:
    others = []
    for name in ("transformers", "accelerate"):
        try:
            others.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    supported = f"PyTorch {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    return [
        Finding("OK", "host", f"{platform.node()}, {platform.system()} {platform.release()} {platform.machine()}"),
        Finding("OK", "python", f"{platform.python_version()}{''.join(', ' + other for other in others)}"),
        Finding("OK", "torch", f"{torch.__version__} (weft {weft.__version__} works with {supported})"),
    ]


def _devices() -> list[Finding]:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        gpus = list(Path("/proc/driver/nvidia/gpus").glob("*"))
        if gpus:
            advice = "install a CUDA build of PyTorch, or look at CUDA_VISIBLE_DEVICES and the driver's version"
            return [Finding("warn", "devices", f"{len(gpus)} NVIDIA GPU(s) that PyTorch cannot use: {built}", advice)]
        return [Finding("OK", "devices", f"CPU only ({built})")]
    count, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(index) for index in range(count)))
    findings = [Finding("OK", "devices", f"{count} x {names}")]
    if processes > count:
        text = f"{processes} processes on this host, and {count} GPUs"
        findings.append(Finding("FAIL", "devices", text, f"torchrun --nproc-per-node {count}"))
    return findings


def _backends() -> Finding:
    if not dist.is_available():
        return Finding("FAIL", "backends", "this PyTorch has no distributed package", "install an official build")
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    names = ", ".join(name for name, available in there.items() if available)
    if torch.cuda.is_available() and not there["nccl"]:
        return Finding("FAIL", "backends", f"{names or 'none'}; GPUs need nccl", "install a PyTorch build that has it")
    return Finding("OK" if names else "FAIL", "backends", names or "none", "" if names else "install an official build")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> Finding:
    cores, processes = usable_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = torch.get_num_threads()
    text = f"{threads} a process, {processes} process{'es' * (processes > 1)} on this host, {cores} cores usable"
    if threads * processes > cores:
        advice = f"OMP_NUM_THREADS={max(1, cores // processes)}, or more cores for this job"
        return Finding("warn", "threads", f"{text}: they take turns", advice)
    if not torch.cuda.is_available() and 2 * threads * processes <= cores:
        advice = f"OMP_NUM_THREADS={cores // processes} (torchrun sets 1 where nothing is set)"
        return Finding("warn", "threads", f"{text}: cores stay idle", advice)
    return Finding("OK", "threads", text)


def _memory() -> list[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, free = host_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    text = f"{human_bytes(total)}, {human_bytes(free)} available"
    findings = [Finding("OK", "memory", text)]
    if limit < total:
        findings = [Finding("OK", "memory", f"{text}; a control group allows {human_bytes(limit)}")]
    if free < 0.1 * total:
        findings.append(Finding("warn", "memory", "less than a tenth is available", "see what else runs here"))
    return findings


def _shared_memory() -> Finding:
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("OK", "shm", "no /dev/shm here")
    text = f"/dev/shm {human_bytes(total)}, {human_bytes(free)} free"
    if free < LEAST_SHM:
        advice = "DataLoader workers and NCCL share memory there: give the container more (docker run --shm-size=8g)"
        return Finding("warn", "shm", text, advice)
    return Finding("OK", "shm", text)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    text = "no limit" if unlimited else f"{soft} may be open at once"
    if not unlimited and soft < LEAST_FILES:
        most = "" if hard == resource.RLIM_INFINITY else f" (up to {hard})"
        return Finding("warn", "files", text, f"every peer takes some: ulimit -n 65536{most}")
    return Finding("OK", "files", text)


def _variables() -> Finding:
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return Finding("OK", "variables", " ".join(shown) or "none that matter are set")
