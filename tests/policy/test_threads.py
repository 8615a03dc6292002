import os
import subprocess
import sys

from raymoe.policy.threads import SPIN_COUNT, thread_environment


def test_a_process_with_this_environment_computes_with_so_many_threads():
    code = "import torch; print(torch.get_num_threads())"
    for threads in (1, 2):
        environment = {**os.environ, **thread_environment(threads)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert int(done.stdout) == min(threads, os.cpu_count() or 1)


def test_idle_threads_wait_a_bounded_time():
    assert thread_environment(2)["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
    assert 0 < SPIN_COUNT < 100_000, "OpenMP's own default is 300,000"
