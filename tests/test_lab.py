"""`weft lab`: what a script finds on its hosts, how failures end, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.cli.main import app, parse_memory, parse_speeds
from weft.lab import cluster, launch, limits, network
from weft.lab.check import check_links, measure
from weft.lab.cluster import Lab, Shape, check_machine
from weft.lab.errors import LabError
from weft.lab.network import NAMESPACES, Network

TIMEOUT = 60.0

# Every script starts by saying where it runs.
WHERE = """
import os, socket, sys, time
from pathlib import Path
directory = Path(sys.argv[1])
host = socket.gethostname()
print("lab", Path("/proc/self/cgroup").read_text().split("/weft")[1].split("/")[0], flush=True)
"""
JOIN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
"""
FACTS = """
def received(interface):
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if interface in line)
    return int(line.split(":")[1].split()[0])
before = received("eth0"), received("lo")
tensor = torch.full((1 << 20,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print("sum", tensor.unique().tolist())
print("received", received("eth0") - before[0], received("lo") - before[1])
print("name", host)
print("address", socket.gethostbyname(host))
print("cores", *os.sched_getaffinity(0))
print("variables", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")))
print("arguments", sys.argv[2:])
dist.destroy_process_group()
"""
WAIT = """
(directory / f"ready-{host}").touch()
while not (directory / "go").exists():
    time.sleep(0.05)
"""
FAIL = """
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(600)
"""
FILL = """
while host == "host1" and len(list(directory.glob("filled-*"))) < 2:
    time.sleep(0.05)
block = bytearray((1200 if host == "host1" else 200) << 20)
for place in range(0, len(block), 4096):
    block[place] = 1
(directory / f"filled-{host}").touch()
"""


def missing() -> str:
    try:
        check_machine(Shape((1.0, 1.0)))
        limits.root()
    except LabError as error:
        return str(error)
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=TIMEOUT)
    return done.stderr


MISSING = missing()


