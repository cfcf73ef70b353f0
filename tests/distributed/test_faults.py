"""A rank is killed, or hangs: every other rank raises, soon, and what a killed run leaves behind is whole.

Attention communicates at points: before and after numbers are told, heard or swapped, and every exchange begun, waited
for and finished, forward and backward, first call (with its plan) and later ones. A rank goes at one of them. While a
checkpoint is saved it goes at any call of any Python function.

`make stress` kills 200 ranks and writes the record: how many, and how long the slowest survivor took to raise.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from dilated_attention_pytorch import GlobalTokens, RandomBlocks, SlidingWindow
from dilated_attention_pytorch.distributed import (
    Placement,
    agreement,
    control,
    exchange,
    plan,
    ring,
    ring_block_sparse_attention,
)
from tests.distributed import test_agreement, test_refusals
from tests.distributed.processes import ByRank, Processes, RankError, join
from tests.distributed.test_example import EXAMPLE, example, torchrun
from tests.distributed.work import call as call_of_ring

TIMEOUT = 5.0  # of the group, in seconds: for a busy machine, where a rank may be slow and not dead
SLACK = 15.0  # what a survivor may take besides, on such a machine
PATTERNS = [SlidingWindow(40, 40) | GlobalTokens(4), RandomBlocks(2, block_size=16), SlidingWindow(200, 0)]
CALLS = 3
NUM_POINTS = 60  # more than a rank passes in 3 calls of 4 ranks
STEPS, TOKENS = 3, 320  # of training; a checkpoint after each step


def go(pipe, how):
    """Say so, and go: SIGKILL kills, SIGSTOP makes a rank that hangs."""
    pipe.send("gone")
    os.kill(os.getpid(), how)


def at_point(fate, action):
    """Do it at the fate-th point of communication; returns how many there were."""
    passed = [0]

    def point():
        passed[0] += 1
        if passed[0] == fate:
            action()

    def with_points(function):
        def guarded(*args, **options):
            point()
            result = function(*args, **options)
            point()
            return result

        return guarded

    agreement.begin_gather = with_points(control.begin_gather)
    control.Gathering.wait = with_points(control.Gathering.wait)
    plan.gather_numbers, plan.swap = with_points(control.gather_numbers), with_points(control.swap)
    for name in ("exchange", "broadcast", "add_up"):
        setattr(ring, name, with_points(getattr(exchange, name)))
    for name in ("wait", "finish"):
        setattr(exchange.Pending, name, with_points(getattr(exchange.Pending, name)))
    return passed


def in_save(run_class, fate, action):
    """Do it at the fate-th call of a function while checkpoints are saved; returns how many calls there were."""
    save, calls = run_class.save, [0]

    def count(frame, event, arg):
        if event in ("call", "c_call"):
            calls[0] += 1
            if calls[0] == fate:
                action()

    def counted(self, folder):
        sys.setprofile(count)
        try:
            save(self, folder)
        finally:
            sys.setprofile(None)

    run_class.save = counted
    return calls


def tell(pipe, work, *args):
    """How the work of this rank ends: what it returned or raised."""
    faulthandler.dump_traceback_later(TIMEOUT + SLACK - 1)  # says where it hangs
    try:
        pipe.send(("finished", work(*args)))
    except Exception as error:  # noqa: BLE001 - told to the test
        pipe.send((type(error).__name__, str(error)))
    os._exit(0)


def attend(rank, size, port, pipe, patterns, fate, how):
    """A few calls of attention with gradients."""
    join(rank, size, port)
    group = torch.distributed.new_group(timeout=timedelta(seconds=TIMEOUT))
    pipe.send("ready")
    if fate:
        at_point(fate, lambda: go(pipe, how))

    def work():
        for pattern in patterns:
            q, k, v = (torch.randn(1, 96, 2, 8, requires_grad=True) for _ in range(3))
            # With a placement the ranks exchange while they hear of each other.
            placement = Placement.contiguous(size * 96, size, block_size=16) if pattern == PATTERNS[2] else None
            ring_block_sparse_attention(q, k, v, pattern, group=group, placement=placement).sum().backward()
        if fate:
            go(pipe, how)
        ring_block_sparse_attention(q, k, v, pattern, group=group)  # the rank that went is not there

    tell(pipe, work)


def train(rank, size, port, pipe, folder, fate, saving):
    """The example, from the newest checkpoint to the last step: its losses, its points and the calls in its saves."""
    join(rank, size, port)
    group = torch.distributed.new_group(timeout=timedelta(seconds=TIMEOUT))
    pipe.send("ready")
    module = example()
    points = at_point(0 if saving else fate, lambda: go(pipe, signal.SIGKILL))
    calls = in_save(module.Run, fate if saving else 0, lambda: go(pipe, signal.SIGKILL))

    def work():
        options = {"tokens": TOKENS, "dtype": torch.float64, "checkpoints": Path(folder), "every": 1}
        return module.train(group, steps=STEPS, **options), (points[0], calls[0])

    tell(pipe, work)


def answer(pipe, seconds, what):
    assert pipe.poll(seconds), f"{what} is silent"
    return pipe.recv()


def without_one(size, doomed, target, *args):
    """What the survivors of a rank that goes told, and how long the slowest took."""
    ranks = Processes(size, target, *args)
    try:
        for rank, pipe in enumerate(ranks.pipes):
            assert answer(pipe, 60, f"rank {rank} of {size}, at the start,") == "ready"
        assert answer(ranks.pipes[doomed], 60, f"rank {doomed} of {size}, to go,") == "gone"
        gone, told = time.monotonic(), []
        for rank, pipe in enumerate(ranks.pipes):
            if rank != doomed:
                left = gone + TIMEOUT + SLACK - time.monotonic()
                told.append(answer(pipe, left, f"rank {rank} of {size}, without rank {doomed},"))
        return told, time.monotonic() - gone
    finally:
        ranks.close()


def drawn(seed, *spans):
    draw = torch.Generator().manual_seed(seed)
    return [int(torch.randint(*span, (), generator=draw)) for span in spans]


def lose_one(seed, how):
    """Which rank goes, at which point, in which ring and pattern follows from the seed. Seconds of the slowest."""
    size, doomed, fate = drawn(seed, (2, 5), (0, 12), (1, NUM_POINTS))
    doomed %= size
    fates = ByRank(fate if rank == doomed else 0 for rank in range(size))
    told, seconds = without_one(size, doomed, attend, [PATTERNS[seed % len(PATTERNS)]] * CALLS, fates, how)
    for kind, text in told:
        assert kind == "RingError", (seed, size, doomed, fate, kind, text)
        assert text.startswith("the ring is broken: "), text
    return seconds


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_is_noticed(seed):
    lose_one(seed, signal.SIGKILL)


def test_a_rank_killed_while_the_others_learn_of_a_difference_is_noticed():
    """They differ in their patterns; one goes after the numbers that say so, before the words."""
    patterns = ByRank([[PATTERNS[0]], [PATTERNS[0]], [PATTERNS[2]]])
    told, _ = without_one(3, 0, attend, patterns, ByRank([4, 0, 0]), signal.SIGKILL)
    for kind, text in told:
        assert kind == "RingError"
        assert text.startswith("the ring is broken: the agreement on a call of all ranks failed"), text


@pytest.fixture(scope="session")
def outcomes():
    """Seconds that the slowest survivor took to raise (torchrun: to the end), by kind; a record, if asked for one."""
    seconds = {}
    yield seconds
    if "RING_FAULTS" in os.environ:
        kinds = {kind: {"ranks": len(each), "slowest_seconds": round(max(each), 2)} for kind, each in seconds.items()}
        record = {"command": "make stress", "torch": torch.__version__, "timeout": TIMEOUT, "kinds": kinds}
        Path(os.environ["RING_FAULTS"]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2, 152))
def test_a_rank_killed_anywhere_is_noticed(seed, outcomes):
    outcomes.setdefault("killed in attention", []).append(lose_one(seed, signal.SIGKILL))


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(200, 210))
def test_a_rank_that_hangs_is_noticed_by_the_timeout(seed, outcomes):
    outcomes.setdefault("hangs in attention", []).append(lose_one(seed, signal.SIGSTOP))


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(300, 360))
def test_a_call_that_one_rank_makes_otherwise(seed, ranks, outcomes):
    """In any module or operator, after any number of good calls: every rank is told what differs or who refused."""
    good_calls, doomed, which = drawn(seed, (0, 3), (0, 3), (0, 10**6))
    if seed % 2:
        names = list(test_agreement.DIFFERENCES)
        changes, message = test_agreement.DIFFERENCES[names[which % len(names)]]
        kept = {"placement": test_agreement.CONTIGUOUS, "agreement": ["first", "always"][which // 100 % 2]}
        work, good = call_of_ring, (test_agreement.call(**kept),)
        odd = test_agreement.call(**{**kept, **changes})
        message = {"placement": "placement: "}.get(names[which % len(names)], message.split(":")[0])
        if names[which % len(names)] == "placement":
            odd = test_agreement.call(**{**kept, "placement": None})
    else:
        name = list(test_refusals.MODULES)[which % len(test_refusals.MODULES)]
        faults = test_refusals.faults_of(name)
        odd = list(faults)[which // 100 % len(faults)]
        work, good, message = test_refusals.called, (name, None), faults[odd][1]
    for _ in range(good_calls):
        expected = ranks.run(3, work, *good)
    started = time.monotonic()
    with pytest.raises(RankError) as failed:
        ranks.run(3, work, *good[:-1], ByRank(odd if rank == doomed else good[-1] for rank in range(3)))
    outcomes.setdefault("makes another call, or refuses it", []).append(time.monotonic() - started)
    assert sorted(failed.value.errors) == [0, 1, 2]
    assert all(message in text for _, text in failed.value.errors.values()), failed.value.errors
    again = ranks.run(3, work, *good)  # nothing is left over
    assert not good_calls or again == expected


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The losses, checkpoints and each rank's chances to die of a run that nobody disturbs, by its number of ranks."""
    runs = {}
    for size in (2, 3):
        folder = tmp_path_factory.mktemp(f"of_{size}")
        ranks = Processes(size, train, str(folder), 0, False)
        told = [(pipe.recv(), pipe.recv())[1] for pipe in ranks.pipes]
        ranks.close()
        assert all(kind == "finished" for kind, _ in told), told
        runs[size] = told[0][1][0], checkpoints(folder), [chances for _, (_, chances) in told]
    return runs


