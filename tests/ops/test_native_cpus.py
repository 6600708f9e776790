"""The number of threads follows the CPUs that the system grants."""

import os

import pytest

from quire.ops.native.cpus import available_cpus, compute_threads

CPUS = len(os.sched_getaffinity(0))


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, CPUS),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, CPUS),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, min(CPUS, 1)),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "99900000 100000\n"}, CPUS),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
    ],
)
def test_quotas_of_control_groups_limit_the_cpus(tmp_path, files, expected):
    write(tmp_path, files)
    assert available_cpus(tmp_path) == expected


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (2, 2), (11, 11), (12, 11), (16, 15), (128, 127)])
def test_one_of_many_cpus_is_spared(tmp_path, monkeypatch, cpus, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert compute_threads(tmp_path) == expected
