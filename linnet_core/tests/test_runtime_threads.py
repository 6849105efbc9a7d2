"""Thread budgets from made-up machines: what a container allows, not what the host has."""

import os

import pytest

from linnet.errors import RequestError
from linnet.runtime.threads import available_cores, cpu_quota, thread_budget


@pytest.fixture
def machine(tmp_path):
    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write


V2 = {"proc/self/cgroup": "0::/\n"}
V1 = {"proc/self/cgroup": "9:memory:/job\n4:cpu,cpuacct:/job\n"}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("150000 100000", 1),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 8),
        ("800000", 8),
        ("nonsense", 8),
    ],
)
def test_cgroup_v2(machine, limit, expected):
    root = machine({**V2, "sys/fs/cgroup/cpu.max": limit + "\n"})
    assert thread_budget(root=root, affinity=8) == expected


def test_the_tightest_ancestor_counts(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "300000 100000",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
        }
    )
    assert cpu_quota(root) == 3.0


def test_a_group_path_of_the_host_falls_back_to_the_mount(machine):
    root = machine(
        {"proc/self/cgroup": "0::/../../kubepods/x\n", "sys/fs/cgroup/cpu.max": "200000 100000"}
    )
    assert cpu_quota(root) == 2.0


@pytest.mark.parametrize("folder", ["cpu,cpuacct/job", "cpu/job", "cpu"])
@pytest.mark.parametrize(("quota", "expected"), [("350000", 3), ("-1", 8)])
def test_cgroup_v1(machine, folder, quota, expected):
    base = f"sys/fs/cgroup/{folder}"
    root = machine({**V1, f"{base}/cpu.cfs_quota_us": quota, f"{base}/cpu.cfs_period_us": "100000"})
    assert thread_budget(root=root, affinity=8) == expected


def test_affinity_is_a_limit_too(machine):
    root = machine({**V2, "sys/fs/cgroup/cpu.max": "900000 100000"})
    assert thread_budget(root=root, affinity=2) == 2


def test_no_limits_at_all(tmp_path):
    assert thread_budget(root=tmp_path, affinity=5) == 5


def test_an_option_wins(machine):
    root = machine({**V2, "sys/fs/cgroup/cpu.max": "150000 100000"})
    assert thread_budget(3, root=root, affinity=2) == 3


@pytest.mark.parametrize("option", [0, -1, True, 1.5])
def test_an_option_is_a_whole_number_from_one(option):
    with pytest.raises(RequestError, match=r"threads is .* from 1 to 1024"):
        thread_budget(option)


def test_this_machine():
    assert 1 <= thread_budget() <= available_cores() <= (os.cpu_count() or 1)


def test_an_absurd_number_is_refused():
    with pytest.raises(RequestError, match="threads is 100000; it must be a whole number from 1"):
        thread_budget(100_000)
