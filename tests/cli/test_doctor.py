import json
from pathlib import Path

import pytest

from quire.cli import doctor, machine
from quire.cli import main as cli
from quire.cli.fit import SHAPES, fits

ARM = (
    "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor: 1\n"
)
X86 = "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu avx avx2 fma f16c avx512_vnni\n"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").write_bytes(b"GGUF")
    assert cli.main(["doctor", "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_json_has_all_parts(report: dict[str, object], tmp_path: Path) -> None:
    parts = [
        "quire",
        "python",
        "platform",
        "cpu",
        "vector_units",
        "kernels",
        "cores",
        "devices",
        "memory",
        "cache",
        "models",
        "fits",
    ]
    assert list(report) == parts
    assert report["models"] == [{"name": str(tmp_path / "models" / "a.gguf"), "bytes": 4}]
    assert 1 <= report["cores"]["usable"] <= report["cores"]["installed"]  # type: ignore[index]
    assert 0 < report["memory"]["available"] <= report["memory"]["total"]  # type: ignore[index]


def test_the_text_names_the_kernels_or_why_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "kernels   " in text and "SmolLM2 135M" in text


def test_cpus() -> None:
    assert (machine.cpu_model(ARM), machine.vector_units(ARM)) == ("Neoverse N1", ["asimd", "asimdhp", "asimddp"])
    assert machine.cpu_model(X86) == "Some CPU @ 3 GHz"
    assert machine.vector_units(X86) == ["avx", "f16c", "fma", "avx2", "avx512_vnni"]


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_sockets_nodes_and_gpus_are_counted_and_several_have_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 4, 5})
    for cpu in range(4):
        write(tmp_path, **{f"sys__devices__system__cpu__cpu{cpu}__topology__physical_package_id": f"{cpu // 2}\n"})
    for node, cpus in enumerate(("0-1,4", "2-3,5", "6-7")):
        write(
            tmp_path,
            **{
                f"sys__devices__system__node__node{node}__cpulist": cpus + "\n",
                f"sys__devices__system__node__node{node}__meminfo": f"Node {node} MemTotal:  8388608 kB\n",
            },
        )
    for gpu in range(2):
        write(tmp_path, **{f"proc__driver__nvidia__gpus__{gpu}__information": "Model: \t\t NVIDIA H200\nIRQ: 5\n"})
    found = machine.devices(tmp_path)
    nodes = [machine.NumaNode(cpus, 8 << 30) for cpus in (3, 2, 0)]
    assert found == machine.Devices(2, nodes, ["NVIDIA H200"] * 2)
    assert found.tensor_parallel_size == found.pipeline_parallel_size == 2
    text = doctor._describe_devices(
        {
            "sockets": found.sockets,
            "numa_nodes": [{"cpus": node.cpus, "memory": node.memory} for node in nodes],
            "gpus": found.gpus,
            "advice": found.advice,
        }
    )
    assert "3 NUMA nodes (3 CPUs with 8 GiB, 2 CPUs with 8 GiB, 0 CPUs with 8 GiB), 2 GPUs (NVIDIA H200)" in text
    assert "try --data-parallel-size 2, -tp 2 or -pp 2: an engine, a rank or a stage for each NUMA node" in text
    assert "an engine on each GPU with --data-parallel-size 2, or a larger model on all with -tp 2 or -pp 2" in text
    assert "; models larger than a GPU with --offload-weights" in text
    alone = machine.devices(tmp_path / "nowhere")
    assert (alone, alone.tensor_parallel_size) == (machine.Devices(1, [], []), 1)
    assert alone.advice == "-tp 1: all CPUs share one memory"


def test_a_container_s_limits_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        proc__self__cgroup="0::/app.slice/job\n",
        sys__fs__cgroup__cpu_DOT_max="400000 100000\n",
        sys__fs__cgroup__app_DOT_slice__cpu_DOT_max="150000 100000\n",
        sys__fs__cgroup__app_DOT_slice__job__cpu_DOT_max="max 100000\n",
        sys__fs__cgroup__app_DOT_slice__memory_DOT_max=f"{4 << 30}\n",
        sys__fs__cgroup__app_DOT_slice__memory_DOT_current=f"{2 << 30}\n",
        sys__fs__cgroup__app_DOT_slice__memory_DOT_stat=f"anon 5\ninactive_file {1 << 30}\n",
    )
    cores = machine.cores(tmp_path)
    assert (cores.quota, cores.usable) == (1.5, 1)
    assert machine.memory(tmp_path) == machine.MachineMemory(total=16 << 30, available=3 << 30, limit=4 << 30)


def test_an_older_container_s_limits_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        sys__fs__cgroup__cpu__cpu_DOT_cfs_quota_us="-1\n",
        sys__fs__cgroup__cpu__cpu_DOT_cfs_period_us="100000\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes="1000\n",
    )
    assert machine.cores(tmp_path).quota is None
    assert machine.memory(tmp_path) == machine.MachineMemory(total=16 << 30, available=8 << 30, limit=None)


def test_fits_is_weights_and_a_context() -> None:
    eight = {fit.bits: fit for fit in fits(8 << 30) if fit.shape is SHAPES[-1]}
    assert [eight[bits].fits for bits in ("q4", "q8", "f16")] == [True, False, False]
    assert SHAPES[-1].kv_bytes(4096) == 512 << 20  # 32 layers x 8 heads x 128 x 2 x 2 bytes = 128 KiB a token
    assert 15.5 < eight["f16"].needed / 2**30 < 15.8
