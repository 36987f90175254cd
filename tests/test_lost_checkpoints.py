"""A Run never begins again by itself: what its events tell of checkpoints is compared with what is there."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_checkpoint import make, save

from pipeline.errors import NotReadyError, StorageError
from pipeline.files import append_line, read_lines, write_json
from pipeline.lm.checkpoint import load_newest, load_weights, remove_old
from pipeline.lm.saver import Saver
from pipeline.run.folder import Run
from pipeline.run.saves import begin_anew, check_checkpoints, last_save
from pipeline.run.steps import READERS, leased_steps, list_steps, reading, step_folders

Pipeline = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A Run that has saved steps 0 and 5."""
    run = Run(tmp_path / "run")
    run.control.mkdir(parents=True)
    for step in (0, 5):
        run.event("save", step=step)
        run.checkpoint(step).mkdir(parents=True)
    return run


def test_checkpoints_that_are_there_or_never_were_are_no_loss(run: Run, tmp_path: Path) -> None:
    check_checkpoints(run)
    check_checkpoints(Run(tmp_path / "new"))
    shutil.rmtree(run.checkpoint(5))  # training goes on from the one that is left
    check_checkpoints(run)


def test_a_folder_that_is_gone_is_refused_with_the_last_save_and_a_remedy(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    with pytest.raises(StorageError, match=r"events.jsonl tells of one of step 5") as caught:
        check_checkpoints(run)
    assert f"touch {run.anew}" in str(caught.value)
    run.checkpoints.mkdir()  # a mount point without its disk
    with pytest.raises(StorageError):
        check_checkpoints(run)


def test_a_link_to_a_disk_that_is_not_mounted_is_not_ready(run: Run, tmp_path: Path) -> None:
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(tmp_path / "scratch")
    with pytest.raises(NotReadyError, match="which is not there"):
        check_checkpoints(run)


def test_verdicts_tell_of_saves_where_a_power_cut_took_the_events(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    run.events.unlink()
    check_checkpoints(run)  # nobody knows of any
    write_json(run.verdict("7", 0), {"stage": "pretrain", "verdict": "stopped", "step_at_end": 5, "time": 1.0})
    with pytest.raises(StorageError, match=r"attempts/7\.0 "):
        check_checkpoints(run)


def test_who_wants_it_begins_anew_and_only_once(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    run.anew.touch()
    check_checkpoints(run)
    begin_anew(run)
    assert not run.anew.exists()
    assert last_save(run) is None
    check_checkpoints(run)  # the next attempt too, as long as nothing was saved since
    run.event("save", step=0)
    with pytest.raises(StorageError, match="step 0"):
        check_checkpoints(run)


def test_the_chain_refuses_before_anything_runs_and_the_remedy_works(pipeline: Pipeline, micro: Path) -> None:
    root = micro.parent / "runs" / "micro"
    first = pipeline("submit", micro, "pretrain.max_steps=10")
    assert first.returncode == 0, first.stdout + first.stderr
    shutil.rmtree(root / "checkpoints")
    events = (root / "events.jsonl").read_bytes()
    for words in (["resume", root], ["submit", micro, "pretrain.max_steps=10"]):
        refused = pipeline(*words)
        assert refused.returncode == 4
        assert "Traceback" not in refused.stderr
        assert refused.stderr.count("error:") == 1
    assert (root / "events.jsonl").read_bytes() == events
    (root / "control" / "begin-anew").touch()
    again = pipeline("resume", root)
    assert again.returncode == 0, again.stdout + again.stderr
    assert list_steps(root / "checkpoints")[-1] == 10
    steps = [line["step"] for line in read_lines(root / "metrics.jsonl")]
    assert steps == sorted(set(steps))


# Names that are no checkpoints


def test_files_and_dangling_links_named_like_checkpoints_block_nothing(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").write_text("a file")
    (tmp_path / "step-00000010").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-0000000015").mkdir()  # another name for step 15
    assert load_newest(tmp_path, *make()) is None
    assert step_folders(tmp_path) == {}
    save(tmp_path, 5, 10, 15)
    assert list_steps(tmp_path) == [5, 10, 15]
    aside = {path.name.split(".")[0] for path in tmp_path.glob("*.aside")}
    assert aside == {"step-00000005", "step-00000010"}
    (tmp_path / "step-00000020").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-00000025").write_text("a file")
    loaded = load_newest(tmp_path, *make())
    assert loaded is not None
    assert loaded.path.name == "step-00000015"
    assert remove_old(tmp_path, 1) == [10]


def test_a_checkpoint_that_was_moved_to_another_disk_is_read_and_let_go(tmp_path: Path) -> None:
    folder, other = tmp_path / "checkpoints", tmp_path / "disk"
    save(folder, 0, 5, 10)
    (folder / "step-00000005").rename(other)
    (folder / "step-00000005").symlink_to(other)
    assert list_steps(folder) == [0, 5, 10]
    assert remove_old(folder, 1) == [5]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000000", "step-00000010"]


# Leases of readers


def test_retention_leaves_alone_what_is_read(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10)
    with reading(tmp_path / "step-00000005"):
        assert leased_steps(tmp_path) == {5}
        assert remove_old(tmp_path, 1) == []
    assert not (tmp_path / READERS).exists()
    assert remove_old(tmp_path, 1) == [5]


def test_a_lease_ends_by_itself(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10)
    write_json(tmp_path / READERS / "step-00000005.n1.1.x", {"until": 1.0})
    assert remove_old(tmp_path, 1) == [5]
    assert list((tmp_path / READERS).iterdir()) == []


def test_a_torn_lease_counts_from_when_it_was_written(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10)
    (tmp_path / READERS).mkdir()
    (tmp_path / READERS / "step-00000005.n1.1.x").touch()
    assert remove_old(tmp_path, 1) == []


def test_a_reader_that_comes_while_retention_renames_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 0, 5, 10)
    rename = Path.rename

    def rename_as_a_reader_comes(self: Path, target: Path) -> Path:
        if self.name == "step-00000005":
            write_json(tmp_path / READERS / "step-00000005.n1.1.x", {"until": 1e12})
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_as_a_reader_comes)
    assert remove_old(tmp_path, 1) == []
    assert list_steps(tmp_path) == [0, 5, 10]


def test_weights_are_read_under_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 0)
    seen = []
    monkeypatch.setattr("pipeline.lm.checkpoint.read_tensors", lambda *_: seen.append(leased_steps(tmp_path)))
    load_weights(tmp_path / "step-00000000", make()[0])
    assert seen == [{0}]


def test_a_folder_that_cannot_be_written_is_read_without_a_lease(tmp_path: Path) -> None:
    save(tmp_path, 0)
    (tmp_path / READERS).write_text("in the way")
    with reading(tmp_path / "step-00000000"):
        assert leased_steps(tmp_path) == set()


# Lines of a log that a killed writer has torn


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"b": ')
    append_line(path, {"c": 3})
    assert read_lines(path) == [{"a": 1}, {"c": 3}]


def test_a_rank_whose_record_is_torn_is_waited_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saver = Saver(tmp_path, {}, limit=0.2)
    (tmp_path / ".rank-00001.json").touch()
    with pytest.raises(StorageError, match="rank 1 has not written its part"):
        saver._record_of(1, tmp_path)
