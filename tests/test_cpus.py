"""Containers that may use only some of the processors."""

import os
from pathlib import Path

import pytest

from streamq import cpus


class TestCpus:
    """How many processes a run has by default."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """64 CPUs, and groups as the test writes them."""
        monkeypatch.setattr(cpus, "GROUPS", tmp_path)
        monkeypatch.setattr(cpus, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
        monkeypatch.setattr(os, "process_cpu_count", lambda: 40, raising=False)

    def test_those_that_we_may_run_on_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cpus.usable_cpus() == 40
        monkeypatch.delattr(os, "process_cpu_count")
        assert cpus.usable_cpus() == 48
        monkeypatch.delattr(os, "sched_getaffinity")
        assert cpus.usable_cpus() == 64
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert cpus.usable_cpus() == 1

    @pytest.mark.parametrize(
        ("own", "said", "expected"),
        [
            ("0::/", {"cpu.max": "200000 100000"}, 2),
            ("0::/", {"cpu.max": "150000 100000"}, 2),
            ("0::/", {"cpu.max": "1000 100000"}, 1),
            ("0::/", {"cpu.max": "max 100000"}, 40),
            ("0::/", {"cpu.max": "nonsense"}, 40),
            ("0::/", {"cpu.max": "100000 0"}, 40),
            ("0::/", {}, 40),
            ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000"}, 3),
            ("0::/host/path", {"cpu.max": "200000 100000"}, 2),
            (
                "3:cpu,cpuacct:/",
                {
                    "cpu,cpuacct/cpu.cfs_quota_us": "250000",
                    "cpu,cpuacct/cpu.cfs_period_us": "100000",
                },
                3,
            ),
            ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "1000"}, 40),
            ("3:memory:/\n4:cpuset:/", {"cpu.max": "100000 100000"}, 40),
        ],
    )
    def test_what_a_container_may_use_counts(
        self, tmp_path: Path, own: str, said: dict[str, str], expected: int
    ) -> None:
        (tmp_path / "own").write_text(own + "\n")
        for name, text in said.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")

        assert cpus.usable_cpus() == expected
