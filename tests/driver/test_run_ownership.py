"""How a command ends that holds a run but is not training yet."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from faulty_storage import commit

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, read_events, run_storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.driver.run_ownership import owned
from raytrain_ddp.events import End, Note
from raytrain_ddp.messages import Event


def by_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def by_rays_handler() -> None:
    sys.exit(signal.SIGTERM)


@pytest.mark.parametrize("end", [by_signal, by_rays_handler])
def test_sigterm_before_training_ends_as_ctrl_c_does(end: object, tmp_path: Path):
    assert callable(end)
    config = TrainConfig(name="run", storage=str(tmp_path))
    folder = run_storage(config)
    folder.mkdir()
    folder.write_atomic("config.toml", b"")
    with pytest.raises(KeyboardInterrupt) as caught, owned(find_run(config), print):
        end()
    assert caught.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [each.event for each in read_events(folder)] == [End(143)]
    with owned(find_run(config), print):  # the lease was released
        pass


def test_other_exits_and_user_signal_handlers_are_unchanged(tmp_path: Path):
    config = TrainConfig(name="run", storage=str(tmp_path))
    with pytest.raises(SystemExit) as caught, owned(find_run(config), print):
        sys.exit(3)
    assert caught.value.code == 3
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with owned(find_run(config), print):
            by_signal()
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_reports_the_step_after_which_the_same_command_continues(tmp_path: Path):
    config = TrainConfig(name="run", storage=str(tmp_path))
    folder = run_storage(config)
    folder.mkdir()
    folder.write_atomic("config.toml", b"")
    shown: list[Event] = []

    def stop() -> None:
        store = checkpoint_store(folder)
        store.claim(None, {})
        commit(store, 20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), owned(find_run(config), shown.append):
        stop()
    assert shown == [End(130), Note("run the same command again to continue after step 20.")]