def needs_lab(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.distributed(pytest.mark.skipif(bool(MISSING), reason=MISSING)(test))


class Started:
    """A `weft lab` of its own process, running a script with a directory as its first argument."""

    def __init__(self, directory: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(WHERE + script)
        command = ["python", str(directory / "train.py"), str(directory), *arguments]
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft.cli.main", "lab", *options, "--", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def said(self, host: int, what: str) -> str:
        found = re.findall(rf"^host{host} \| {what} (.*)$", self.output, re.MULTILINE)
        assert len(found) == 1, self.output
        return str(found[0])

    @property
    def name(self) -> str:
        return name_in(self.output)

    def wait_for_hosts(self, count: int) -> None:
        until(lambda: len(list(self.directory.glob("ready-*"))) == count, lambda: self.output)

    def go(self) -> int:
        (self.directory / "go").touch()
        return self.process.wait(TIMEOUT)

    def processes(self) -> list[str]:
        """Command lines that name this lab's directory: `weft lab`, the launchers, and the ranks."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{self.directory} " in words or f"{self.directory}/" in words:
                found.append(words)
        return found


@contextmanager
def started(directory: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> Iterator[Started]:
    lab = Started(directory, script, *options, arguments=arguments)
    try:
        yield lab
    finally:
        lab.process.kill()
        lab.process.wait(TIMEOUT)


def until(holds: Callable[[], bool], explain: Callable[[], object] = str, seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def name_in(output: str) -> str:
    found = re.search(r"^host0 \| lab (\d+)$", output, re.MULTILINE)
    assert found is not None, output
    return f"weft{found[1]}"


def traces(name: str) -> list[str]:
    """What there is of a lab on this machine."""
    places = [cluster.RUN / name, cluster.RUN / "hosts" / name, limits.root() / name, *NAMESPACES.glob(f"{name}-*")]
    return [str(path) for path in places if path.exists()]


@needs_lab
def test_a_script_finds_a_cluster_of_hosts(tmp_path: Path) -> None:
    options = ["--hosts", "2", "--gbit", "1,0.5", "--memory", "1.5GiB", "--cores", "1"]
    with started(tmp_path, JOIN + FACTS, *options, arguments=("--rate", "a b")) as lab:
        assert lab.process.wait(TIMEOUT) == 0, lab.output
        for host in (0, 1):
            assert lab.said(host, "sum") == "[3.0]"
            assert lab.said(host, "name") == f"host{host}"
            assert lab.said(host, "address") == f"10.77.0.{host + 1}"
            assert lab.said(host, "variables") == f"{host} 2 10.77.0.1"
            assert lab.said(host, "arguments") == "['--rate', 'a b']"
            over_the_link, locally = map(int, lab.said(host, "received").split())
            assert over_the_link >= 1 << 22 > 100 * locally
        assert len({lab.said(0, "cores"), lab.said(1, "cores")}) == 2
        assert {len(lab.said(host, "cores").split()) for host in (0, 1)} == {1}
        assert all(line.startswith(("lab: ", "host0 | ", "host1 | ")) for line in lab.output.splitlines())
        assert not traces(lab.name)
        assert not lab.processes()


@needs_lab
def test_each_link_has_the_speed_asked_for() -> None:
    with Lab(Shape((0.3, 0.3, 0.15), oversubscribe=True)) as lab:
        expected = pytest.approx([0.15, 0.3, 0.15], rel=0.05)  # every host from the one before it
        for _ in range(3):  # senders that a busy machine keeps from sending say nothing of the link
            received = [rate.wire for rate in measure(lab, "raw", 1.0)]
            if received == expected:
                break
    assert received == expected


@needs_lab
def test_a_failing_rank_ends_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    code = run_here(tmp_path, FAIL, Shape((1.0, 1.0)), monkeypatch)
    assert time.monotonic() - begun < 30
    assert code == 1  # torchrun's own, whatever that of its rank
    output = capsys.readouterr().out
    assert re.search(r"^host1 \| .*exitcode *: 7", output, re.MULTILINE)
    assert not traces(name_in(output))


@needs_lab
def test_a_host_beyond_its_memory_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = Shape((1.0, 1.0, 1.0), memory=2**30, oversubscribe=True)
    assert run_here(tmp_path, FILL, shape, monkeypatch) == 1
    output = capsys.readouterr().out
    assert "lab: host1 passed its memory limit of 1.00 GiB, and its process was killed" in output
    assert re.findall(r"(host\d) passed", output) == ["host1"]
    assert sorted(path.name for path in tmp_path.glob("filled-*")) == ["filled-host0", "filled-host2"]
    assert not traces(name_in(output))


def run_here(directory: Path, script: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> int:
    """In this process, so that hosts get less time to end than `weft lab` gives them."""
    assert launch.GRACE <= 20
    monkeypatch.setattr(launch, "GRACE", 1.0)
    (directory / "train.py").write_text(WHERE + script)
    return launch.run_script(["python", str(directory / "train.py"), str(directory)], shape)


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_lab_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, WAIT) as lab:
        lab.wait_for_hosts(2)
        name = lab.name
        assert traces(name)
        lab.process.send_signal(number)
        assert lab.process.wait(30) != 0
        assert not traces(name)
        assert not lab.processes()


@needs_lab
def test_a_killed_lab_ends_and_the_next_cleans_up_while_others_run_on(tmp_path: Path) -> None:
    with started(tmp_path / "first", WAIT) as first, started(tmp_path / "second", WAIT, "--hosts", "1") as second:
        first.wait_for_hosts(2)
        second.wait_for_hosts(1)
        of_first = traces(first.name)
        assert first.name != second.name
        second.process.kill()
        second.process.wait(TIMEOUT)
        until(lambda: not second.processes(), second.processes, seconds=5)
        with Lab(Shape((1.0,))) as third:
            assert third.name != first.name
            assert third.name == second.name or not traces(second.name)
        assert not traces(third.name)
        assert not traces(second.name)
        assert traces(first.name) == of_first
        assert first.go() == 0, first.output
        assert not traces(first.name)


@needs_lab
def test_two_labs_at_once_both_succeed(tmp_path: Path) -> None:
    script = JOIN + WAIT + FACTS
    with started(tmp_path / "first", script) as first, started(tmp_path / "second", script) as second:
        first.wait_for_hosts(2)
        second.wait_for_hosts(2)
        names = [first.name, second.name]
        assert first.go() == 0, first.output
        assert second.go() == 0, second.output
        assert all(lab.said(host, "sum") == "[3.0]" for lab in (first, second) for host in (0, 1))
        assert not [trace for name in names for trace in traces(name)]


@needs_lab
def test_the_links_deliver_their_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["lab", "--check", "--hosts", "2", "--gbit", "1"])
    output = capsys.readouterr().out
    assert ended.value.code == 0, output
    assert re.findall(r"^(host\d): .* ok ", output, re.MULTILINE) == ["host0", "host1", "host0", "host1"]


@needs_lab
def test_links_slower_than_asked_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = network._limit
    monkeypatch.setattr(network, "_limit", lambda where, interface, gbit: limit(where, interface, 0.8 * gbit))
    assert not check_links(Shape((0.5, 0.5)), seconds=0.5)
    assert "OFF BY MORE THAN 5 %" in capsys.readouterr().out


@needs_lab
def test_a_lab_that_cannot_be_set_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: limits.Group, memory: int | None) -> None:
        raise LabError("no group")

    monkeypatch.setattr(limits.Group, "create", fail)
    lab = Lab(Shape((1.0, 1.0)))
    with pytest.raises(LabError, match="no group"), lab:
        pass
    assert not traces(lab.name)


@pytest.mark.parametrize(
    ("scripts", "code"),
    [
        (["exit 0", "exit 0"], 0),
        (["exec sleep 600", "exit 7"], 7),
        (["sleep 0.5; exit 5", "exit 3"], 3),
        (["kill -KILL $$", "exec sleep 600"], 137),
    ],
)
def test_the_exit_code_is_that_of_the_first_host_to_fail(
    scripts: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 1.0)
    lab = Lab(Shape((1.0, 1.0)))
    lab.processes = [subprocess.Popen(["sh", "-c", script]) for script in scripts]
    begun = time.monotonic()
    assert launch._wait(lab, lab.processes) == code
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("command", "started_as"),
    [
        ("python train.py -v", [sys.executable, "train.py", "-v"]),
        ("python -m package -v", [sys.executable, "-m", "package", "-v"]),
        ("/other/bin/python3 train.py", ["/other/bin/python3", "train.py"]),
        ("train.py -v", [sys.executable, "train.py", "-v"]),
        ("./program -v", [sys.executable, "--no-python", "./program", "-v"]),
        ("python -u train.py", [sys.executable, "--no-python", sys.executable, "-u", "train.py"]),
    ],
)
def test_torchrun_starts_the_command(command: str, started_as: list[str]) -> None:
    lab = Lab(Shape((1.0, 1.0)))
    lab.network = Network("weft-test", [1.0, 1.0])
    words = launch.torchrun(command.split(), lab=lab, host=1, processes=3)
    place = "-m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 3"
    meeting = f"--master-addr 10.77.0.1 --master-port {launch.PORT}"
    assert words[1:13] == f"{place} {meeting}".split()
    assert [words[0], *words[13:]] == started_as


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gbit fast -- python a.py", "--gbit fast: one number"),
        ("--gbit 0 -- python a.py", "--gbit 0: one number"),
        ("--gbit nan -- python a.py", "--gbit nan: one number"),
        ("--gbit 1, -- python a.py", "--gbit 1,: one number"),
        ("--gbit=-1 -- python a.py", "--gbit -1: one number"),
        ("--hosts 2 --gbit 1,1,1 -- python a.py", "3 speeds for 2 hosts"),
        ("--hosts 0 -- python a.py", "--hosts 0: at least 1"),
        ("--cores 0 -- python a.py", "--cores 0: at least 1"),
        ("--processes 0 -- python a.py", "--processes 0: at least 1"),
        ("--memory much -- python a.py", "--memory much: bytes with a unit"),
        ("--memory 0.5 -- python a.py", "--memory 0.5: bytes with a unit"),
        ("--memory 1KiB -- python a.py", "1024 bytes of memory a host are too few"),
        ("--hosts 200 --cores 1000 -- python a.py", "need 200000 cores"),
        ("--hosts 255 --oversubscribe -- python a.py", "255 hosts: there are addresses for 254"),
        ("--hosts 1 --check", "one host has no link"),
        ("--hosts 2", "there is nothing to run"),
    ],
)
def test_bad_input_is_one_line_and_makes_nothing(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster, "NEEDED", {})
    monkeypatch.setattr(cluster, "RUN", tmp_path / "run")
    monkeypatch.setattr(cluster, "PREFIX", "weft-test")  # nothing of a real lab, should one be made
    with pytest.raises(SystemExit) as ended:
        app(["lab", *arguments.split()])
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.out == ""
    assert words in output.err
    assert output.err.startswith("weft lab: ")
    assert output.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_machine_without_iproute2_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster, "RUN", tmp_path / "run")
    monkeypatch.setattr(cluster, "PREFIX", "weft-test")  # nothing of a real lab, should one be made
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        app(["lab", "--", "python", "a.py"])
    assert ended.value.code == 2
    assert re.fullmatch(r"weft lab: .*apt-get install iproute2\)\n", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_lab_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root: run it with sudo"):
        check_machine(Shape((1.0,)))


def test_speeds_are_one_for_all_or_one_a_host() -> None:
    assert parse_speeds("2.5", 3) == (2.5, 2.5, 2.5)
    assert parse_speeds("1,0.5", 2) == (1.0, 0.5)
    assert parse_speeds("1", 1) == (1.0,)


def test_memory_is_bytes_with_a_unit() -> None:
    assert parse_memory(None) is None
    assert parse_memory("1.5GiB") == 3 * 2**29


def test_the_remains_of_a_killed_lab_are_removed_and_a_running_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = abandoned_names(tmp_path, monkeypatch)
    (tmp_path / "weft0").touch()
    (tmp_path / "weft1").touch()
    with (tmp_path / "weft0").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        cluster.remove_abandoned()
    assert removed == ["weft1"]
    assert (tmp_path / "weft0").exists()
    assert not (tmp_path / "weft1").exists()


def test_a_name_taken_anew_while_looking_at_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = abandoned_names(tmp_path, monkeypatch)
    path = tmp_path / "weft0"
    path.touch()
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        path.unlink()
        path.touch()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    cluster.remove_abandoned()
    assert removed == []
    assert path.exists()


def test_a_lab_may_end_while_another_looks_at_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = abandoned_names(tmp_path, monkeypatch)
    path = tmp_path / "weft0"
    path.touch()
    opened = os.open

    def late(file: Path, flags: int) -> int:
        path.unlink()
        return opened(file, flags)

    monkeypatch.setattr(os, "open", late)
    cluster.remove_abandoned()
    assert removed == []


def abandoned_names(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names whose remains are removed from now on, instead of removing them."""
    removed: list[str] = []
    monkeypatch.setattr(cluster, "RUN", run)
    monkeypatch.setattr(cluster, "_remove", removed.append)
    return removed
