"""``drivetrain doctor``: checks the requirements of runs on this machine, and prints problems with advice."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain import ConfigurationError, DrivetrainError, PluginError, __version__
from drivetrain.plugin.backends import Finding, gpu_holders, visible_gpus
from drivetrain.plugin.installed import (
    Plugin,
    check_plugin,
    check_plugins,
    find_damaged_distributions,
    find_unknown_groups,
    install_commands,
    installed_versions,
    list_plugins,
    missing_runtimes,
)
from drivetrain.plugin.storage import Storage, put_directory
from drivetrain.plugin.warm import warm_servers
from drivetrain_console._commands.output import BAD, OK, Commands, add_command, emit, find_storage
from drivetrain_console._views.terminal import bytes_text, wrapped

__all__ = ["add_doctor"]

_PYTHONS = ((3, 10), (3, 13))
_LOCAL_PROBE_BYTES = 64 << 20
_REMOTE_PROBE_BYTES = 8 << 20
_MIN_BYTES_PER_S = 20e6
_MIN_MEMORY = 2 << 30
_MIN_SHARED_MEMORY = 256 << 20
_MIN_OPEN_FILES = 1024
_NVIDIA_SMI_S = 20.0
_CONNECT_S = 5.0


def add_doctor(commands: Commands) -> None:
    """Add ``doctor``."""
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        "check the requirements of runs on this machine; exit code 1 if there is a problem",
        "  drivetrain doctor\n  drivetrain doctor --storage-path s3://bucket/runs\n"
        "  drivetrain doctor --address ray=ray-head:6379",
    )
    parser.add_argument(
        "--storage-path", metavar="PATH", help="the storage path of runs (default: DRIVETRAIN_STORAGE_PATH)"
    )
    parser.add_argument(
        "--address",
        metavar="RUNTIME=ADDRESS",
        action="append",
        default=[],
        help="a runtime and the address of its cluster; repeatable (default: <RUNTIME>_ADDRESS)",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    addresses = dict(_parse_address(text) for text in arguments.address)
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _processors,
        _memory,
        _limits,
        _gpus,
        _backends,
        _frameworks,
        _plugins,
        partial(_storage, arguments.storage_path),
        _network,
        partial(_runtimes, addresses),
        _gpu_holders,
        _warm_servers,
    ]
    findings = []
    for check in checks:
        try:
            findings += list(check())
        except Exception as error:  # a check that fails must not prevent the other checks
            name = getattr(check, "func", check).__name__.strip("_")
            findings.append(Finding(name, "problem", f"the check failed: {type(error).__name__}: {error}"))
    problems = [finding for finding in findings if finding.status == "problem"]
    data = {"ok": not problems, "findings": [asdict(finding) for finding in findings]}
    emit(arguments, data, lambda: _text(findings))
    return BAD if problems else OK


def _parse_address(text: str) -> tuple[str, str]:
    runtime, _, address = text.partition("=")
    if not runtime or not address:
        raise ConfigurationError(f"doctor --address: expected RUNTIME=ADDRESS, such as ray=ray-head:6379, got {text!r}")
    return runtime, address


def _text(findings: list[Finding]) -> str:
    marks = {"ok": "ok", "warning": "WARN", "problem": "ERROR"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(wrapped(f"{marks[finding.status]:<5}  {finding.name:<{width}}  ", finding.found))
        if finding.advice:
            lines.append(wrapped(" " * (width + 9) + "-> ", finding.advice))
    counts = [sum(finding.status == status for finding in findings) for status in ("problem", "warning")]
    lines.append(f"problems: {counts[0]}, warnings: {counts[1]}" if any(counts) else "no problems found")
    return "\n".join(lines)


def _python() -> Iterator[Finding]:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.release()}, drivetrain {__version__}"
    low, high = _PYTHONS
    if sys.platform != "linux":
        yield Finding("system", "problem", found, "drivetrain requires Linux: use a Linux machine or container")
    elif not low <= sys.version_info[:2] <= high:
        tested = f"3.{low[1]} to 3.{high[1]}"
        yield Finding("system", "warning", found, f"use a tested Python version: {tested}")
    else:
        yield Finding("system", "ok", found)


def _processors() -> Iterator[Finding]:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"{usable} of {total} usable, load {load:.1f}"
    quota = _read_cgroup_value("cpu.max")
    if quota is not None and quota < usable:
        yield Finding("CPUs", "ok", f"{found}, limited to {quota:.1f} by the cgroup, which workers share evenly")
    elif load > 2 * usable:
        yield Finding("CPUs", "warning", found, "other processes are using the CPUs: timings will be unreliable")
    else:
        yield Finding("CPUs", "ok", found)


def _warm_servers() -> Iterator[Finding]:
    servers = warm_servers()
    if servers:
        found = f"{len(servers)}, with {bytes_text(sum(server.memory_bytes for server in servers))} of memory in total"
        yield Finding(
            "warm servers", "ok", found, "drivetrain warm status lists them, and drivetrain warm stop ends them"
        )


def _memory() -> Iterator[Finding]:
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0]) << 10
    total, free = facts["MemTotal"], facts["MemAvailable"]
    limit = _read_cgroup_value("memory.max")
    found = f"{bytes_text(free)} of {bytes_text(total)} available"
    if limit is not None and limit < total:
        free = min(free, int(limit) - int(_read_cgroup_value("memory.current") or 0))
        found += f", limited to {bytes_text(limit)} by the cgroup"
    low = free < _MIN_MEMORY
    yield Finding("memory", "warning" if low else "ok", found, "workers may be killed: free some memory" if low else "")
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total
        small = size < _MIN_SHARED_MEMORY
        advice = "data loaders with workers require more: start the container with --shm-size=8g" if small else ""
        yield Finding("shared memory", "warning" if small else "ok", f"/dev/shm of {bytes_text(size)}", advice)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES
    advice = f"runs with many workers require more: ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if low else ""
    yield Finding("open files", "warning" if low else "ok", f"limit of {soft} per process", advice)


def _gpus() -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("GPUs", "ok", "no NVIDIA GPUs (nvidia-smi is not installed)")
        return
    query = ["--query-gpu=index,name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run([program, *query], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        advice = "the driver may hang: check dmesg, restart the machine"
        yield Finding("GPUs", "problem", f"nvidia-smi did not respond within {_NVIDIA_SMI_S:g} s", advice)
        return
    if listed.returncode:
        message = (listed.stderr or listed.stdout).strip().partition("\n")[0]
        advice = "install or restart the NVIDIA driver; in a container, start it with --gpus all"
        yield Finding("GPUs", "problem", f"nvidia-smi failed: {message}", advice)
        return
    lines = listed.stdout.strip().splitlines()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = "; ".join(lines) + (f"; CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "")
    yield Finding(
        "GPUs",
        "ok" if visible_gpus() else "warning",
        found,
        "" if visible_gpus() else "all GPUs are hidden: unset CUDA_VISIBLE_DEVICES",
    )


def _gpu_holders() -> Iterator[Finding]:
    if holders := gpu_holders():
        yield Finding("GPUs in use", "ok", "; ".join(map(str, holders)))


def _frameworks() -> Iterator[Finding]:
    found = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    advice = 'install the framework that you train with, such as: pip install "drivetrain[torch]"' if not found else ""
    yield Finding("frameworks", "ok" if found else "warning", found or "none", advice)


def _plugins() -> Iterator[Finding]:
    names, broken = [], False
    for plugin, error in check_plugins():
        if error is None:
            names.append(f"{plugin.kind} {plugin.name}")
        else:
            broken = True
            advice = f"upgrade or uninstall {plugin.distribution}"
            yield Finding(f"plugin {plugin.name}", "problem", str(error), advice)
    for damaged in find_damaged_distributions():
        yield Finding("packages", "warning", damaged, "reinstall or uninstall it")
    for group in find_unknown_groups():
        found = f"{group.distribution} registers plugins in the unknown group {group.name!r}, which is ignored"
        yield Finding("plugins", "warning", found, group.advice)
    if not broken:
        yield Finding("plugins", "ok", ", ".join(names))


def _storage(path: str | None) -> Iterator[Finding]:
    runs = find_storage(path)
    if runs.is_local and (finding := _check_local_path(runs.root)) is not None:
        yield finding
        return
    size = _LOCAL_PROBE_BYTES if runs.is_local else _REMOTE_PROBE_BYTES
    name = f".drivetrain-doctor-{secrets.token_hex(4)}"
    probe = Storage(runs.filesystem, runs.path(name), runs.limits)
    try:
        with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
            Path(source, "probe").write_bytes(os.urandom(1 << 20) * (size >> 20))
            began = time.perf_counter()
            put_directory(probe, source, "data")
            probe.flush_to_disk("data")
            written = time.perf_counter()
            probe.get_directory("data", target)
            read = time.perf_counter()
            if Path(target, "probe").stat().st_size != size:
                raise DrivetrainError("the data that was read differs from the data that was written")
        probe.write_bytes("small", b"x")
        small = time.perf_counter() - read
    except (DrivetrainError, OSError) as error:
        advice = "fix the cause, or choose another --storage-path"
        yield Finding("storage", "problem", f"{runs.root} cannot be used: {error}", advice)
        return
    finally:
        with contextlib.suppress(DrivetrainError, OSError):
            probe.filesystem.delete(probe.root)
    where = " to the disk" if runs.is_local else ""
    rates = size / (written - began), size / (read - written)
    found = (
        f"{runs.root}: writes {rates[0] / 1e6:.0f} MB/s{where}, reads {rates[1] / 1e6:.0f} MB/s, a small file "
        f"takes {small * 1e3:.1f} ms"
    )
    slow = min(rates) < _MIN_BYTES_PER_S
    advice = "checkpoints will be slow: use checkpoint_upload_mode='async', or another storage" if slow else ""
    yield Finding("storage", "warning" if slow else "ok", found, advice)
    if runs.is_local:
        free = shutil.disk_usage(_existing(runs.root)).free
        full = free < 10 << 30
        advice = "free some space: drivetrain runs gc --dry-run lists checkpoints that can be deleted" if full else ""
        yield Finding("free space", "warning" if full else "ok", f"{bytes_text(free)} available for runs", advice)


def _check_local_path(root: str) -> Finding | None:
    """Return a finding if a local directory is not writable or, if it is missing, cannot be created; otherwise None."""
    parent = _existing(root)
    if os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK):
        return None
    problem = "is not writable" if os.path.isdir(parent) else "is a file"
    advice = "choose another --storage-path, set DRIVETRAIN_STORAGE_PATH, or fix the permissions"
    return Finding("storage", "problem", f"{root}: {parent} {problem}", advice)


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _network() -> Iterator[Finding]:
    host = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)})
    except OSError as error:
        advice = f"add {host} to /etc/hosts, or to DNS if runs use several machines"
        yield Finding("network", "warning", f"the hostname {host} cannot be resolved ({error})", advice)
        addresses = []
    reachable = [address for address in ["127.0.0.1", *addresses] if _can_connect(address)]
    unreachable = [address for address in ["127.0.0.1", *addresses] if address not in reachable]
    if unreachable:
        advice = "check the firewall and /etc/hosts: local processes must be able to connect to each other"
        yield Finding("network", "problem", f"cannot connect to a port on {', '.join(unreachable)}", advice)
    else:
        yield Finding("network", "ok", f"ports are reachable on {', '.join(dict.fromkeys(reachable))}")
    if external := [address for address in addresses if not address.startswith("127.")]:
        yield Finding("address", "ok", f"{host} is {', '.join(external)}")


def _can_connect(address: str) -> bool:
    try:
        with socket.create_server((address, 0)) as listener:
            listener.settimeout(_CONNECT_S)
            with socket.create_connection(listener.getsockname(), timeout=_CONNECT_S):
                listener.accept()[0].close()
            return True
    except OSError:
        return False


def _runtimes(addresses: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of the installed runtimes, and a problem for each configured runtime that is not installed."""
    installed = list_plugins("runtime")
    for plugin in installed:
        address = addresses.get(plugin.name) or os.environ.get(f"{plugin.name.upper()}_ADDRESS")
        yield from _diagnose(plugin, address)
    for name in sorted({*addresses, *missing_runtimes()} - {plugin.name for plugin in installed}):
        advice = "; ".join(install_commands(name)) or f"install the plugin that provides the runtime {name!r}"
        yield Finding(f"runtime {name}", "problem", "not installed", advice)


def _backends() -> Iterator[Finding]:
    for plugin in list_plugins("backend"):
        yield from _diagnose(plugin)


def _diagnose(plugin: Plugin, *arguments: Any) -> Iterator[Finding]:
    """Yield the findings of a plugin's ``diagnose()``. It skips a plugin that cannot be loaded."""
    try:
        diagnose = getattr(check_plugin(plugin), "diagnose", None)
    except PluginError:
        return
    try:
        findings = list(diagnose(*arguments)) if diagnose is not None else []
    except Exception as error:  # a plugin may raise any exception
        found = f"diagnose() raised {type(error).__name__}: {error}"
        advice = f"upgrade or uninstall {plugin.distribution}"
        findings = [Finding(f"{plugin.kind} {plugin.name}", "problem", found, advice)]
    yield from findings


def _read_cgroup_value(name: str) -> float | None:
    """Return the number in a file of this process's cgroup, such as ``memory.max``; None without a limit or a file."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        words = Path(f"/sys/fs/cgroup{group}", name).read_text().split()
        if words[0] == "max":
            return None
        return float(words[0]) / (float(words[1]) if len(words) > 1 else 1.0)
    except (OSError, ValueError, IndexError):
        return None
