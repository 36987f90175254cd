"""Containers on a real Slurm: what srun's --container-… options do, and what they leave behind.

True of Pyxis with Enroot, and of what stands in for it here: the head of the tests' output says which of them ran.
"""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm
from slurm_containers import pyxis
from slurm_processes import wait_until
from test_harness import wait_for_text

NOBODY = 65534


class Srun:
    """srun on the private Slurm, in a folder, with an image."""

    def __init__(self, slurm: PrivateSlurm, image: Path, folder: Path) -> None:
        self.slurm, self.image, self.folder = slurm, image, folder

    def command(self, *words: str, image: str | None = None) -> list[str]:
        return ["srun", f"--container-image={image or self.image}", *words]

    def run(self, *words: str, image: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        env = self.slurm.env | variables
        return subprocess.run(
            self.command(*words, image=image), env=env, cwd=self.folder, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def __call__(self, *words: str, image: str | None = None, **variables: str) -> list[str]:
        """Run, and return the lines that were printed."""
        done = self.run(*words, image=image, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def fails(self, *words: str, image: str | None = None) -> str:
        """Run what cannot be set up, and return what was said of it."""
        done = self.run(*words, image=image)
        assert done.returncode == 1, done.stderr
        assert "Failed to invoke spank plugin stack" in done.stderr
        return done.stderr


@pytest.fixture
def srun(slurm: PrivateSlurm, small_image: Path, request: pytest.FixtureRequest) -> Srun:
    # Not in tmp_path, which is root's alone: some run as another user.
    folder = slurm.root / "work" / re.sub(r"\W", "-", request.node.name)
    folder.mkdir(parents=True)
    return Srun(slurm, small_image, folder)


def leftovers(slurm: PrivateSlurm, image: Path) -> list[str]:
    """List the loop devices of an image, and the mounts that the nodes have for containers."""
    loops = [
        path for path in Path("/sys/block").glob("loop*/loop/backing_file") if path.read_text().strip() == str(image)
    ]
    holders = [slurm.processes.known[node].pid for node in slurm.nodes]
    mounts = [line for pid in holders for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return [*map(str, loops), *(line for line in mounts if str(slurm.root) in line and "/hosts" not in line)]


def test_the_root_is_the_images_with_the_hosts_devices_and_processes(srun: Srun) -> None:
    lines = srun(
        "sh", "-c", "ls /; ls -d /usr/sbin/slurmd; ls /proc/1/stat /dev/null /sys/kernel; grep -w shm /proc/mounts"
    )
    assert {"bin", "opt", "proc", "tmp", "/proc/1/stat", "/dev/null"} <= set(lines)
    assert "/usr/sbin/slurmd" not in lines
    assert lines[-1].split()[1] == "/dev/shm"


def test_shared_memory_is_the_hosts(srun: Srun) -> None:
    name = f"/dev/shm/test-container-{os.getpid()}"
    Path(name).write_text("host\n")
    try:
        assert srun("cat", name) == ["host"]
    finally:
        Path(name).unlink()


def test_tmp_is_empty_and_gone_with_the_step(srun: Srun) -> None:
    assert srun("sh", "-c", "ls -A /tmp; echo x >/tmp/test-container; ls /tmp") == ["test-container"]
    assert srun("ls", "-A", "/tmp") == []
    assert not Path("/tmp/test-container").exists()


def test_tasks_of_a_step_share_one_container_on_each_node(srun: Srun) -> None:
    script = "touch /tmp/$SLURM_PROCID; until [ $(ls /tmp | wc -l) = 2 ]; do sleep 0.1; done; echo $(hostname) $(readlink /proc/self/ns/mnt) $(ls /tmp)"
    lines = [line.split() for line in srun("-N2", "--ntasks-per-node=2", "sh", "-c", script)]
    assert sorted((host, *ranks) for host, _, *ranks in lines) == [
        ("n1", "0", "1"), ("n1", "0", "1"), ("n2", "2", "3"), ("n2", "2", "3"),
    ]  # fmt: skip
    assert len({namespace for _, namespace, *_ in lines}) == 2


def test_steps_at_once_have_a_container_each(srun: Srun) -> None:
    script = "echo mine >>/file; sleep 1; cat /file"
    calls = [
        subprocess.Popen(
            srun.command("--nodelist=n1", "--container-writable", "sh", "-c", script),
            env=srun.slurm.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [call.communicate(timeout=60)[0] for call in calls] == ["mine\n"] * 3


def test_an_image_is_a_path_only_if_it_begins_like_one(srun: Srun) -> None:
    (srun.folder / "here.sqsh").symlink_to(srun.image)
    assert srun("echo", "started", image="./here.sqsh") == ["started"]
    assert "failed to import docker image" in srun.fails("true", image="here.sqsh")


def test_names_that_a_shell_would_read_are_only_names(srun: Srun) -> None:
    folder = srun.folder / 'it\'s $(touch owned) & "x"'
    folder.mkdir()
    image = folder / "here.sqsh"
    image.write_bytes(srun.image.read_bytes())
    value = 'a "b" $(touch owned) `touch owned` \\ # x=y'
    script = 'printf "%s|%s" "$VALUE" "$1"'
    assert srun("--container-env=VALUE", "sh", "-c", script, "sh", value, image=str(image), VALUE=value) == [
        f"{value}|{value}"
    ]
    mounts = f"--container-mounts={srun.folder}/it's & x;y:/it's & x;y:ro"
    (srun.folder / "it's & x;y").mkdir()
    assert srun(mounts, "ls", "-d", "/it's & x;y") == ["/it's & x;y"]
    assert not list(srun.folder.rglob("owned"))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (None, "[ERROR] No such file or directory"),
        (0, "[ERROR] Invalid image format"),
        (5000, "File system corruption detected"),
    ],
)
def test_an_image_that_is_none(srun: Srun, size: int | None, said: str) -> None:
    image = srun.folder / "broken.sqsh"
    if size is not None:
        image.write_bytes(srun.image.read_bytes()[:size])
    message = srun.fails("true", image=str(image))
    assert said in message
    assert image.name in message


def test_an_image_that_the_user_may_not_read(srun: Srun) -> None:
    image = srun.folder / "secret.sqsh"
    image.write_bytes(srun.image.read_bytes())
    image.chmod(0o600)
    assert srun("echo", "root", image=str(image)) == ["root"]
    assert f"[ERROR] Invalid image format: {image}" in srun.fails(f"--uid={NOBODY}", "true", image=str(image))
    image.chmod(0o644)
    assert srun(f"--uid={NOBODY}", "echo", "nobody", image=str(image)) == ["nobody"]


@pytest.mark.parametrize(
    ("words", "code"),
    [(("sh", "-c", "exit 42"), 42), (("sh", "-c", "kill -9 $$"), 137), (("no-such-command",), 2), (("true",), 0)],
)
def test_exit_codes_pass_through(srun: Srun, words: tuple[str, ...], code: int) -> None:
    assert srun.run(*words).returncode == code


def test_mounts_are_made_where_they_are_asked_for(srun: Srun) -> None:
    (srun.folder / "data").mkdir()
    (srun.folder / "file").write_text("text\n")
    mounts = f"{srun.folder}/data:/new/data,{srun.folder}/file:/etc/file:ro,{srun.folder}/data:/tmp/again:rw"
    script = "cat /etc/file; touch /new/data/made /tmp/again/too; echo >/etc/file || echo refused"
    assert srun(f"--container-mounts={mounts}", "sh", "-c", script) == ["text", "refused"]
    assert sorted(path.name for path in (srun.folder / "data").iterdir()) == ["made", "too"]


def test_a_read_only_mount_and_one_without_a_target(srun: Srun) -> None:
    data = srun.folder / "data"
    data.mkdir()
    assert "Read-only file system" in srun.run(f"--container-mounts={data}:/data:ro", "touch", "/data/x").stderr
    assert srun(f"--container-mounts={data}", "touch", str(data / "x")) == []
    assert (data / "x").exists()


def test_mounts_that_cannot_be(srun: Srun) -> None:
    said = srun.fails("--container-mounts=/no/such:/data", "true")
    assert "--container-mounts: source path does not exist" in said
    done = srun.run("--container-mounts=/tmp:", "true")
    assert done.returncode != 0
    assert "--container-mounts: invalid format: /tmp:" in done.stderr


def test_home_is_an_empty_folder_unless_it_is_asked_for(srun: Srun) -> None:
    """Whatever HOME says: it is where the node's list of users has it."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert srun("sh", "-c", "pwd; ls -A $HOME; echo $HOME", HOME="/elsewhere") == [home, home]
    assert srun("--no-container-mount-home", "ls", "-A", home) == []
    assert sorted(srun("--container-mount-home", "ls", "-A", home)) == sorted(os.listdir(home))
    assert srun.run("--container-mount-home", "--no-container-mount-home", "true").returncode != 0


def test_the_working_directory_is_the_one_asked_for(srun: Srun) -> None:
    assert srun("--container-workdir=/opt/bin", "pwd") == ["/opt/bin"]
    assert "couldn't chdir to /no/such" in srun.fails("--container-workdir=/no/such", "true")


def test_the_images_environment_wins_unless_a_name_is_kept(srun: Srun) -> None:
    script = 'echo "$GREETING, $OTHER"'
    host = {"GREETING": "from the host", "OTHER": "passes"}
    assert srun("sh", "-c", script, **host) == ["from the image, passes"]
    assert srun("--container-env=NONE,GREETING", "sh", "-c", script, **host) == ["from the host, passes"]
    assert srun("--container-env=GREETING", "sh", "-c", script) == ["from the image, "]


def test_the_profile_of_the_image_is_read(srun: Srun) -> None:
    assert srun("sh", "-c", "echo $PROFILE", PROFILE="from the host") == ["read"]


def test_a_program_is_found_on_the_images_path(srun: Srun) -> None:
    assert srun("sh", "-c", "echo $PATH", PATH=os.environ["PATH"]) == ["/opt/bin:/bin"]
    assert srun("only-in-the-image") == ["found"]


@pytest.mark.parametrize("option", [["--container-readonly"], []])
def test_the_root_is_read_only(srun: Srun, option: list[str]) -> None:
    done = srun.run(*option, "touch", "/etc/new")
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr
    assert srun("--container-readonly", "sh", "-c", "touch /tmp/new /dev/shm && echo writable") == ["writable"]


def test_what_is_written_is_gone_with_the_step(srun: Srun) -> None:
    before = srun.image.stat().st_mtime
    assert srun("--container-writable", "sh", "-c", "echo x >/new && rm /etc/passwd && cat /new") == ["x"]
    assert srun("sh", "-c", "cat /new || ls /etc/passwd") == ["/etc/passwd"]
    assert srun.image.stat().st_mtime == before


def test_the_image_is_the_users_who_is_called_root_in_it(srun: Srun) -> None:
    data = srun.folder / "data"
    data.mkdir(mode=0o777)
    data.chmod(0o777)
    script = "id -u; stat -c %u /etc/passwd; echo x >>/etc/passwd; touch /data/mine; cat /proc/self/uid_map"
    options = (f"--uid={NOBODY}", "--container-writable", f"--container-mounts={data}:/data")
    lines = srun(*options, "--container-remap-root", "sh", "-c", script)
    assert [line.split() for line in lines] == [["0"], ["0"], ["0", str(NOBODY), "1"]]
    assert (data / "mine").stat().st_uid == NOBODY
    for option in (["--no-container-remap-root"], []):
        assert srun(f"--uid={NOBODY}", *option, "id", "-u") == [str(NOBODY)]


def test_root_in_a_container_is_not_root(srun: Srun) -> None:
    (srun.folder / "theirs").mkdir()
    mount = f"--container-mounts={srun.folder}/theirs:/theirs"
    done = srun.run(f"--uid={NOBODY}", "--container-remap-root", mount, "touch", "/theirs/x")
    assert "Permission denied" in done.stderr


def test_a_named_container_stays_on_its_node(srun: Srun) -> None:
    words = ("--nodelist=n2", "--container-name=kept", "--container-writable")
    assert srun(*words, "sh", "-c", "echo written >/file") == []
    assert srun(*words, "cat", "/file", image="/no/such.sqsh") == ["written"]
    assert "No such file" in srun.fails("--nodelist=n1", "--container-name=kept", "true", image="/no/such.sqsh")
    done = srun.slurm.run("srun", "--container-name=other", "true", check=False)
    assert 'a container with name "pyxis_other" does not exist, and --container-image is not set' in done.stderr


def end_by_cancel(slurm: PrivateSlurm, job: str) -> None:
    slurm.run("scancel", "--signal=KILL", "--full", job)


def end_by_requeue(slurm: PrivateSlurm, job: str) -> None:
    slurm.run("scontrol", "requeuehold", job)


def end_by_killing_all(slurm: PrivateSlurm, job: str) -> None:
    """Kill what runs on the node, the step's daemon first: nobody is left to tidy up."""
    node = slurm.job(job)["NodeList"]
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in slurm.pids_on(node)}
    for pid, name in sorted(names.items(), key=lambda item: "slurmstepd" not in item[1]):
        if not name.startswith("slurmd\0"):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [end_by_cancel, end_by_requeue, end_by_killing_all])
def test_a_step_that_is_killed_leaves_nothing(
    srun: Srun, small_image: Path, end: Callable[[PrivateSlurm, str], None]
) -> None:
    image = srun.folder / "own.sqsh"  # a named container of another test may still hold the common one
    image.write_bytes(small_image.read_bytes())
    before = leftovers(srun.slurm, image)
    log = srun.folder / "log"
    script = f"srun --container-image={image} sh -c 'echo started; sleep 300'"
    job = srun.slurm.submit(script, "--requeue", f"--output={log}")
    wait_for_text(log, "started")
    assert pyxis() or len(leftovers(srun.slurm, image)) > len(before)  # so that this would see some
    end(srun.slurm, job)
    wait_until("all mounts and loop devices to be gone", lambda: leftovers(srun.slurm, image) == before, 30)
    srun.slurm.run("scancel", job)
