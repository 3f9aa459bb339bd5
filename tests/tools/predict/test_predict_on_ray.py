"""`predict --address` on a real Ray: the bytes of one process, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("ray")
from ray_cluster import processes, two_nodes, wait_until
from test_predict import DIGITS

import raytrain_ddp.tools.predict.__main__ as command
from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.tools.predict.result_file import ResultFile

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def test_predict_on_a_cluster_writes_the_bytes_of_one_process_despite_kills(
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The driver is interrupted, then a worker kills itself in the second of its parts."""
    bomb = tmp_path / "bomb"
    config = TrainConfig(
        name="run",
        storage=str(tmp_path),
        steps=2,
        log=LogConfig(tensorboard=False),
        task=f"{Path(__file__).with_name('dying_task.py')}:DiesOnce",
        task_options={"bomb": str(bomb), "last": "200"},
    )
    fit_locally(config)
    pictures = tmp_path / "pictures.parquet"
    pq.write_table(pa.concat_tables([pq.read_table(DIGITS)] * 60), pictures)
    run, whole, out = (str(tmp_path / name) for name in ("run", "whole.parquet", "p.parquet"))
    command_line = [run, str(pictures), "--probabilities", "--layer", "head"]
    assert command.main([*command_line, "--device", "cpu", "--out", whole]) == 0

    write, written = ResultFile.write_part, list[int]()

    def interrupted(self: ResultFile, part: int, table: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        write(self, part, table)
        written.append(part)

    on_cluster = [*command_line, "--address", "auto", "--workers", "2", "--out", out]
    monkeypatch.setattr(ResultFile, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main(on_cluster)
    monkeypatch.setattr(ResultFile, "write_part", write)
    wait_until(lambda: not processes("ray::PartActor"))  # they would keep their devices
    assert len(list((tmp_path / ".p.parquet.predicting").glob("part-*"))) == 2
    bomb.touch()
    assert command.main(on_cluster) == 0
    assert not bomb.exists(), "no worker died"
    assert Path(out).read_bytes() == Path(whole).read_bytes()
    assert "starting 2 workers" in capsys.readouterr().err