@cache
def state():
    """What a checkpoint holds, to be overwritten."""
    run = example().Run(TOKENS, None, torch.float64)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer, "step": 0}


def checkpoints(folder):
    """All tensors of every checkpoint that has the name of a whole one."""
    found = {}
    for path in sorted(folder.glob("step-*")):
        got = dict(state())
        dcp.load(got, checkpoint_id=path, no_dist=True)
        assert path.name == f"step-{got['step']:06d}"
        moments = {f"{name} {key}": x for name, each in got["optimizer"]["state"].items() for key, x in each.items()}
        found[path.name] = {name: x.clone() for name, x in {**got["model"], **moments}.items()}
    return found


def assert_whole(folder, expected):
    found = checkpoints(folder)
    assert found.keys() <= expected.keys()
    for name, tensors in found.items():
        torch.testing.assert_close(tensors, expected[name], rtol=0, atol=1e-9)
    return len(found)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(42))
def test_a_killed_run_leaves_whole_checkpoints_and_is_resumed(seed, tmp_path, undisturbed, outcomes):
    """Killed in attention or in a save; then as many ranks as before, or others, go on to the losses of no accident."""
    size, doomed, other, fate = drawn(seed, (2, 4), (0, 6), (1, 4), (1, 10**6))
    doomed, saving = doomed % size, seed % 3 > 0
    losses, whole, chances = undisturbed[size]
    fate = 1 + fate % (chances[doomed][saving] * 9 // 10)  # their number differs a little from run to run
    fates = ByRank(fate if rank == doomed else 0 for rank in range(size))
    told, seconds = without_one(size, doomed, train, str(tmp_path), fates, saving)
    assert all(kind != "finished" for kind, _ in told), told
    done = assert_whole(tmp_path, whole)
    ranks = Processes(other, train, str(tmp_path), 0, False)
    again = [(pipe.recv(), pipe.recv())[1] for pipe in ranks.pipes]
    ranks.close()
    for kind, result in again:
        assert kind == "finished", result
        assert result[0] == pytest.approx(losses[done:], abs=1e-9)
    assert assert_whole(tmp_path, whole) == STEPS
    outcomes.setdefault("killed in a save" if saving else "killed in training", []).append(seconds)


DOOMED = """
import os, signal, sys
sys.argv[0] = {example!r}
from tests.distributed.test_faults import at_point, example, in_save
module = example()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "{doomed}":
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    if {saving}:
        in_save(module.Run, {fate}, die)
    else:
        at_point({fate}, die)
module.main()
"""


@pytest.fixture(scope="session")
def undisturbed_torchrun():
    """The last loss of a run that nobody disturbs, by its number of ranks."""
    steps = "--steps", str(STEPS), "--tokens", str(TOKENS)
    return {size: torchrun("--nproc-per-node", str(size), "--", *steps)[0]["loss"] for size in (2, 3)}


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(8))
def test_torchrun_restarts_a_killed_run(seed, tmp_path, undisturbed, undisturbed_torchrun, outcomes):
    """A rank dies in the first attempt; all are started again, resume, and end with the loss of no accident."""
    size, doomed, fate = drawn(seed, (2, 4), (0, 6), (1, 10**6))
    doomed, saving = doomed % size, seed % 2 == 1
    fate = 1 + fate % (undisturbed[size][2][doomed][saving] * 9 // 10)
    script, folder = tmp_path / "doomed.py", tmp_path / "checkpoints"
    script.write_text(DOOMED.format(example=str(EXAMPLE), doomed=doomed, fate=fate, saving=saving))
    folder.mkdir()
    started = time.monotonic()
    result, run = torchrun(
        "--nproc-per-node", str(size), "--max-restarts", "2", "--",
        "--steps", str(STEPS), "--checkpoints", str(folder), "--every", "1", "--tokens", str(TOKENS),
        script=script,
    )  # fmt: skip
    assert "exitcode: -9" in run.stderr, "nobody was killed"
    assert result["step"] == STEPS
    assert result["loss"] == pytest.approx(undisturbed_torchrun[size], abs=1e-6)
    outcomes.setdefault("killed and restarted by torchrun", []).append(time.monotonic() - started)
