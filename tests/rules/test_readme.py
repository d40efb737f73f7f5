"""README says what is true: its code runs, its commands parse, CI runs its test command."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from test_packaging import run

import mics_fn as mf
from mics_fn.__main__ import FILES
from mics_fn.groups.startup import read_launch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in FENCES if language == "python"]
TRAINER, LOOP, BY_HAND, AS_SHARDS, PRECISION, SAVED, LORA, PLACED = PYTHON
SCRIPT = TRAINER + BY_HAND + 'print(f"rank {groups.rank}: loss {loss.item():.3f}")\n'
SHELL = [line for language, code in FENCES if language == "bash" for line in code.splitlines()]


def run_readme(folder: str) -> dict:
    """All blocks of code on this rank, in the order in which they are read, and what they leave.

    A block goes on with what those before it left, whatever a test looks at in between.

    Args:
        folder: for checkpoints, instead of one in the current folder.
    """
    names: dict = {}

    def run(title: str, code: str) -> dict:
        exec(compile(code, f"README: {title}", "exec"), names)
        return names

    run("Trainer", TRAINER)
    groups = names["groups"]
    found = {"groups": groups.describe(), "full": names["full"]}
    found["held_out"] = names["held_out"].item()
    found["history"] = [m.loss.item() for m in names["history"]]
    run("a loop", LOOP)
    found["loop"] = names["tested"].item(), names["m"].samples, names["rate"](names["m"].step - 1)
    found["looped"] = names["trainer"].params()
    run("by hand", BY_HAND)
    found |= {"step": names["state"].step, "loss": names["loss"].item()}
    found["by_hand"] = mf.unshard(names["state"].params, groups)
    trainer = run("a model made as shards", AS_SHARDS)["trainer"]
    made, history = trainer.params(), trainer.fit(names["batches"](20), 20, progress=False)
    found["made"] = made, [m.loss.item() for m in history]
    trainer = run("precision and guard", PRECISION)["trainer"]
    history = trainer.fit(names["batches"](20), steps=20, progress=False)
    found["bf16"] = history[0].loss.item(), history[-1].loss.item()
    found["dtypes"] = {leaf.bucket.compute for leaf in trainer.state.params.values()}
    found["accepted"] = [m.accepted for m in history], trainer.state.step
    found["scale"], found["norm"] = history[-1].scale, history[-1].grad_norm.item()
    saved = SAVED.replace('"run"', repr(folder))
    trainer = run("checkpoints", saved)["trainer"]
    run("checkpoints, a new job", saved.partition("trainer.fit")[0])
    found["went_on"] = mf.checkpoint.steps(folder), names["trainer"].state.step
    found["kept"] = trainer.params(), names["trainer"].params()
    found["places"] = []
    for scheme in ("zero2", "zero1", "hpz", "hybrid"):
        run(f"placement {scheme}", PLACED.replace('"zero2"', f'"{scheme}"'))
        names["trainer"].fit(names["batches"](5), steps=5, progress=False)
        found["places"].append(names["trainer"].params())
        names["everywhere"].close()
    groups.close()
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.short("4")
def test_its_code_trains_and_all_ways_agree(n: int, ranks, tmp_path: Path):
    found = ranks(n).run(run_readme, f"{tmp_path}")
    assert {one["groups"] for one in found} == {
        f"n={n} p={n} levels={f'rank:{n}' if n > 1 else 'none'}"
    }
    alone = run_alone(n)
    for one in found:
        check_trainers(one, found[0])
        check_loop(one, found[0], n)
        check_precision_and_placements(one)
        assert one["went_on"] == ([10, 20], 20)
        same_values(one["kept"][1], one["kept"][0])
    same_values(found[0]["by_hand"], alone, rtol=1e-3, atol=1e-4)
    mean = sum(one["loss"] for one in found) / n
    assert mean == pytest.approx(found[0]["history"][-1], rel=1e-4)


def same_values(found: dict, expected: dict, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


def check_trainers(one: dict, first: dict) -> None:
    """What `Trainer`, the loop by hand and a model made as shards give is the same."""
    assert one["step"] == len(one["history"]) == 20
    assert one["held_out"] == first["held_out"] < 0.8 * one["history"][0]
    assert one["history"][-1] < 0.8 * one["history"][0]
    same_values(one["made"][0], dict(plain_model().named_parameters()))
    assert one["made"][1] == pytest.approx(one["history"], rel=1e-4)
    same_values(one["by_hand"], first["by_hand"])
    same_values(one["full"], first["full"])
    # The same mathematics, which may add up the same numbers in another order.
    same_values(one["full"], one["by_hand"], rtol=1e-4, atol=1e-5)


def check_loop(one: dict, first: dict, n: int) -> None:
    """Valid labels are counted on all ranks."""
    tested, samples, rate = one["loop"]
    assert tested == first["loop"][0] < one["history"][0]
    assert samples == 16 * n
    assert rate == mf.optim.warmup_cosine(1e-2, 4, 96)(2 * 768 // (16 * n) - 1)
    same_values(one["looped"], loop_alone(n), rtol=1e-3, atol=1e-4)


def check_precision_and_placements(one: dict) -> None:
    first, last = one["bf16"]
    assert last < first
    assert one["dtypes"] == {torch.bfloat16}
    assert one["accepted"] == ([True] * 20, 20)  # none overflows
    assert one["scale"] == 2.0**16
    assert 0 < one["norm"] < 10
    for params in one["places"][1:]:
        same_values(params, one["places"][0], rtol=1e-4, atol=1e-5)


def plain_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    return torch.nn.Sequential(*layers)


def loop_alone(n: int) -> dict[str, torch.Tensor]:
    """README's loop in plain torch, over the batches of n ranks as one."""
    names: dict = {}
    exec(LOOP.partition("sampler =")[0], {**vars(torch), "torch": torch}, names)
    model, rate = plain_model(), mf.optim.warmup_cosine(1e-2, 4, 96)
    optimizer, step = torch.optim.AdamW(model.parameters()), 0
    for epoch in range(2):
        order = torch.randperm(768, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(16 * n):
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            x, y = (each[chosen] for each in names["data"].tensors)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
    return {name: value.detach() for name, value in model.named_parameters()}


def run_lora() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """README's LoRA: losses, and parameters before and after."""
    names: dict = {}
    exec(TRAINER.partition("trainer =")[0] + LORA, names)
    trainer = names["trainer"]
    before = trainer.params()
    history = trainer.fit(names["batches"](20), steps=20, progress=False)
    after = trainer.state_dict()
    names["lora"].load_state_dict(after)
    names["groups"].close()
    return [m.loss.item() for m in history], before, after


def test_its_lora_trains_adapters_alone(ranks):
    pytest.importorskip("peft")
    for losses, before, after in ranks(2).run(run_lora):
        assert sum(losses[-5:]) < sum(losses[:5])
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        assert len(changed) == 4
        assert all("lora_" in name for name in changed)


def run_alone(n: int) -> dict[str, torch.Tensor]:
    """README's model after 20 steps of plain torch on the samples of n ranks."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    draws = [torch.Generator().manual_seed(rank) for rank in range(n)]
    for _ in range(20):
        x = torch.cat([torch.randn(16, 32, generator=draw) for draw in draws])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.thorough
def test_its_script_runs_under_torchrun(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(*launcher, str(script), cwd=tmp_path, path=ROOT, OMP_NUM_THREADS="1")
    assert sorted(re.findall(r"rank (\d): loss \d\.\d+", said)) == ["0", "0", "1", "1"]


def test_its_torchrun_lines_parse():
    from torch.distributed.run import get_args_parser

    lines = [line for line in SHELL if "torchrun" in line]
    found = [get_args_parser().parse_args(shlex.split(x, comments=True)[1:]) for x in lines]
    assert [parsed.training_script for parsed in found] == ["train.py", "train.py", "mics_fn"]
    assert (found[2].module, found[2].training_script_args) == (True, ["doctor"])
    for parsed in found:
        # Its other rendezvous unpickles what anybody writes to a port that is open to all.
        assert (parsed.rdzv_backend, parsed.standalone) == ("static", False)


def test_its_slurm_script_sets_what_a_job_of_several_nodes_needs():
    env = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "32"}
    env |= {"SLURM_LOCALID": "1", "SLURM_NNODES": "4"}
    with pytest.raises(mf.errors.GroupsError) as error:
        read_launch(env)
    line = str(error.value).splitlines()[-1].partition("batch script: ")[2]
    assert line.startswith("export MASTER_ADDR=")
    assert line in SHELL


COMMANDS = sorted(set(re.findall(r"python -m ((?:mics_fn|tests\.stress) [\w -]+)", README)))


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_parse(command: str):
    module, name, *flags = shlex.split(command)
    parser = argparse.ArgumentParser(exit_on_error=False)
    if module == "mics_fn":
        importlib.import_module(f"mics_fn.lab.{FILES.get(name, name)}").add_arguments(parser)
    else:
        importlib.import_module("tests.stress.__main__").STRESS[name](parser)
    if flags != ["--help"]:
        parser.parse_args(flags)


def test_its_files_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_its_test_command():
    line = [line for line in SHELL if line.endswith("-m pytest")]
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -E '(.*)' README.md", script)
    assert pattern is not None
    assert re.findall(pattern[1], README, flags=re.MULTILINE) == line
    ran = [text for text in script.splitlines() if text.startswith('bash -c "${command')]
    assert ran == [
        'bash -c "${command% && *}"',
        'bash -c "${command##* && }" || failed=$?',
        'bash -c "${command##* && } -m thorough" || failed=$?',
    ]


def test_it_is_no_longer_than_it_was():
    assert len(README.splitlines()) <= 243
