"""The key of a cause: the same for one fault wherever and whenever it strikes, another for another fault."""

from __future__ import annotations

import time

import pytest

from pipeline.run.cause import cause_of, is_temporary, may_be_a_machine
from pipeline.units import size

SAME = {
    "ranks": ("rank 3: ValueError: bad batch", "rank 1011: ValueError: bad batch"),
    "a single rank": ("rank 3: ValueError: bad batch", "ValueError: bad batch"),
    "lists of ranks": ("n1: did not hear of rank 1, 2, 3 within 30 s", "n7: did not hear of rank 5 within 180 s"),
    "hosts": ("n1: no GPU", "gpu-a01-17.cluster.example.org: no GPU"),
    "lists of hosts": ("n1, n2: no container: failed", "n3, n5, n9, n10 and 8 more: no container: failed"),
    "all hosts": ("all 2 nodes: torch is built without CUDA", "n17: torch is built without CUDA"),
    "hosts of a cloud": ("ip-10-0-0-12: no GPU", "ip-10-0-113-7: no GPU"),
    "hosts with hashes": ("worker-7f9c4-xk2p: no GPU", "worker-b41aa-00q: no GPU"),
    "findings of several nodes": ("n1: no GPU; drain it\nn2: no GPU; drain it", "n9: no GPU; drain it"),
    "findings in another order": ("n1: no GPU\nn2: no disk", "n3: no disk\nn4: no GPU"),
    "GPUs": ("GPU 3: 2 uncorrected ECC errors; GPU 5: 17 uncorrected ECC errors", "GPU 0: 1 uncorrected ECC errors"),
    "pids": ("rank 3 on n1 (process 4711) is gone", "rank 40 on n12 (process 99) is gone"),
    "object addresses": ("TypeError: <Foo object at 0x7fa2b3c4d5e0>", "TypeError: <Foo object at 0x55d0aabbccdd>"),
    "IPv4 and ports": ("connect to 10.0.0.1:29500 failed", "connect to 192.168.113.7:41233 failed"),
    "IPv6": ("connect to [fe80::abcd:ef]:1 failed", "connect to [2001:db8::1]:29500 failed"),
    "times": ("[2026-11-30T13:20:54] ERROR: lost", "[2027-01-02T03:04:05] ERROR: lost"),
    "dates in words": ("Mon Nov  3 12:00:01 2026: lost", "Thu May 14 01:59:59 2027: lost"),
    "durations": ("no answer within 30 s", "no answer within 2 min"),
    "sizes": (f"the disk has {size(967_000_000)} free", f"the disk has {size(1_070_000_000)} free"),
    "binary sizes": ("tried to allocate 2.50 GiB", "tried to allocate 512.00 MiB"),
    "percent": ("98.5% full", "99 % full"),
    "temporary files": (
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/tmpqwerty/x.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/tmpasdfgh_/x.bin'",
    ),
    "other temporary places": ("cannot map /dev/shm/torch_abcd_efg", "cannot map /dev/shm/torch_zzyx"),
    "names of tempfile": ("cannot open tmpabcdefgh", "cannot open tmpzyxwvuts"),
    "files beside the target": ("cannot rename step-4.tmp", "cannot rename step-10.tmp"),
    "job folders": ("no space in /scratch/job.4711/cache", "no space in /scratch/job.99/cache"),
    "hashes": ("digest deadbeefcafe differs", "digest 0123456789ab differs"),
    "UUIDs": ("GPU-b5e1a1b2-0000-4c3d-9e8f-aabbccddeeff is lost", "GPU-00000000-1111-2222-3333-444444444444 is lost"),
    "floats": ("loss 1.7e-05 is off", "loss -3.25E+10 is off"),
    "digits of others": ("rank ٣: bad", "rank ١٢: bad"),
    "colours": ("\x1b[31mrank 3: bad\x1b[0m", "rank 4: bad"),
    "white space and case": ("Rank 3:  Bad\tbatch", "rank 4: bad batch"),
    "where it was cut": ("x: " + "ab " * 60 + "end", "x: " + "ab " * 60 + "en"),
    "bracketed ranks": ("[rank12]: RuntimeError: bad", "[rank3]: RuntimeError: bad"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_chance_does_not_make_one_cause_look_like_two(name: str) -> None:
    first, second = SAME[name]
    assert cause_of("crash", first) == cause_of("crash", second)


OTHER = [
    "rank 3: ValueError: bad batch",
    "rank 3: KeyError: bad batch",
    "rank 3: ValueError: bad weights",
    "rank 3 on n1 (process 4711) is gone: it was killed, or ended by itself; after step 4",
    "n1: no GPU",
    "n1: no container: failed",
    "FileNotFoundError: No such file or directory: '/shared/data/train.bin'",
    "FileNotFoundError: No such file or directory: '/shared/other/train.bin'",
    "ended with status 1 and left no verdict",
    "killed (SIGKILL); often the machine ran out of memory",
    "ModuleNotFoundError: No module named 'torch'",
    "ModuleNotFoundError: No module named 'numpy'",
    "No space left on device",
    "Permission denied",
    "may not be read",  # no month
    "the temperature of GPU 3",  # no temporary file
    "",
]


def test_different_causes_have_different_keys() -> None:
    keys = [cause_of("crash", reason) for reason in OTHER]
    assert len(set(keys)) == len(keys), sorted(keys)
    assert cause_of("environment", "n1: no GPU") != cause_of("crash", "n1: no GPU")


def test_hosts_without_a_digit_are_known_by_the_attempts_nodes() -> None:
    first = cause_of("environment", "alice, bob.site.org: no GPU on alice", ["alice", "bob"])
    assert first == cause_of("environment", "carol: no GPU on carol", ["carol", "dave"])
    assert cause_of("crash", "alicessen: bad", ["alice"]) == "crash: alicessen: bad"  # only whole words
    assert cause_of("crash", "x: bad", ["", "(", "*", "x" * 300]) == "crash: x: bad"


@pytest.mark.parametrize("verdict", ["lost", "hang", "stopped", "out_of_memory"])
def test_verdicts_that_say_all_need_no_words(verdict: str) -> None:
    assert cause_of(verdict, "n1, after step 4") == cause_of(verdict, "n2, no step yet") == verdict


@pytest.mark.parametrize(
    "text", ["1" * 10**6, "a" * 10**6, ("rank 3, " * 10**5), ":" * 10**6, ("#, " * 10**5), "n1 " * 10**5, "/tmp" * 10**5,
             "x\n" * 10**5, ("aé٣" * 10**5), "a.b-" * 10**5, "tmp." * 10**5, "0:" * 10**5, "jan " * 10**5]
)  # fmt: skip
def test_a_hostile_reason_costs_no_time(text: str) -> None:
    began = time.process_time()
    key = cause_of("crash", text, [f"n{number}" for number in range(1000)])
    assert time.process_time() - began < 10  # what grows with the square takes minutes
    assert len(key) < 1000


def test_what_may_be_chance_and_what_is_temporary() -> None:
    assert may_be_a_machine("hang", "")
    assert may_be_a_machine("crash", "CUDA error: uncorrectable ECC error encountered")
    assert not may_be_a_machine("crash", "ValueError: invalid device ordinal")
    assert not may_be_a_machine("crash", "RuntimeError: Bootstrap : no socket interface found")
    assert is_temporary("lost", "")
    assert not is_temporary("environment", "n1: the image is damaged")
