"""A second run finds compiled programs and chosen layouts, and compiles and times nothing."""

import os
import time

from marks import slow
from run_folders import ENTRY, assert_same_run, in_subprocess, read_json

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.running.environment import forget_small_programs

WORDS = (
    *("run", "--data.num_clients=3", "--run.rounds=2", "--run.plots=false"),
    *("--execution.devices=1", "--execution.clients_per_chunk=tuned"),
)
# Prints how many programs were asked for, and how many of them were found.
COUNTED = f"""
import atexit, collections
import jax.monitoring
from fedjax_dp.engine.execution import tuning

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name]))
try_one = tuning._try
tuning._try = lambda *args: counts.update(["timed"]) or try_one(*args)

@atexit.register
def show():
    asked, found = (
        counts[f"/jax/compilation_cache/{{name}}"]
        for name in ("compile_requests_use_cache", "cache_hits")
    )
    print("COUNTS", asked, found, counts["timed"])

{ENTRY}
"""


@slow
def test_a_second_run_compiles_and_times_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def ran(name):
        words = (*WORDS, "--output", str(tmp_path / name))
        done = in_subprocess(*words, program=COUNTED)
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("COUNTS"))
        return [int(word) for word in line.split()[1:]]

    asked, found, timed = ran("first")
    assert asked > found and timed == 2
    (layout,) = (tmp_path / "cache" / "fedjax_dp" / "programs" / "layouts").iterdir()
    asked, found, timed = ran("second")
    assert asked == found > 10 and timed == 0
    # The layout is a number in the run folder, so that a resumed run has the same bits.
    first, second = (load_config(tmp_path / name / "config.toml") for name in ("first", "second"))
    chosen = min(read_json(layout.parent, layout.name)["trials"], key=lambda t: t["seconds"])
    assert first.execution.clients_per_chunk == chosen["clients_per_chunk"]
    assert second.execution == first.execution
    assert_same_run(tmp_path / "first", tmp_path / "second")


def test_small_programs_that_were_used_last_stay(tmp_path):
    def program(name, size, age):
        (tmp_path / f"{name}-cache").write_bytes(bytes(size))
        used = tmp_path / f"{name}-atime"
        used.write_bytes(bytes(8))
        os.utime(used, (time.time() - age,) * 2)

    for age in range(5):
        program(f"small{age}", 1000, age)
    program("large", 100_000, 1000)
    # Of a process that was ended before it wrote the time.
    (tmp_path / "broken-cache").write_bytes(bytes(100_000))
    forget_small_programs(tmp_path, most=5)
    assert not (tmp_path / "broken-cache").exists()
    assert len(list(tmp_path.glob("small*"))) == 10
    forget_small_programs(tmp_path, most=2)
    names = {path.name for path in tmp_path.iterdir()} - {".lockfile"}
    assert names == {
        f"{n}-{kind}" for n in ("small0", "small1", "large") for kind in ("cache", "atime")
    }
    forget_small_programs(tmp_path / "none")
